from copy import deepcopy

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from bench.probes import Counting, CountingVector, Failing, NotFinite
from impala_async.envs.agents import AgentEnvs
from impala_async.envs.faults import RUNNING
from impala_async.envs.vector import SerialEnvs, VectorEnvs
from impala_async.errors import EnvError
from tests.envs.test_agents import Lives

Mode = AutoresetMode


class NestedObs(gym.Env):
    """Two leaves, of which one is the count of steps; ends after `length` of them.

    Shows the same arrays every time, as an environment may.
    """

    def __init__(self, length=2):
        self._length = length
        self.observation_space = Dict(
            {"count": Box(-9, 9, (), np.int64), "a": Dict({"b": Box(0, 255, (2, 2), np.uint8)})}
        )
        self.action_space = Discrete(2)
        self.count = np.zeros((), np.int64)
        self.pixels = np.zeros((2, 2), np.uint8)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count[...] = 0
        self.pixels[...] = 7
        return self._show(), {}

    def step(self, action):
        self.count += 1
        self.pixels += 1
        return self._show(), 0.5, bool(self.count == self._length), False, {}

    def _show(self):
        return {"count": self.count, "a": {"b": self.pixels}}


def acts(*actions):
    return {"": np.array(actions, np.int32)}


def copied(step):
    """A step that outlives the next one."""
    obs = {name: array.copy() for name, array in step.obs.items()}
    return obs, step.rewards.copy(), step.terminated.copy(), step.truncated.copy()


def run(envs, seed, num_steps):
    """Everything that random actions (always the same) lead to, from the reset on."""
    rng = np.random.default_rng(5)
    num_choices = envs.action_spec.parts[0].choices[0]
    seen = [{name: array.copy() for name, array in envs.reset(seed).items()}]
    for _ in range(num_steps):
        seen.append(copied(envs.step(acts(*rng.integers(num_choices, size=envs.num_envs)))))
    return seen


def make_single(env_id, **kwargs):
    return gym.make(env_id, disable_env_checker=True, **kwargs)


def cartpole_vector(num_envs, **kwargs):
    mode = gym.VectorizeMode.VECTOR_ENTRY_POINT
    return VectorEnvs(gym.make_vec("CartPole-v1", num_envs, vectorization_mode=mode, **kwargs))


def pair(kind):
    """One environment, single and as a vector."""
    return SerialEnvs([kind()]), VectorEnvs(SyncVectorEnv([kind]))


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Acrobot-v1", "MountainCar-v0"])
def test_serial_envs_are_bit_equal_to_gymnasiums_own_vector(env_id):
    def single():
        return make_single(env_id, max_episode_steps=23)

    serial = run(SerialEnvs([single() for _ in range(3)]), 7, 120)
    vector = run(VectorEnvs(SyncVectorEnv([single] * 3)), 7, 120)
    np.testing.assert_equal(serial, vector)
    assert any(step[3].any() for step in serial[1:]), "nothing was truncated"


def test_so_they_are_with_nested_observations():
    serial = run(SerialEnvs([NestedObs(), NestedObs()]), 7, 9)
    vector = run(VectorEnvs(SyncVectorEnv([NestedObs, NestedObs])), 7, 9)
    np.testing.assert_equal(serial, vector)
    counts = [obs["count"].tolist() for obs, *_ in serial[1:5]]
    assert counts == [[1, 1], [2, 2], [0, 0], [1, 1]]
    assert serial[1][0]["a/b"].dtype == np.uint8


def test_a_dict_of_one_box_is_not_a_plain_array():
    class OneKey(gym.wrappers.TransformObservation):
        def __init__(self):
            super().__init__(Counting(), lambda obs: {"": obs}, Dict({"": Box(0, 9, (3,))}))

    envs = SerialEnvs([OneKey()])
    envs.reset(0)
    assert envs.step(acts(0)).obs[""].tolist() == [[0, 0, 1]]


