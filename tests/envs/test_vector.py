"""Gymnasium's environments as batches, in both modes of resetting; the last action and reward."""

from copy import deepcopy

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Tuple
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from bench.probes import ActionReward, Counting, CountingVector, Failing
from impala_async.envs.agents import AgentEnvs
from impala_async.envs.faults import RUNNING
from impala_async.envs.vector import (
    SerialEnvs,
    VectorEnvs,
    WithHistory,
    spread_seed,
    tell_unread_mask,
)
from impala_async.errors import EnvError
from impala_async.schema import ArraySpec
from tests.envs.test_agents import Lives

Mode = AutoresetMode


class NestedObs(gym.Env):
    """Two leaves, of which one is the count of steps; ends after `length` of them.

    Shows the same arrays every time, as an environment may.
    """

    action_space = Discrete(2)
    observation_space = Dict(
        {"count": Box(-9, 9, (), np.int64), "a": Dict({"b": Box(0, 255, (2, 2), np.uint8)})}
    )

    def __init__(self, length=2):
        self._length = length
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


def run(envs, seed, num_steps):
    """Everything that random actions (always the same) lead to, from the reset on."""
    rng = np.random.default_rng(5)
    num_choices = envs.action_spec.parts[0].choices[0]
    seen = [deepcopy(envs.reset(seed))]
    for _ in range(num_steps):
        seen.append(deepcopy(envs.step(acts(*rng.integers(num_choices, size=envs.num_envs)))))
    return seen


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Acrobot-v1", "MountainCar-v0", "nested"])
def test_serial_envs_are_bit_equal_to_gymnasiums_own_vector(env_id):
    def single():
        if env_id == "nested":
            return NestedObs()
        return gym.make(env_id, disable_env_checker=True, max_episode_steps=23)

    serial = run(SerialEnvs([single() for _ in range(3)]), 7, 120)
    vector = run(VectorEnvs(SyncVectorEnv([single] * 3)), 7, 120)
    np.testing.assert_equal(serial, vector)
    assert any(step.ended.any() for step in serial[1:])
    if env_id == "nested":
        assert [step.obs["count"][0] for step in serial[1:5]] == [1, 2, 0, 1]
        assert serial[1].obs["a/b"].dtype == np.uint8


class Paying(CountingVector):
    """Gives a reward in the step that resets, too."""

    def step(self, actions):
        obs, rewards, *rest = super().step(actions)
        return obs, np.where(rewards == 0, 99, rewards), *rest


def test_the_step_after_an_end_resets_and_ignores_the_action():
    serial = SerialEnvs([Counting(1, column=0), Counting(2, column=1)])
    for envs in (serial, VectorEnvs(Paying(2, (1, 2)))):
        assert envs.autoreset is Mode.NEXT_STEP
        assert envs.reset(0)[""].tolist() == [[0, 0, 0], [1, 0, 0]]
        seen = []
        for _ in range(4):
            step = envs.step(acts(1, 1))
            assert not step.truncated.any()
            assert step.rewards.dtype == np.float32
            assert step.masked is step.fresh is step.idle
            idle = None if step.idle is None else step.idle.tolist()
            shown, rewards = step.obs[""][:, 1:].tolist(), step.rewards.tolist()
            seen.append((shown, rewards, step.terminated.tolist(), idle))
        assert seen == [
            ([[0, 1], [0, 1]], [11, 11], [True, False], None),
            ([[1, 0], [0, 2]], [0, 12], [False, True], [True, False]),
            ([[1, 1], [1, 0]], [11, 0], [True, False], [False, True]),
            ([[2, 0], [1, 1]], [0, 11], [False, False], [True, False]),
        ]
        # A reset in the midst of things forgets them.
        while not envs.step(acts(0, 0)).terminated.any():
            pass
        envs.reset(0)
        step = envs.step(acts(0, 0))
        assert step.obs[""][:, 2].tolist() == [1, 1], "this must not be another reset"
        assert step.idle is None


def test_the_environment_of_a_call_is_known_by_its_number():
    def note(obs, *_):
        seen.append(RUNNING.place[0])
        return obs

    singles = [gym.wrappers.TransformObservation(Counting(), note, None) for _ in range(3)]
    for envs in (SerialEnvs(singles), AgentEnvs([Lives(change=note) for _ in range(3)])):
        seen = []
        envs.reset(0, first_env=4)
        envs.step(acts(*[0] * envs.num_envs))
        assert seen == [5, 6, 7, 5, 6, 7]


