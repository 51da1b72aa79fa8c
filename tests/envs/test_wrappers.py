from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Tuple
from gymnasium.vector import SyncVectorEnv

from bench.probes import Counting, CountingVector
from impala_async.config.env import EnvSection
from impala_async.config.section import Named
from impala_async.envs.batch import EnvBatch
from impala_async.envs.describe import try_steps
from impala_async.envs.make import build_envs, make_env, wrap
from impala_async.envs.vector import SerialEnvs, VectorEnvs
from impala_async.envs.wrappers import WithHistory, is_atari
from impala_async.errors import EnvError
from impala_async.schema import ArraySpec

HERE = __name__
PONG = "ALE/Pong-v5"


class Add(gym.Wrapper[Any, Any, Any, Any]):
    """Adds to the reward."""

    def __init__(self, env: Any, summand: float = 1.0) -> None:
        super().__init__(env)
        self.summand = summand

    def step(self, action: Any) -> Any:
        obs, reward, *rest = self.env.step(action)
        return obs, reward + self.summand, *rest  # type: ignore[operator]


class Double(gym.Wrapper[Any, Any, Any, Any]):
    def step(self, action: Any) -> Any:
        obs, reward, *rest = self.env.step(action)
        return obs, reward * 2, *rest  # type: ignore[operator]


class Closing(Counting):
    num_closed = 0

    def close(self) -> None:
        Closing.num_closed += 1


def no_env(env: Any) -> object:
    return object()


def named(name: str, **kwargs: Any) -> Named:
    return Named(name=f"{HERE}:{name}", kwargs=kwargs)


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """This module under its own name, however pytest imported it."""
    import sys

    monkeypatch.setitem(sys.modules, HERE, sys.modules.get(HERE) or _this_module())


def _this_module() -> Any:
    from types import SimpleNamespace

    return SimpleNamespace(**globals())


# -------------------------------------------------------------------------------------- wrappers


def first_reward(*wrappers: Named) -> float:
    env = wrap(Counting(), wrappers)
    env.reset(seed=0)
    return float(env.step(np.int64(0))[1])


def test_the_first_wrapper_is_the_innermost() -> None:
    assert first_reward() == 1
    assert first_reward(named("Add"), named("Double")) == 4
    assert first_reward(named("Double"), named("Add")) == 3
    assert first_reward(named("Add", summand=10.0)) == 11


@pytest.mark.parametrize(
    ("wrapper", "text"),
    [
        (named("Ad"), "Did you mean: `Add`?"),
        (Named(name="no_such_module:Thing"), "No module named 'no_such_module'"),
        (named("Add", sumand=2), "to wrap Closing with kwargs {'sumand': 2}: TypeError"),
        (named("no_env"), "no_env made a object, which is no gymnasium.Env"),
    ],
    ids=str,
)
def test_a_wrapper_that_fails_is_named_and_the_environment_closed(
    wrapper: Named, text: str
) -> None:
    Closing.num_closed = 0
    with pytest.raises(EnvError) as caught:
        wrap(Closing(), [named("Double"), wrapper])
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)
    assert Closing.num_closed == 1


# -------------------------------------------------------------------------------------- atari


def test_only_ales_own_entry_point_is_atari() -> None:
    assert not is_atari(None)
    assert not is_atari(gym.spec("CartPole-v1"))


@pytest.fixture
def ale() -> None:
    pytest.importorskip("ale_py")
    pytest.importorskip("cv2")


def play(envs: Any, num_steps: int, action: int = 0) -> list[Any]:
    steps = []
    for _ in range(num_steps):
        step = envs.step({"": np.full(envs.num_envs, action, np.int32)})
        steps.append((step.rewards.copy(), step.terminated.copy(), step.obs[""].copy()))
    return steps


@pytest.mark.usefixtures("ale")
@pytest.mark.parametrize("env_id", [PONG, f"ale_py:{PONG}"])
def test_both_samplers_show_the_same_space(env_id: str) -> None:
    section = EnvSection(id=env_id)
    vector = build_envs("auto", section, 2)
    serial = build_envs("serial", section, 2)
    assert isinstance(vector, VectorEnvs)
    assert isinstance(serial, SerialEnvs)
    assert vector.obs_spec == serial.obs_spec
    assert vector.action_spec == serial.action_spec
    (leaf,) = vector.obs_spec.leaves
    assert (leaf.shape, leaf.dtype) == ((4, 84, 84), "uint8")
    for envs in (vector, serial):
        first = envs.reset(0)[""]
        # The stack begins with nothing but the newest frame.
        assert not first[:, :3].any()
        assert first[:, 3].any()
        steps = play(envs, 5)
        assert steps[-1][2][:, 0].any()
        envs.close()


@pytest.mark.usefixtures("ale")
@pytest.mark.parametrize("sampler", ["serial", "vector"])
def test_rewards_are_not_clipped_and_games_are_whole(sampler: Any) -> None:
    # A brick of Breakout's upper rows pays 4 or 7, of Space Invaders up to 30 points.
    section = EnvSection(id="ALE/SpaceInvaders-v5", kwargs={"repeat_action_probability": 0.0})
    envs = build_envs(sampler, section, 2)
    envs.reset(0)
    rewards = np.stack([step[0] for step in play(envs, 250, action=1)])
    assert rewards.max() > 1
    assert rewards.max() == int(rewards.max())
    envs.close()