@pytest.mark.parametrize("kind", ["serial", "vector"])
def test_the_step_after_an_end_resets_and_ignores_the_action(kind):
    envs = SerialEnvs([Counting(1, column=0), Counting(2, column=1)])
    if kind == "vector":
        envs = VectorEnvs(CountingVector(2, (1, 2)))
    assert envs.autoreset is Mode.NEXT_STEP
    assert envs.reset(0)[""].tolist() == [[0, 0, 0], [1, 0, 0]]
    seen = []
    for _ in range(4):
        step = envs.step(acts(1, 1))
        assert not step.truncated.any()
        assert step.rewards.dtype == np.float32
        seen.append((step.obs[""][:, 1:].tolist(), step.rewards.tolist(), step.terminated.tolist()))
    assert seen == [
        ([[0, 1], [0, 1]], [11, 11], [True, False]),
        ([[1, 0], [0, 2]], [0, 12], [False, True]),
        ([[1, 1], [1, 0]], [11, 0], [True, False]),
        ([[2, 0], [1, 1]], [0, 11], [False, False]),
    ]
    # A reset in the midst of things forgets them.
    while not envs.step(acts(0, 0)).terminated.any():
        pass
    envs.reset(0)
    step = envs.step(acts(0, 0))
    assert step.obs[""][:, 2].tolist() == [1, 1], "this must not be another reset"


@pytest.mark.parametrize("ends", ["terminated", "truncated", "both"])
def test_both_flags_come_through(ends):
    for envs in (SerialEnvs([Counting(1, ends)]), VectorEnvs(CountingVector(1, (1,), ends=ends))):
        envs.reset(0)
        step = envs.step(acts(0))
        assert bool(step.terminated[0]) == (ends != "truncated")
        assert bool(step.truncated[0]) == (ends != "terminated")


def test_serial_envs_write_into_the_same_arrays_every_time_and_leave_nan_to_ingest():
    envs = SerialEnvs([NotFinite(after=1)])
    envs.reset(0)
    first, second = envs.step(acts(0)), envs.step(acts(0))
    assert second.obs[""] is first.obs[""]
    assert second.rewards is first.rewards
    assert np.isnan(second.obs[""]).all()


def test_the_environment_of_a_call_is_known_by_its_number():
    def looking(kind):
        class Looking(kind):
            def reset(self, **given):
                seen.append(RUNNING.place[0])
                return super().reset(**given)

            def step(self, action):
                seen.append(RUNNING.place[0])
                return super().step(action)

        return Looking

    for kind, batch, num_columns in ((Counting, SerialEnvs, 3), (Lives, AgentEnvs, 6)):
        seen = []
        envs = batch([looking(kind)() for _ in range(3)])
        envs.reset(0, first_env=4)
        envs.step(acts(*[0] * num_columns))
        assert seen == [5, 6, 7, 5, 6, 7]


def test_what_an_environment_raises_is_an_env_error_with_its_cause():
    class NoReset(Counting):
        def _first(self):
            raise LookupError("no level left")

    for envs in pair(lambda: Failing(after=1, length=9)):
        envs.reset(0)
        envs.step(acts(0))
        with pytest.raises(EnvError, match="in step: RuntimeError: this probe") as caught:
            envs.step(acts(0))
        assert isinstance(caught.value.__cause__, RuntimeError)
    for envs in pair(NoReset):
        with pytest.raises(EnvError, match="in reset: LookupError: no level left"):
            envs.reset(0)


@pytest.mark.parametrize("obs", [np.zeros(2, np.float32), np.float32(0), "ab", {"a": 0}], ids=str)
def test_an_environment_that_breaks_its_space_is_refused_at_reset(obs):
    class Wrong(Counting):
        def _first(self):
            return obs

    class WrongVector(CountingVector):
        def reset(self, **kwargs):
            return obs, {}

    for envs in (SerialEnvs([Wrong()]), VectorEnvs(WrongVector(1))):
        with pytest.raises(EnvError, match="promises"):
            envs.reset(0)


def test_all_environments_are_closed_and_a_failure_is_told():
    closed = []

    class Closing(Counting):
        def close(self):
            closed.append(self)
            if len(closed) == 1:
                raise OSError("device is busy")

    with pytest.raises(EnvError, match="device is busy"):
        SerialEnvs([Closing(), Closing()]).close()
    assert len(closed) == 2
    vector = CountingVector(2)
    VectorEnvs(vector).close()
    assert vector.closed


def test_columns_and_neighbouring_seeds_differ_and_equal_seeds_do_not():
    def start(kind, seed):
        envs = kind()
        obs = envs.reset(seed)[""].copy()
        envs.close()
        return obs

    for kind in (
        lambda: cartpole_vector(4),
        lambda: SerialEnvs([make_single("CartPole-v1") for _ in range(4)]),
    ):
        np.testing.assert_array_equal(start(kind, 3), start(kind, 3))
        both = np.concatenate([start(kind, 3), start(kind, 4)])
        assert len(np.unique(both, axis=0)) == 8


