from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box

from bench.probes import Counting, CountingVector
from impala_async.envs.agents import AgentEnvs
from impala_async.envs.batch import EnvBatch, as_flag, as_flags, as_reward, as_rewards
from impala_async.envs.vector import SerialEnvs, VectorEnvs
from impala_async.errors import EnvError
from tests.envs.test_agents import Lives

MANY = np.array([True, False])


@pytest.mark.parametrize("value", [1.5, 3, True, np.float16(1.5), np.int8(3), np.array([2.5])])
def test_a_reward_is_any_number(value: Any) -> None:
    assert as_reward(value) == value


@pytest.mark.parametrize("value", ["1.5", None, MANY, [1.0, 2.0], [[1], [2, 3]], 1j, {}, Box(0, 1)])
def test_another_reward_is_refused(value: Any) -> None:
    with pytest.raises(EnvError, match=r"^reward in step: wants a number, got .+ \(\w+\)$"):
        as_reward(value)


@pytest.mark.parametrize("value", [True, np.True_, 1, 1.0, np.array([True]), np.ones((), int)])
def test_a_flag_is_any_truth(value: Any) -> None:
    assert as_flag(value, "terminated") is True
    assert as_flag(type(value)(0) if np.isscalar(value) else value * 0, "terminated") is False


@pytest.mark.parametrize("value", ["False", None, MANY, 2, np.nan, [], {}])
def test_another_flag_is_refused(value: Any) -> None:
    with pytest.raises(EnvError, match=r"^truncated in step: wants True or False, got .+ \(\w+\)$"):
        as_flag(value, "truncated")


def test_of_many_columns_each_has_its_own() -> None:
    assert as_rewards([1, 2.5], "rewards", 2).tolist() == [1, 2.5]
    assert as_flags(MANY, "terminated", 2) is MANY
    assert as_flags([1, 0], "terminated", 2).tolist() == [True, False]
    for values in (np.float32(1), [1.0], ["1", "2"], [None, 1.0]):
        with pytest.raises(
            EnvError, match=r"rewards in step: wants a number for each of 2 columns, got"
        ):
            as_rewards(values, "rewards", 2)
    for values in (True, [True], ["True", "False"], [None, True], [2, 0]):
        with pytest.raises(EnvError, match="terminated in step: wants True or False"):
            as_flags(values, "terminated", 2)


def changed(result: Any, at: int, value: Any) -> Any:
    return (*result[:at], value, *result[at + 1 :])


class Alone(Counting):
    """Gives something else in one place, from the third step on."""

    def __init__(self, at: int, value: Any) -> None:
        super().__init__(length=99)
        self._at, self._value = at, value

    def step(self, action: Any) -> Any:
        result = super().step(action)
        return result if self._step < 3 else changed(result, self._at, self._value)


class Together(Lives):
    """The same for the second of two agents."""

    def __init__(self, at: int, value: Any) -> None:
        super().__init__((99, 99))
        self._at, self._value = at, value

    def step(self, actions: Any) -> Any:
        result = super().step(actions)
        if self.num_steps < 3:
            return result
        return changed(result, self._at, result[self._at] | {"agent_1": self._value})


class Vector(CountingVector):
    """The same for the second of two columns."""

    def __init__(self, at: int, value: Any) -> None:
        super().__init__(2, (99, 99))
        self._at, self._value, self._age = at, value, 0

    def step(self, actions: Any) -> Any:
        result = super().step(actions)
        self._age += 1
        if self._age < 3:
            return result
        return changed(result, self._at, [result[self._at][0], self._value])


@pytest.mark.parametrize(
    ("at", "name", "value"),
    [
        *[(1, "reward", value) for value in ("1.5", None)],
        *[(place, "t", value) for place in (2, 3) for value in ("False", None, 3)],
    ],
)
@pytest.mark.parametrize("kind", ["serial", "agents", "vector"])
def test_what_is_returned_is_looked_at_in_every_step(
    kind: str, at: int, name: str, value: Any
) -> None:
    envs: EnvBatch
    if kind == "serial":
        envs = SerialEnvs([Alone(at, value)], name="my:Env")
    elif kind == "agents":
        envs = AgentEnvs([Together(at, value)], name="my:Env")
    else:
        envs = VectorEnvs(Vector(at, value), name="my:Env")
    acts = {"": np.zeros(envs.num_envs, np.int32)}
    envs.reset(0)
    envs.step(acts)
    envs.step(acts)
    with pytest.raises(EnvError, match=f"^my:Env: {name}.* in step: wants .*, got [^\n]*$"):
        envs.step(acts)


@pytest.mark.parametrize("values", [np.ones(1, np.float32), 1.0])
def test_a_vector_gives_no_number_for_all_columns_in_a_later_step(values: Any) -> None:
    class Flat(Vector):
        def step(self, actions: Any) -> Any:
            result = super().step(actions)
            return result if self._age < 3 else changed(result, self._at, values)

    for at in range(4):
        envs = VectorEnvs(Flat(at, 0))
        envs.reset(0)
        acts = {"": np.zeros(2, np.int32)}
        envs.step(acts)
        envs.step(acts)
        with pytest.raises(EnvError, match=r"in step: .* (shape|columns)"):
            envs.step(acts)