@pytest.mark.usefixtures("ale")
@pytest.mark.parametrize("sampler", ["serial", "vector"])
def test_an_episode_takes_as_many_frames_as_steps_times_the_skip(sampler: Any) -> None:
    lengths = []
    for skip in (4, 8):
        kwargs = {"frameskip": skip, "max_num_frames_per_episode": 400, "noop_max": 0}
        envs = build_envs(sampler, EnvSection(id=PONG, kwargs=kwargs), 1)
        envs.reset(0)
        step = envs.step({"": np.zeros(1, np.int32)})
        length = 1
        while not (step.truncated | step.terminated).any():
            step = envs.step({"": np.zeros(1, np.int32)})
            length += 1
        assert step.truncated.all(), "a limit is no end of a game"
        lengths.append(length)
        envs.close()
    assert lengths == pytest.approx([100, 50], abs=2)


@pytest.mark.usefixtures("ale")
def test_arguments_mean_the_same_to_both() -> None:
    kwargs = {"img_height": 40, "img_width": 50, "stack_num": 2, "full_action_space": True}
    section = EnvSection(id=PONG, kwargs=kwargs)
    serial, vector = (build_envs(sampler, section, 1) for sampler in ("serial", "vector"))  # type: ignore[arg-type]
    assert serial.obs_spec == vector.obs_spec
    assert serial.obs_spec.leaves[0].shape == (2, 40, 50)
    assert serial.action_spec == vector.action_spec
    assert serial.action_spec.parts[0].choices == (18,)
    for envs in (serial, vector):
        assert envs.reset(0)[""].shape == (1, 2, 40, 50)
        envs.close()


@pytest.mark.usefixtures("ale")
def test_colour_is_the_same_to_both_and_a_stack_that_slides() -> None:
    section = EnvSection(id=PONG, kwargs={"grayscale": False, "repeat_action_probability": 0.0})
    serial, vector = (build_envs(sampler, section, 1) for sampler in ("serial", "vector"))  # type: ignore[arg-type]
    assert serial.obs_spec == vector.obs_spec
    (leaf,) = serial.obs_spec.leaves
    assert (leaf.shape, leaf.is_stack) == ((4, 84, 84, 3), True)
    for envs in (serial, vector):
        try_steps(envs)
        envs.close()


@pytest.mark.usefixtures("ale")
def test_without_preprocessing_the_game_is_as_it_is() -> None:
    section = EnvSection(id=PONG, preprocess="off", kwargs={"obs_type": "ram"})
    env = make_env(section)
    assert env.observation_space == Box(0, 255, (128,), np.uint8)
    env.close()
    envs = build_envs("auto", section, 1)
    assert isinstance(envs, SerialEnvs)
    envs.close()
    with pytest.raises(EnvError, match=r"vector code that preprocesses, and env\.preprocess is"):
        build_envs("vector", section, 1)


@pytest.mark.usefixtures("ale")
def test_wrappers_go_around_a_preprocessed_game() -> None:
    section = EnvSection(id=PONG, wrappers=(named("Add"),))
    envs = build_envs("auto", section, 1)
    assert isinstance(envs, SerialEnvs)
    assert envs.obs_spec.leaves[0].shape == (4, 84, 84)
    envs.reset(0)
    assert play(envs, 1)[0][0].tolist() == [1]
    envs.close()


@pytest.mark.usefixtures("ale")
def test_single_games_say_that_they_need_opencv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("impala_async.envs.wrappers.find_spec", lambda name: None)
    with pytest.raises(EnvError, match=r"impala-async\[atari\]', or set actor\.sampler to vector"):
        make_env(EnvSection(id=PONG))


PROBES = "bench.probes"


def both(envs: EnvBatch) -> WithHistory:
    return WithHistory(envs, has_action=True, has_reward=True)


def acts(*actions: int) -> dict[str, Any]:
    return {"": np.array(actions, np.int32)}


