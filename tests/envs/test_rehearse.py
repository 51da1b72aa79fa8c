"""What is played before anybody trains finds environments that could never be trained on."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete

from impala_async.config.env import EnvSection
from impala_async.envs.agents import AgentEnvs
from impala_async.envs.describe import describe
from impala_async.envs.rehearse import NUM_STEPS, random_actions, rehearse
from impala_async.envs.spaces import SpaceOptions
from impala_async.envs.vector import SerialEnvs
from impala_async.errors import EnvError
from impala_async.spec import ActionPart, ActionSpec
from tests.envs.test_agents import Lives


class Patient(gym.Env[Any, Any]):
    """Does as it should, but for what a test changes."""

    observation_space = Dict(look=Box(-1, 1, (2,)), action_mask=Box(0, 1, (5,), np.int8))
    action_space = MultiDiscrete([2, 3])
    mask = (0, 1, 1, 0, 1)
    reward = 0.0
    look = 0.0
    length = 10

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.age = 0
        self.actions: list[list[int]] = getattr(self, "actions", [])
        return self.show(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.actions.append(action.tolist())
        self.age += 1
        return self.show(), self.reward, self.age == self.length, False, {}

    def show(self) -> dict[str, Any]:
        look = np.full(2, self.look, np.float32)
        is_over = self.age == self.length
        return {"look": look, "action_mask": np.int8([0] * 5 if is_over else self.mask)}


def test_a_sound_environment_is_played_through_the_ends_of_episodes_by_legal_actions() -> None:
    env = Patient()
    rehearse(SerialEnvs([env]))
    # Every eleventh step resets, and an end may forbid everything.
    assert len(env.actions) == NUM_STEPS - NUM_STEPS // 11
    assert {first for first, _ in env.actions} == {1}
    assert {second for _, second in env.actions} == {0, 2}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"reward": np.nan}, "Patient: step gave a reward that is not finite: nan"),
        ({"reward": -np.inf}, "step gave a reward that is not finite: -inf"),
        ({"reward": 1e38}, "step gave a reward that is beyond 1e+15: 1e+38"),
        ({"look": 1e38}, "Patient: reset gave an observation 'look' that is beyond 1e+15"),
        ({"look": np.nan}, "Patient: reset gave an observation 'look' that is not finite"),
        ({"mask": (1, 1, 0, 0, 0)}, "reset gave a mask of legal actions, 'action_mask', without"),
        ({"mask": (0, 0, 1, 1, 1)}, "without any legal one: every item of an action needs at"),
    ],
)
def test_what_no_learner_could_train_on_is_named(change: dict[str, Any], says: str) -> None:
    env = Patient()
    for name, value in change.items():
        setattr(env, name, value)
    with pytest.raises(EnvError) as caught:
        rehearse(SerialEnvs([env]))
    assert says in str(caught.value)


@pytest.mark.parametrize("value", [10**15 + 1, -(2**63)])
def test_an_integer_that_no_learner_takes_is_named(value: int) -> None:
    class Count(gym.Wrapper[Any, Any, Any, Any]):
        observation_space = gym.spaces.Dict(
            {"n": gym.spaces.Box(-(2**63), 2**63 - 1, (), np.int64)}
        )

        def reset(self, **options: Any) -> Any:
            return {"n": np.int64(7)}, {}

        def step(self, action: Any) -> Any:
            return {"n": np.int64(value)}, 0.0, False, False, {}

    with pytest.raises(EnvError, match=r"step gave an observation 'n' that is beyond 1e\+15$"):
        rehearse(SerialEnvs([Count(gym.make("CartPole-v1"))]))


def test_of_several_rewards_the_one_that_is_not_finite_is_shown() -> None:
    class Uneven(Lives):
        def step(self, actions: dict[str, Any]) -> tuple[dict[str, Any], ...]:
            obs, rewards, *rest = super().step(actions)
            return obs, {**rewards, "agent_1": np.nan}, *rest

    with pytest.raises(EnvError, match=r"^lives_v0: step gave a reward .* not finite: nan$"):
        rehearse(AgentEnvs([Uneven((3, 3))]))


class Broken(gym.Env[Any, Any]):
    observation_space = Box(-1, 1, (2,))
    action_space = Discrete(2)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        raise RuntimeError("no such engine")


def test_a_description_fails_where_the_first_step_does() -> None:
    with pytest.raises(EnvError, match="Broken failed in step: RuntimeError: no such engine"):
        describe(EnvSection(id="tests.envs.test_rehearse:Broken"))


def test_random_actions_have_the_shapes_and_the_dtypes_of_their_parts() -> None:
    spec = ActionSpec(
        (
            ActionPart("go", "discrete", (4,)),
            ActionPart("keys", "discrete", (2, 2, 3), (3,)),
            ActionPart("push", "continuous", (), (2, 2)),
        )
    )
    actions = random_actions(spec, {}, 500, np.random.default_rng(3))
    for part in spec.parts:
        assert actions[part.name].shape == (500, *part.shape)
        assert actions[part.name].dtype == part.array.dtype
    assert set(actions["go"]) == {0, 1, 2, 3}
    assert actions["keys"].max(0).tolist() == [1, 1, 2]
    assert abs(actions["push"].std() - 1) < 0.1


class Slides(gym.Env[Any, Any]):
    """A window over numbers that count; `jump` of them are new in each step."""

    observation_space = Box(0, 255, (3, 2, 2), np.uint8)
    action_space = Discrete(2)
    jump = 1

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.newest = 3
        return self.show(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.newest += self.jump
        return self.show(), 0.0, self.newest > 8, False, {}

    def show(self) -> Any:
        numbers = np.arange(self.newest - 2, self.newest + 1, dtype=np.uint8)
        return np.broadcast_to(numbers[:, None, None], (3, 2, 2)).copy()


def test_a_stack_must_slide_by_one_frame() -> None:
    env = Slides()
    rehearse(SerialEnvs([env], SpaceOptions(is_stacked=True)))
    env.jump = 2
    rehearse(SerialEnvs([env]))
    with pytest.raises(EnvError, match=r"^env\.frame_stack: what Slides shows does not slide"):
        rehearse(SerialEnvs([env], SpaceOptions(is_stacked=True)))


class Windows(Lives):
    """Shows windows over numbers that count, `jump` of which are new in each step."""

    jump = 1

    def observation_space(self, agent: str) -> Any:
        return Box(0, 255, (3, 2, 2), np.uint8)

    def _show(self, agent: str) -> Any:
        newest = 3 + self.jump * self.num_steps
        return np.full((3, 2, 2), np.arange(newest - 2, newest + 1)[:, None, None], np.uint8)


@pytest.mark.parametrize("shows_last", [False, True])
def test_the_stacks_of_agents_must_slide_while_they_play(shows_last: bool) -> None:
    # One ends early, one comes late: both are idle for a while, and show the same again.
    env = Windows((2, 6, 6), starts=(0, 0, 3), shows_last=shows_last)
    options = SpaceOptions(is_stacked=True)
    rehearse(AgentEnvs([env], options))
    env.jump = 2
    rehearse(AgentEnvs([env]))
    with pytest.raises(EnvError, match=r"^env\.frame_stack: what lives_v0 shows does not slide"):
        rehearse(AgentEnvs([env], options))
