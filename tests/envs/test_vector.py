from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from numpy.typing import NDArray

from bench.probes import (
    ActionReward,
    Counting,
    CountingVector,
    Endless,
    Failing,
    NotFinite,
)
from impala_async.envs.batch import EnvBatch, Step, spread_seed
from impala_async.envs.vector import SerialEnvs, VectorEnvs
from impala_async.errors import EnvError

Mode = AutoresetMode


class NestedObs(gym.Env):
    """Two leaves, of which one is the count of steps; ends after two of them.

    Shows the same arrays every time, as an environment may.
    """

    def __init__(self) -> None:
        self.observation_space = Dict(
            {"count": Box(-9, 9, (), np.int64), "a": Dict({"b": Box(0, 255, (2, 2), np.uint8)})}
        )
        self.action_space = Discrete(2)
        self.count = np.zeros((), np.int64)
        self.pixels = np.zeros((2, 2), np.uint8)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.count[...] = 0
        self.pixels[...] = 7
        return self._show(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        self.count += 1
        self.pixels += 1
        return self._show(), 0.5, bool(self.count == 2), False, {}

    def _show(self) -> dict:
        return {"count": self.count, "a": {"b": self.pixels}}


class Wrong(Counting):
    """Shows something that its space does not describe."""

    def __init__(self, obs: Any) -> None:
        super().__init__()
        self.obs = obs

    def _first(self) -> Any:
        return self.obs


def acts(*actions: int) -> dict[str, NDArray[np.int32]]:
    return {"": np.array(actions, np.int32)}


def copied(step: Step) -> tuple[Any, ...]:
    """A step that outlives the next one."""
    obs = {name: array.copy() for name, array in step.obs.items()}
    return obs, step.rewards.copy(), step.terminated.copy(), step.truncated.copy()


def run(envs: EnvBatch, seed: int, num_steps: int) -> list[Any]:
    """Everything that random actions (always the same) lead to, from the reset on."""
    rng = np.random.default_rng(5)
    num_choices = envs.action_spec.parts[0].choices[0]
    seen: list[Any] = [{name: array.copy() for name, array in envs.reset(seed).items()}]
    for _ in range(num_steps):
        seen.append(copied(envs.step(acts(*rng.integers(num_choices, size=envs.num_envs)))))
    return seen


def make_single(env_id: str, **kwargs: Any) -> gym.Env:
    return gym.make(env_id, disable_env_checker=True, **kwargs)


def cartpole_vector(num_envs: int, **kwargs: Any) -> VectorEnvs:
    mode = gym.VectorizeMode.VECTOR_ENTRY_POINT
    return VectorEnvs(gym.make_vec("CartPole-v1", num_envs, vectorization_mode=mode, **kwargs))


# -------------------------------------------------------------------------------------- serial envs


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Acrobot-v1", "MountainCar-v0"])
def test_serial_envs_are_bit_equal_to_gymnasiums_own_vector(env_id: str) -> None:
    def single() -> gym.Env:
        return make_single(env_id, max_episode_steps=23)

    serial = run(SerialEnvs([single() for _ in range(3)]), 7, 120)
    vector = run(VectorEnvs(SyncVectorEnv([single] * 3)), 7, 120)
    np.testing.assert_equal(serial, vector)
    assert any(step[3].any() for step in serial[1:]), "nothing was truncated"


def test_serial_envs_of_nested_observations_are_bit_equal_too() -> None:
    serial = run(SerialEnvs([NestedObs(), NestedObs()]), 7, 9)
    vector = run(VectorEnvs(SyncVectorEnv([NestedObs, NestedObs])), 7, 9)
    np.testing.assert_equal(serial, vector)
    counts = [obs["count"].tolist() for obs, *_ in serial[1:5]]
    assert counts == [[1, 1], [2, 2], [0, 0], [1, 1]]
    assert serial[1][0]["a/b"].dtype == np.uint8


def test_a_dict_of_one_box_is_not_a_plain_array() -> None:
    class OneKey(Counting):
        def __init__(self) -> None:
            super().__init__()
            self.observation_space = Dict({"": Box(0, 9, (3,))})

        def _first(self) -> Any:
            return {"": super()._first()}

        def step(self, action: Any) -> Any:
            obs, *rest = super().step(action)
            return {"": obs}, *rest

    envs = SerialEnvs([OneKey()])
    envs.reset(0)
    assert envs.step(acts(0)).obs[""].tolist() == [[0, 0, 1]]


def test_the_step_after_an_end_resets_and_ignores_the_action() -> None:
    envs = SerialEnvs([Counting(1), Counting(2)])
    assert envs.reset(0)[""].tolist() == [[0, 0, 0], [0, 0, 0]]
    seen = []
    for _ in range(4):
        obs, rewards, terminated, truncated = copied(envs.step(acts(1, 1)))
        assert not truncated.any()
        seen.append((obs[""][:, 1:].tolist(), rewards.tolist(), terminated.tolist()))
    assert seen == [
        ([[0, 1], [0, 1]], [11, 11], [True, False]),
        ([[1, 0], [0, 2]], [0, 12], [False, True]),
        ([[1, 1], [1, 0]], [11, 0], [True, False]),
        ([[2, 0], [1, 1]], [0, 11], [False, False]),
    ]


@pytest.mark.parametrize("ends", ["terminated", "truncated", "both"])
def test_both_flags_come_through(ends: Any) -> None:
    for envs in (SerialEnvs([Counting(1, ends)]), VectorEnvs(CountingVector(1, (1,), ends=ends))):
        envs.reset(0)
        step = envs.step(acts(0))
        assert bool(step.terminated[0]) == (ends != "truncated")
        assert bool(step.truncated[0]) == (ends != "terminated")


@pytest.mark.parametrize(
    "envs",
    [SerialEnvs([Counting(2), Counting(3)]), VectorEnvs(CountingVector(2, (2, 3)))],
    ids=["serial", "vector"],
)
def test_a_reset_in_the_midst_of_things_forgets_them(envs: EnvBatch) -> None:
    envs.reset(0)
    while not envs.step(acts(0, 0)).terminated.any():
        pass
    envs.reset(0)
    step = envs.step(acts(0, 0))
    assert step.obs[""][:, 2].min() > 0, "this must not be another reset"
    assert not step.terminated.any()


def test_actions_start_where_the_space_does() -> None:
    for start in (0, 5, -1):
        envs = SerialEnvs([ActionReward(3, start) for _ in range(3)])
        envs.reset(0)
        assert envs.step(acts(0, 1, 2)).rewards.tolist() == [0, 1, 2]
        vector = VectorEnvs(SyncVectorEnv([lambda start=start: ActionReward(3, start)] * 3))
        vector.reset(0)
        assert vector.step(acts(0, 1, 2)).rewards.tolist() == [0, 1, 2]


def test_serial_envs_write_into_the_same_arrays_every_time() -> None:
    envs = SerialEnvs([Counting(3)])
    envs.reset(0)
    first = envs.step(acts(0))
    second = envs.step(acts(0))
    assert second.obs[""] is first.obs[""]
    assert second.rewards is first.rewards


def test_observations_that_are_not_finite_are_left_to_ingest() -> None:
    envs = SerialEnvs([NotFinite(after=0)])
    envs.reset(0)
    assert np.isnan(envs.step(acts(0)).obs[""]).all()


def test_what_an_environment_raises_is_an_env_error_with_its_cause() -> None:
    vector = VectorEnvs(SyncVectorEnv([lambda: Failing(after=2, length=9)]))
    for envs in (SerialEnvs([Failing(after=2, length=9)]), vector):
        envs.reset(0)
        envs.step(acts(0))
        envs.step(acts(0))
        with pytest.raises(EnvError, match="in step: RuntimeError: this probe") as caught:
            envs.step(acts(0))
        assert isinstance(caught.value.__cause__, RuntimeError)


def test_what_it_raises_in_reset_is_one_too() -> None:
    class NoReset(Counting):
        def _first(self) -> Any:
            raise LookupError("no level left")

    for envs in (SerialEnvs([NoReset()]), VectorEnvs(SyncVectorEnv([NoReset]))):
        with pytest.raises(EnvError, match="in reset: LookupError: no level left"):
            envs.reset(0)


@pytest.mark.parametrize(
    ("obs", "text"),
    [
        (np.zeros(2, np.float32), r"promises shape \(3,\), it has \(2,\)"),
        (np.float32(0), r"it has \(\)"),
        ("ab", "promises float32|has"),
        ({"a": 0}, "promises"),
    ],
)
def test_an_environment_that_breaks_its_space_is_refused_at_reset(obs: Any, text: str) -> None:
    with pytest.raises(EnvError, match=text):
        SerialEnvs([Wrong(obs)]).reset(0)

    class WrongVector(CountingVector):
        def reset(self, **kwargs: Any) -> Any:
            return obs, {}

    with pytest.raises(EnvError, match="promises"):
        VectorEnvs(WrongVector(1)).reset(0)


def test_all_environments_are_closed_and_a_failure_is_told() -> None:
    closed = []

    class Closing(Counting):
        def close(self) -> None:
            closed.append(self)
            if len(closed) == 1:
                raise OSError("device is busy")

    with pytest.raises(EnvError, match="device is busy"):
        SerialEnvs([Closing(), Closing()]).close()
    assert len(closed) == 2


# -------------------------------------------------------------------------------------- seeds


def test_columns_and_neighbouring_seeds_differ_and_equal_seeds_do_not() -> None:
    def start(seed: int, is_vector: bool = False) -> NDArray[Any]:
        envs = (
            cartpole_vector(4)
            if is_vector
            else SerialEnvs([make_single("CartPole-v1") for _ in range(4)])
        )
        obs = envs.reset(seed)[""].copy()
        envs.close()
        return obs

    for is_vector in (False, True):
        np.testing.assert_array_equal(start(3, is_vector), start(3, is_vector))
        both = np.concatenate([start(3, is_vector), start(4, is_vector)])
        assert len(np.unique(both, axis=0)) == 8


def test_spread_seeds_leave_room_for_columns() -> None:
    seeds = [spread_seed(seed) for seed in range(500)]
    assert np.diff(np.sort(seeds)).min() > 4
    assert min(seeds) >= 0
    assert max(seeds) + 4096 < 2**31
    assert isinstance(seeds[0], int)


# -------------------------------------------------------------------------------------- vector envs


def test_the_vector_code_of_cartpole_follows_next_step() -> None:
    """Against single environments that are put into the states that its resets draw."""
    limit, num_envs = 25, 4
    envs = cartpole_vector(num_envs, max_episode_steps=limit)
    inner: Any = envs._env
    singles = [make_single("CartPole-v1", max_episode_steps=limit) for _ in range(num_envs)]

    def follow_reset(column: int) -> None:
        singles[column].reset()
        singles[column].unwrapped.state = inner.state[:, column].copy()  # type: ignore[attr-defined]

    envs.reset(3)
    for column in range(num_envs):
        follow_reset(column)
    rng = np.random.default_rng(1)
    was_over = [False] * num_envs
    num_ends = np.zeros(2, int)
    for _ in range(600):
        # Leaning to one side per episode terminates, alternating lasts until the limit.
        actions = np.where(rng.random(num_envs) < 0.15, 1, np.arange(num_envs) % 2)
        alternating = envs._env.steps % 2  # type: ignore[attr-defined]
        actions = np.where(np.arange(num_envs) < 2, alternating, actions)
        step = envs.step(acts(*actions))
        for column, env in enumerate(singles):
            mine = (step.rewards[column], step.terminated[column], step.truncated[column])
            if was_over[column]:
                assert mine == (0, False, False)
                assert np.abs(step.obs[""][column]).max() <= 0.05
                follow_reset(column)
                was_over[column] = False
                continue
            obs, *theirs, _ = env.step(int(actions[column]))
            np.testing.assert_allclose(step.obs[""][column], obs, rtol=1e-5, atol=1e-6)
            assert mine == tuple(theirs)
            was_over[column] = bool(mine[1] or mine[2])
            num_ends += mine[1:]
    assert num_ends.min() > 10, "both kinds of end must occur"


def test_rewards_are_float32_whatever_the_environment_gives() -> None:
    envs = VectorEnvs(CountingVector(2))
    envs.reset(0)
    step = envs.step(acts(0, 1))
    assert step.rewards.dtype == np.float32
    assert step.rewards.tolist() == [1, 11]
    single = SerialEnvs([Endless()])
    single.reset(0)
    assert single.step(acts(0)).rewards.dtype == np.float32


@pytest.mark.parametrize("mode", [Mode.NEXT_STEP, Mode.SAME_STEP, "NextStep", "SameStep"], ids=str)
def test_both_resetting_modes_are_read_from_the_metadata(mode: Any) -> None:
    env = CountingVector(2)
    env.metadata = {"autoreset_mode": mode}
    assert VectorEnvs(env).autoreset == Mode(mode)


@pytest.mark.parametrize(
    ("metadata", "found"),
    [
        ({}, "missing"),
        ({"autoreset_mode": Mode.DISABLED}, "DISABLED"),
        ({"autoreset_mode": "later"}, "later"),
    ],
)
def test_other_modes_are_refused_with_the_fix(metadata: dict, found: str) -> None:
    env = CountingVector(2)
    env.metadata = metadata
    with pytest.raises(EnvError, match=found) as caught:
        VectorEnvs(env)
    assert "set it to AutoresetMode.NEXT_STEP or AutoresetMode.SAME_STEP" in str(caught.value)


def test_final_observations_are_read_batched() -> None:
    envs = VectorEnvs(CountingVector(2, (1, 2), autoreset="SameStep"))
    envs.reset(0)
    step = envs.step(acts(0, 0))
    assert step.final_obs is not None
    assert step.final_obs[""][0].tolist() == [0, 0, 1]
    assert step.obs[""].tolist() == [[0, 1, 0], [1, 0, 1]]


def test_final_observations_are_read_one_per_column_and_nested() -> None:
    def later() -> gym.Env:
        env = NestedObs()
        env.reset()
        env.step(0)
        return env

    # SyncVectorEnv keeps the environment's own arrays, so let each show new ones.
    kinds = [lambda: Copying(NestedObs()), lambda: Copying(later(), is_shifted=True)]
    envs = VectorEnvs(SyncVectorEnv(kinds, autoreset_mode=Mode.SAME_STEP))
    envs.reset(0)
    first = envs.step(acts(0, 0))
    assert first.terminated.tolist() == [False, True]
    assert first.final_obs is not None
    assert first.final_obs["count"][1] == 2
    assert first.final_obs["a/b"][1].tolist() == [[9, 9], [9, 9]]
    assert first.obs["count"].tolist() == [1, 0]
    second = envs.step(acts(0, 0))
    assert second.terminated.tolist() == [True, False]
    assert second.final_obs is not None
    assert second.final_obs["count"][0] == 2
    assert envs.step(acts(0, 0)).terminated.tolist() == [False, True]


class Copying(gym.Wrapper):
    """Shows copies; `is_shifted`: its first reset goes on with the episode that it found."""

    def __init__(self, env: gym.Env, is_shifted: bool = False) -> None:
        super().__init__(env)
        self.is_shifted = is_shifted

    def reset(self, **kwargs: Any) -> tuple[Any, dict]:
        if self.is_shifted:
            self.is_shifted = False
            return self._copy(self.env.unwrapped._show()), {}  # type: ignore[attr-defined]
        obs, info = self.env.reset(**kwargs)
        return self._copy(obs), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict]:
        obs, *rest = self.env.step(action)
        return self._copy(obs), *rest  # type: ignore[return-value]

    def _copy(self, obs: Any) -> Any:
        return {"count": obs["count"].copy(), "a": {"b": obs["a"]["b"].copy()}}