class Composite(gym.Env[Any, Any]):
    """A Dict observation, and an action of several parts; ends with its second step."""

    observation_space = Dict({"a": Box(0, 9, (1,)), "b": Discrete(3)})
    action_space = Tuple((Discrete(4, start=5), Box(-1, 1, (2,)), MultiDiscrete([2, 3])))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.num_steps = 0
        return self._show(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.num_steps += 1
        return self._show(), -2.5, False, self.num_steps == 2, {}

    def _show(self) -> dict[str, Any]:
        return {"a": np.full(1, self.num_steps, np.float32), "b": self.num_steps}


def test_they_are_leaves_like_any_other() -> None:
    envs = both(SerialEnvs([Composite()]))
    assert [leaf.name for leaf in envs.obs_spec.leaves][:2] == ["a", "b"]
    assert envs.obs_spec.leaves[2:] == (
        ArraySpec("last_action/0", (), "int32", (4,)),
        ArraySpec("last_action/1", (2,), "float32"),
        ArraySpec("last_action/2", (2,), "int32", (2, 3)),
        ArraySpec("last_reward", (), "float32"),
    )
    plain = SerialEnvs([Counting()])
    action = WithHistory(plain, has_action=True, has_reward=False)
    assert [leaf.name for leaf in action.obs_spec.leaves] == ["", "last_action"]
    reward = WithHistory(plain, has_action=False, has_reward=True)
    assert [leaf.name for leaf in reward.obs_spec.leaves] == ["", "last_reward"]
    assert reward.action_spec == plain.action_spec
    assert (reward.name, reward.num_envs) == (plain.name, 1)


def test_the_unclipped_sample_and_the_index_are_shown() -> None:
    envs = both(SerialEnvs([Composite()]))
    first = envs.reset(0)
    assert [first[name].tolist() for name in ("last_action/1", "last_reward")] == [[[0, 0]], [0]]
    given = {
        "0": np.array([3], np.int32),
        "1": np.array([[7.0, -0.5]], np.float32),
        "2": np.array([[1, 2]], np.int32),
    }
    obs = envs.step(given).obs
    assert obs["last_action/0"].tolist() == [3]
    assert obs["last_action/1"].tolist() == [[7.0, -0.5]]
    assert obs["last_action/2"].tolist() == [[1, 2]]
    assert obs["last_reward"].tolist() == [-2.5]
    assert obs["a"].tolist() == [[1.0]]
    assert {name: array.dtype.name for name, array in obs.items()} == {
        leaf.name: leaf.dtype for leaf in envs.obs_spec.leaves
    }


@pytest.mark.parametrize(
    "make",
    [
        lambda: SerialEnvs([Counting(2, column=0), Counting(3, column=1)]),
        lambda: VectorEnvs(CountingVector(2, (2, 3))),
        lambda: VectorEnvs(SyncVectorEnv([lambda: Counting(2), lambda: Counting(3, column=1)])),
    ],
    ids=["serial", "vector", "sync"],
)
def test_next_step_shows_them_in_the_final_row_and_not_in_the_first(make: Any) -> None:
    envs = both(make())
    first = envs.reset(0)
    assert first["last_action"].tolist() == first["last_reward"].tolist() == [0, 0]
    rows = []
    for _ in range(5):
        obs = envs.step(acts(1, 1)).obs
        rows.append((*obs["last_action"].tolist(), *obs["last_reward"].tolist()))
    assert rows == [
        (1, 1, 11, 11),
        (1, 1, 12, 12),  # column 0 ended
        (0, 1, 0, 13),  # column 0 begins anew, column 1 ended
        (1, 0, 11, 0),
        (1, 1, 12, 11),
    ]


def test_same_step_shows_them_in_the_final_observation() -> None:
    envs = both(VectorEnvs(CountingVector(2, (2, 3), autoreset="SameStep")))
    envs.reset(0)
    assert envs.step(acts(1, 0)).final_obs is None
    step = envs.step(acts(1, 0))
    assert step.terminated.tolist() == [True, False]
    assert step.final_obs is not None
    assert step.final_obs[""][0].tolist() == [0, 0, 2]
    assert step.final_obs["last_action"][0] == 1
    assert step.final_obs["last_reward"][0] == 12
    assert step.obs[""].tolist() == [[0, 1, 0], [1, 0, 2]]
    assert step.obs["last_action"].tolist() == [0, 0]
    assert step.obs["last_reward"].tolist() == [0, 2]
    after = envs.step(acts(1, 1))
    assert after.obs["last_reward"].tolist() == [11, 0]
    assert after.final_obs is not None
    assert after.final_obs["last_reward"][1] == 13


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_a_reset_in_the_midst_of_things_forgets_them(mode: str) -> None:
    envs = both(VectorEnvs(CountingVector(2, (1, 3), autoreset=mode)))
    envs.reset(0)
    assert envs.step(acts(1, 1)).terminated[0]
    first = envs.reset(0)
    assert first["last_action"].tolist() == first["last_reward"].tolist() == [0, 0]
    obs = envs.step(acts(0, 1)).obs
    assert obs["last_reward"][1] == 11
    assert obs["last_action"].tolist()[1] == 1


@pytest.mark.parametrize("name", ["last_action", "last_reward"])
def test_a_key_of_that_name_is_refused(name: str) -> None:
    class Taken(Counting):
        def __init__(self) -> None:
            super().__init__()
            self.observation_space = Dict({name: Box(0, 9, (3,)), "x": Discrete(2)})

    with pytest.raises(EnvError, match=rf"env\.{name}: the observation has a key of that name"):
        both(SerialEnvs([Taken()]))


def test_the_settings_ask_for_them() -> None:
    section = EnvSection(id=f"{PROBES}:Counting", last_action=True)
    assert [leaf.name for leaf in build_envs("auto", section, 2).obs_spec.leaves][1:] == [
        "last_action"
    ]
    section = EnvSection(id=f"{PROBES}:CountingVector", last_reward=True)
    envs = build_envs("auto", section, 2)
    assert [leaf.name for leaf in envs.obs_spec.leaves][1:] == ["last_reward"]
    envs.close()