def test_environments_whose_actions_differ_are_no_batch():
    three = gym.wrappers.TransformAction(Counting(), int, Discrete(3))
    says = r"environment 1 is Discrete\(3\), and that of environment 0 is Discrete\(2\)"
    for batch, envs in (
        (SerialEnvs, [Counting(), three]),
        (AgentEnvs, [Lives(), Lives(space=Discrete(3))]),
    ):
        with pytest.raises(EnvError, match=says):
            batch(envs)


def test_a_reset_between_two_episodes_is_a_reset():
    def note(obs, *_):
        seen.append(RUNNING.call[0].where)
        return obs

    single = gym.wrappers.TransformObservation(Counting(1), note, None)
    for envs in (SerialEnvs([single]), AgentEnvs([Lives(lengths=(1,), change=note)])):
        seen = []
        envs.reset(0)
        envs.step(acts(0))
        envs.step(acts(0))
        assert seen == ["in reset", "in step", "in reset"]


def test_what_an_environment_raises_is_an_env_error_and_so_is_what_its_close_does():
    class Faulty(Failing):
        def _first(self):
            if closed:
                raise LookupError("no level left")
            return super()._first()

        def close(self):
            closed.append(self)
            raise OSError("device is busy")

    for batch in (SerialEnvs, lambda envs: VectorEnvs(SyncVectorEnv([lambda: envs[0]]))):
        closed = []
        envs = batch([Faulty(after=1, length=9)])
        envs.reset(0)
        envs.step(acts(0))
        with pytest.raises(EnvError, match="in step: RuntimeError: this probe") as caught:
            envs.step(acts(0))
        assert isinstance(caught.value.__cause__, RuntimeError)
        with pytest.raises(EnvError, match="in close: OSError: device is busy"):
            envs.close()
        assert len(closed) == 1
        with pytest.raises(EnvError, match="in reset: LookupError: no level left"):
            envs.reset(0)


def test_columns_differ_and_a_part_has_the_seeds_of_the_whole():
    for is_vector in (False, True):

        def started(num_envs, *seed, is_vector=is_vector):
            kinds = [lambda: gym.make("CartPole-v1")] * num_envs
            single = SerialEnvs([k() for k in kinds])
            envs = VectorEnvs(SyncVectorEnv(kinds)) if is_vector else single
            return envs.reset(*seed)[""].copy()

        whole = started(5, 7)
        assert len(np.unique(whole, axis=0)) == 5
        np.testing.assert_array_equal(whole[3:], started(2, 7, 3))


def test_spread_seeds_leave_room_for_columns():
    seeds = [spread_seed(seed) for seed in range(500)]
    assert np.diff(np.sort(seeds)).min() > 4
    assert min(seeds) >= 0
    assert max(seeds) + 4096 < 2**31
    assert isinstance(seeds[0], int)


# -------------------- vector envs


def test_gymnasiums_own_vector_code_does_not_ask_in_each_step_what_the_policy_promises():
    asked = []

    def number_asked(env):
        env.action_space.contains, asked[:] = lambda actions: asked.append(actions) or True, []
        envs = VectorEnvs(env)
        envs.reset(0)
        envs.step(acts(0, 1))
        envs.close()
        return len(asked)

    assert number_asked(gym.make_vec("CartPole-v1", 2, "vector_entry_point")) == 0

    class Own(CountingVector):
        def step(self, actions):
            assert self.action_space.contains(actions)
            return super().step(actions)

    assert number_asked(Own(2)) == 1


def test_the_resetting_mode_is_read_from_the_metadata():
    env = CountingVector(2)
    for mode in (Mode.NEXT_STEP, Mode.SAME_STEP, "NextStep", "SameStep"):
        env.metadata = {"autoreset_mode": mode}
        assert VectorEnvs(env).autoreset is Mode(mode)
    for metadata, found in (
        ({}, "missing"),
        (None, "missing"),
        ({"autoreset_mode": Mode.DISABLED}, "AutoresetMode.DISABLED"),
        ({"autoreset_mode": "later"}, "later"),
    ):
        env.metadata = metadata
        match = f"is {found}; set it to AutoresetMode.NEXT_STEP or"
        with pytest.raises(EnvError, match=match) as caught:
            VectorEnvs(env)
        # One that resets nothing does neither.
        assert ("whichever the environment does" in str(caught.value)) is ("DISABLED" not in found)