def test_there_is_no_final_observation_without_an_end() -> None:
    envs = VectorEnvs(CountingVector(2, (3, 2), autoreset="SameStep"))
    envs.reset(0)
    assert envs.step(acts(0, 0)).final_obs is None
    assert VectorEnvs(CountingVector(2)).autoreset is Mode.NEXT_STEP


@pytest.mark.parametrize("infos", [{}, {"final_obs": np.array([None, None])}])
def test_same_step_without_final_observations_is_refused(infos: dict) -> None:
    class Forgetful(CountingVector):
        def step(self, actions: Any) -> Any:
            return *super().step(actions)[:4], infos

    envs = VectorEnvs(Forgetful(2, (1, 2), autoreset="SameStep"))
    envs.reset(0)
    with pytest.raises(EnvError, match=r"SAME_STEP, which needs infos\['final_obs'\]"):
        envs.step(acts(0, 0))


def test_an_end_on_the_step_that_must_only_reset_is_refused() -> None:
    class Ending(CountingVector):
        def step(self, actions: Any) -> Any:
            obs, rewards, _, truncated, infos = super().step(actions)
            return obs, rewards, np.array([True, False]), truncated, infos

    envs = VectorEnvs(Ending(2))
    envs.reset(0)
    envs.step(acts(0, 0))
    with pytest.raises(EnvError, match="ends an episode on the step after an end"):
        envs.step(acts(0, 0))


@pytest.mark.parametrize("index", [0, 1, 2, 3])
def test_wrong_shapes_are_refused_at_the_first_step(index: int) -> None:
    class Flat(CountingVector):
        def step(self, actions: Any) -> Any:
            results = list(super().step(actions))
            results[index] = results[index].sum()
            return tuple(results)

    envs = VectorEnvs(Flat(2))
    envs.reset(0)
    with pytest.raises(EnvError, match=r"shape|in step"):
        envs.step(acts(0, 0))


def test_closing_reaches_the_environment() -> None:
    env = CountingVector(2)
    VectorEnvs(env).close()
    assert env.closed


@pytest.mark.parametrize("is_vector", [False, True])
def test_a_part_of_a_batch_has_the_seeds_of_the_whole(is_vector: bool) -> None:
    def made(num_envs: int) -> SerialEnvs | VectorEnvs:
        kinds = [lambda: gym.make("CartPole-v1")] * num_envs
        return VectorEnvs(SyncVectorEnv(kinds)) if is_vector else SerialEnvs([k() for k in kinds])

    whole, part = made(5).reset(7)[""], made(2).reset(7, first_env=3)[""]
    np.testing.assert_array_equal(whole[3:], part)