@pytest.mark.parametrize("is_vector", [False, True])
def test_a_part_of_a_batch_has_the_seeds_of_the_whole(is_vector):
    def made(num_envs):
        kinds = [lambda: gym.make("CartPole-v1")] * num_envs
        return VectorEnvs(SyncVectorEnv(kinds)) if is_vector else SerialEnvs([k() for k in kinds])

    whole, part = made(5).reset(7)[""], made(2).reset(7, first_env=3)[""]
    np.testing.assert_array_equal(whole[3:], part)


# -------------------- vector envs


def test_the_resetting_mode_is_read_from_the_metadata():
    env = CountingVector(2)
    for mode in (Mode.NEXT_STEP, Mode.SAME_STEP, "NextStep", "SameStep"):
        env.metadata = {"autoreset_mode": mode}
        assert VectorEnvs(env).autoreset is Mode(mode)
    for metadata, found in (
        ({}, "missing"),
        ({"autoreset_mode": Mode.DISABLED}, "AutoresetMode.DISABLED"),
        ({"autoreset_mode": "later"}, "later"),
    ):
        env.metadata = metadata
        with pytest.raises(EnvError, match=f"is {found}; set it to AutoresetMode.NEXT_STEP or"):
            VectorEnvs(env)


def test_final_observations_are_read_batched():
    envs = VectorEnvs(CountingVector(2, (2, 3), autoreset="SameStep"))
    envs.reset(0)
    assert envs.step(acts(0, 0)).final_obs is None
    step = envs.step(acts(0, 0))
    assert step.final_obs is not None
    assert step.final_obs[""][0].tolist() == [0, 0, 2]
    assert step.obs[""].tolist() == [[0, 1, 0], [1, 0, 2]]


def test_final_observations_are_read_one_per_column_and_nested():
    """A column that ends after its second step, and one that does after its third."""

    class Showing(gym.Wrapper):
        # SyncVectorEnv keeps the environment's own arrays, so let each show new ones.
        def __init__(self, length):
            super().__init__(gym.wrappers.TimeLimit(NestedObs(length), 9))

        def reset(self, **kwargs):
            obs, info = self.env.reset(**kwargs)
            return deepcopy(obs), info

        def step(self, action):
            obs, *rest = self.env.step(action)
            return deepcopy(obs), *rest

    kinds = [lambda: Showing(2), lambda: Showing(3)]
    envs = VectorEnvs(SyncVectorEnv(kinds, autoreset_mode=Mode.SAME_STEP))
    envs.reset(0)
    for ended, length in ((None, 1), (0, 2), (1, 3)):
        step = envs.step(acts(0, 0))
        assert np.flatnonzero(step.terminated).tolist() == ([] if ended is None else [ended])
        if ended is None:
            assert step.final_obs is None
            continue
        assert step.final_obs is not None
        assert step.final_obs["count"][ended] == length
        assert step.final_obs["a/b"][ended].tolist() == [[7 + length] * 2] * 2
        assert step.obs["count"][ended] == 0


@pytest.mark.parametrize(
    "infos", [{}, {"final_obs": np.array([None, None])}, {"final_obs": []}, [{}, {}], None]
)
def test_same_step_without_final_observations_is_refused(infos):
    class Forgetful(CountingVector):
        def step(self, actions):
            return *super().step(actions)[:4], infos

    envs = VectorEnvs(Forgetful(2, (1, 2), autoreset="SameStep"))
    envs.reset(0)
    with pytest.raises(EnvError, match=r"SAME_STEP, which needs infos\['final_obs'\]"):
        envs.step(acts(0, 0))


def test_an_end_on_the_step_that_must_only_reset_is_refused():
    class Ending(CountingVector):
        def step(self, actions):
            obs, rewards, _, truncated, infos = super().step(actions)
            return obs, rewards, np.array([True, False]), truncated, infos

    envs = VectorEnvs(Ending(2))
    envs.reset(0)
    envs.step(acts(0, 0))
    with pytest.raises(EnvError, match="ends an episode on the step after an end"):
        envs.step(acts(0, 0))