def test_final_observations_are_read_one_per_column_and_nested():
    """A column that ends after its second step, and one that does after its third."""

    class Showing(NestedObs):
        # SyncVectorEnv keeps the environment's own arrays, so let each show new ones.
        def _show(self):
            return deepcopy(super()._show())

    kinds = [lambda: Showing(2), lambda: Showing(3)]
    envs = VectorEnvs(SyncVectorEnv(kinds, autoreset_mode=Mode.SAME_STEP))
    envs.reset(0)
    step = envs.step(acts(0, 0))
    assert step.final_obs is step.fresh is step.idle is None
    for ended, length in ((0, 2), (1, 3)):
        step = envs.step(acts(0, 0))
        assert step.fresh.tolist() == step.terminated.tolist() == [ended == 0, ended == 1]
        assert step.final_obs["count"][ended] == length
        assert step.final_obs["a/b"][ended].tolist() == [[7 + length] * 2] * 2
        assert step.obs["count"][ended] == 0
        assert step.idle is None


def test_a_tuple_of_arrays_is_a_batch_where_the_space_is_a_tuple():
    class Pairs(CountingVector):
        def __init__(self):
            super().__init__(2, (1, 1), autoreset="SameStep")
            self.single_observation_space = Tuple((Box(-99, 99, (2,)), Box(-99, 99, (2,))))

        def both(self, first, second):
            return tuple(np.array(each, np.float32) for each in (first, second))

        def reset(self, **how):
            super().reset(**how)
            return self.both(np.zeros((2, 2)), np.zeros((2, 2))), {}

        def step(self, actions):
            _, *others, _ = super().step(actions)
            final = self.both([[1, 1], [2, 2]], [[10, 10], [20, 20]])
            return self.both(np.zeros((2, 2)), np.zeros((2, 2))), *others, {"final_obs": final}

    envs = VectorEnvs(Pairs())
    envs.reset(0)
    final = envs.step(acts(0, 0)).final_obs
    assert final["0"].tolist() == [[1, 1], [2, 2]]
    assert final["1"].tolist() == [[10, 10], [20, 20]]


def test_same_step_without_final_observations_is_refused():
    class Forgetful(CountingVector):
        def step(self, actions):
            return *super().step(actions)[:4], self.infos

    for infos in ({}, {"final_obs": np.array([None, None])}, {"final_obs": []}, [{}, {}], None):
        vector = Forgetful(2, (1, 2), autoreset="SameStep")
        envs, vector.infos = VectorEnvs(vector), infos
        envs.reset(0)
        with pytest.raises(EnvError, match=r"SAME_STEP, which needs infos\['final_obs'\]"):
            envs.step(acts(0, 0))


@pytest.mark.parametrize("key", ["final_obs", "final_observation"])
def test_next_step_with_final_observations_is_refused(key):
    class Mistaken(SyncVectorEnv):
        def step(self, actions):
            *step, infos = super().step(actions)
            return *step, {key: infos["final_obs"]} if "final_obs" in infos else {}

    vector = Mistaken([lambda: Counting(2)], autoreset_mode=Mode.SAME_STEP)
    vector.metadata = {"autoreset_mode": Mode.NEXT_STEP}
    envs = VectorEnvs(vector)
    envs.reset(0)
    envs.step(acts(0))
    with pytest.raises(EnvError, match=r"says AutoresetMode.NEXT_STEP, but .*SAME_STEP does: set"):
        envs.step(acts(0))


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


# -------------------- the last action and reward


def with_both(envs):
    return WithHistory(envs, has_action=True, has_reward=True)


class Composite(NestedObs):
    """An action of several parts."""

    action_space = Tuple((Discrete(4, start=5), Box(-1, 1, (2,)), MultiDiscrete([2, 3])))


def test_they_are_leaves_like_any_other_of_the_unclipped_sample_and_the_index():
    envs = with_both(SerialEnvs([Composite()]))
    assert [leaf.name for leaf in envs.obs_spec.leaves][:2] == ["a/b", "count"]
    assert envs.obs_spec.leaves[2:] == (
        ArraySpec("last_action/0", (), "int32", (4,)),
        ArraySpec("last_action/1", (2,), "float32"),
        ArraySpec("last_action/2", (2,), "int32", (2, 3)),
        ArraySpec("last_reward", (), "float32"),
    )
    first = envs.reset(0)
    assert [first[name].tolist() for name in ("last_action/1", "last_reward")] == [[[0, 0]], [0]]
    given = {
        "0": np.array([3], np.int32),
        "1": np.array([[7.0, -0.5]], np.float32),
        "2": np.array([[1, 2]], np.int32),
    }
    obs = envs.step(given).obs
    assert {name: array.tolist() for name, array in obs.items()} == {
        "count": [1],
        "a/b": [[[8, 8], [8, 8]]],
        "last_action/0": [3],
        "last_action/1": [[7.0, -0.5]],
        "last_action/2": [[1, 2]],
        "last_reward": [0.5],
    }
    dtypes = {leaf.name: leaf.dtype for leaf in envs.obs_spec.leaves}
    assert {name: array.dtype.name for name, array in obs.items()} == dtypes


def test_next_step_shows_them_in_the_final_row_and_not_in_the_first():
    for envs, expected in (
        # Column 0 ends with the second step, and column 1 with the third.
        (
            SerialEnvs([Counting(2, column=0), Counting(3, column=1)]),
            [(1, 1, 11, 11), (1, 1, 12, 12), (0, 1, 0, 13), (1, 0, 11, 0), (1, 1, 12, 11)],
        ),
        # The first agent's episode ends with the first step, and it is idle until the reset.
        (
            AgentEnvs([Lives((1, 3))]),
            [(1, 1, 11, 11), (0, 1, 0, 12), (0, 1, 0, 13), (0, 0, 0, 0), (1, 1, 11, 11)],
        ),
    ):
        shown = with_both(envs)
        # A reset in the midst of things forgets them.
        for _ in range(2):
            first = shown.reset(0)
            assert first["last_action"].tolist() == first["last_reward"].tolist() == [0, 0]
            rows = []
            for _ in range(5):
                obs = shown.step(acts(1, 1)).obs
                rows.append((*obs["last_action"].tolist(), *obs["last_reward"].tolist()))
            assert rows == expected


def test_same_step_shows_them_in_the_final_observation():
    envs = with_both(VectorEnvs(CountingVector(2, (2, 3), autoreset="SameStep")))
    envs.reset(0)
    assert envs.step(acts(1, 0)).final_obs is None
    step = envs.step(acts(1, 0))
    assert step.terminated.tolist() == [True, False]
    final = {name: array[0].tolist() for name, array in step.final_obs.items()}
    assert final == {"": [0, 0, 2], "last_action": 1, "last_reward": 12}
    assert step.obs[""].tolist() == [[0, 1, 0], [1, 0, 2]]
    assert step.obs["last_action"].tolist() == [0, 0]
    assert step.obs["last_reward"].tolist() == [0, 2]
    after = envs.step(acts(1, 1))
    assert after.obs["last_reward"].tolist() == [11, 0]
    assert after.final_obs["last_reward"][1] == 13
    assert final["last_reward"] == step.final_obs["last_reward"][0], "it is a copy"
    first = envs.reset(0)
    assert first["last_action"].tolist() == first["last_reward"].tolist() == [0, 0]


class MasksElsewhere(ActionReward):
    """Has its mask where other frameworks look for one."""

    def __init__(self, where):
        super().__init__()
        self._where = where
        if where == "method":
            self.action_masks = lambda: [True, False]

    def reset(self, **how):
        obs, info = super().reset(**how)
        return obs, {**info, "action_mask": [1, 0]} if self._where == "info" else info


@pytest.mark.parametrize(
    ("where", "told"),
    [("method", "its method action_masks is not"), ("info", "info['action_mask'] is not")],
)
def test_a_mask_that_is_not_looked_at_is_told_once(where, told, caplog):
    tell_unread_mask.cache_clear()
    for _ in range(2):
        SerialEnvs([MasksElsewhere(where)]).reset(0)
    assert [told in message for message in caplog.messages] == [True]
