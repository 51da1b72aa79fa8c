"""Spare environments: what waits for a reset, who is played, and what is told."""

import subprocess
import sys
import threading
import time
from contextlib import closing
from functools import partial
from itertools import count

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from bench.probes import Counting
from impala_async.config.env import EnvSection
from impala_async.config.run import RunConfig
from impala_async.envs import spares
from impala_async.envs.make import build_drawn, build_envs
from impala_async.envs.spares import ResetAhead
from impala_async.errors import EnvError
from impala_async.evaluation.play import build_players
from tests.envs.test_describe import described
from tests.wire.ends import until

HERE = "tests.envs.test_spares"


class Slow(Counting):
    """Its resets end when they may; each says in which thread it is played."""

    may_reset = threading.Semaphore(0)

    def __init__(self, fails_after=100):
        super().__init__()
        self.seeds, self.threads, self.is_closed = [], set(), False
        self._resets_left = fails_after

    def reset(self, *, seed=None, options=None):
        assert self.may_reset.acquire(timeout=10), "nobody lets it go on"
        self._resets_left -= 1
        if self._resets_left < 0:
            raise OSError("no simulator any more")
        self.seeds.append(seed)
        self.threads.add(threading.get_ident())
        return super().reset(seed=seed, options=options)

    def step(self, action):
        self.threads.add(threading.get_ident())
        return super().step(action)

    def close(self):
        self.threads.add(threading.get_ident())
        self.is_closed = True


class Counted(Counting):
    """Counts how many there are."""

    num_made = 0

    def __init__(self, render_mode=None):
        super().__init__()
        Counted.num_made += 1


class Parallel:
    """As much of a parallel environment as tells that it is one."""

    possible_agents = agents = ("a", "b")

    def close(self):
        pass


def parallel():
    return Parallel()


class OtherActions(Counting):
    """Each one has one action more than the one before."""

    num_actions = count(2)

    def __init__(self):
        super().__init__()
        self.action_space = gym.spaces.Discrete(next(self.num_actions))


@pytest.fixture(autouse=True)
def _no_reset_may_end():
    Slow.may_reset = threading.Semaphore(0)


def let(count):
    for _ in range(count):
        Slow.may_reset.release()


def play_episode(env):
    """Play until the end; the rewards tell the steps of an episode, 1, 2 and 3."""
    return [env.step(np.int64(0))[1] for _ in range(3)]


def test_an_episode_is_played_while_the_other_environment_is_reset():
    first, second = Slow(), Slow()
    first.may_reset, second.may_reset = threading.Semaphore(1), threading.Semaphore(1)
    with closing(ResetAhead([first, second])) as env:
        env.reset(seed=3)
        assert play_episode(env) == [1, 2, 3]
        # The first one's second reset may not end yet: the second one is played meanwhile.
        env.reset()
        assert play_episode(env) == [1, 2, 3]
        assert (len(first.seeds), len(second.seeds)) == (1, 1)
        first.may_reset.release()
        env.reset()
        assert len(first.seeds) == 2
        second.may_reset.release()
    assert (first.is_closed, second.is_closed) == (True, True)
    env.close()  # once more does nothing, and waits for nothing
    # Each has had a thread of its own all its life.
    assert {len(first.threads), len(second.threads)} == {1}
    assert first.threads != second.threads


def test_the_seeds_come_from_the_one_seed_and_are_apart():
    seeds = []
    for seed in (5, 5, 6):
        let(3)
        members = Slow(), Slow(), Slow()
        with closing(ResetAhead(members)) as env:
            env.reset(seed=seed)
        seeds.append([member.seeds for member in members])
    assert seeds[0] == seeds[1] != seeds[2]
    assert len({each for (each,) in seeds[0]}) == 3


def test_a_reset_gets_no_options_unless_there_are_some():
    class Plain(Counting):
        def reset(self, seed=None):
            return super().reset(seed=seed)

    with closing(ResetAhead([Plain(), Plain()])) as env:
        for seed in (3, None):
            assert env.reset(seed=seed)[1] == {}
        with pytest.raises(TypeError, match="unexpected keyword argument 'options'"):
            env.reset(seed=3, options={"level": 2})


@pytest.mark.filterwarnings("ignore:.*A Box observation space:UserWarning")
def test_it_is_an_environment_as_those_that_it_has():
    members = [gym.make("CartPole-v1") for _ in range(2)]
    with closing(ResetAhead(members)) as env:
        assert (env.spec.id, env.observation_space.shape) == ("CartPole-v1", (4,))
        check_env(env, skip_render_check=True)
        obs = env.reset(seed=1)[0], env.reset()[0]
        assert np.array_equal(obs, (env.reset(seed=1)[0], env.reset()[0]))
        assert not np.array_equal(*obs)


def test_columns_of_such_environments_play_episodes_as_others_do():
    plain = EnvSection(id="bench.probes:Counting")
    spared = plain.model_copy(update={"num_spares": 2})
    shown = []
    for section in (plain, spared):
        with closing(build_envs("auto", section, 2)) as envs:
            envs.reset(0)
            steps = [envs.step({"": np.zeros(2, np.int32)}) for _ in range(4)]
            shown.append([(step.rewards.tolist(), step.terminated.tolist()) for step in steps])
    assert shown[0] == shown[1]


def test_a_reset_that_fails_is_told_when_it_would_be_played():
    section = EnvSection(id=f"{HERE}:Slow", kwargs={"fails_after": 1}, num_spares=1)
    let(9)
    with closing(build_envs("serial", section, 1)) as envs:
        envs.reset(0)
        step = partial(envs.step, {"": np.zeros(1, np.int32)})
        # An episode each, and the reset of the first one, which then has nothing to play.
        played = [step().rewards.item() for _ in range(3 + 1 + 3)]
        assert played == [1, 2, 3, 0, 1, 2, 3]
        with pytest.raises(EnvError, match=r"Slow failed in reset: .*no simulator any more"):
            step()


def test_only_single_environments_have_spares_and_each_is_its_own():
    only = Counting()
    sections = {
        "bench.probes:CountingVector": "have env.wrappers or env.num_spares: drop these",
        f"{HERE}:parallel": "is no gymnasium.Env, which alone has spares",
        f"{HERE}:OtherActions": "a spare environment has another action space",
    }
    for env_id, says in sections.items():
        with pytest.raises(EnvError, match=says):
            build_envs("serial", EnvSection(id=env_id, num_spares=1), 1)
    with pytest.raises(EnvError, match=r"CartPole-v1 has env\.num_spares, which are single"):
        build_envs("vector", EnvSection(id="CartPole-v1", num_spares=1), 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bench.probes.only", lambda: only, raising=False)
        with pytest.raises(EnvError, match="made one environment twice"):
            build_envs("serial", EnvSection(id="bench.probes:only", num_spares=1), 1)


def test_a_look_at_the_spaces_and_an_evaluation_make_no_spares():
    env, made = EnvSection(id=f"{HERE}:Counted", num_spares=2), []
    for looks in (
        lambda: described(env),
        lambda: build_players(RunConfig(env=env), 1)[0].close(),
        lambda: build_drawn(env)[0].close(),
        lambda: build_envs("auto", env, 1).close(),
    ):
        before = Counted.num_made
        looks()
        made.append(Counted.num_made - before)
    assert made == [1, 1, 1, 3]


def test_an_end_waits_for_no_reset_and_all_are_closed_where_one_fails():
    first, second, third = Slow(), Slow(), Slow()
    second.close = lambda: (_ for _ in ()).throw(OSError("no simulator any more"))
    env = ResetAhead([first, second, third])
    first.may_reset, second.may_reset = threading.Semaphore(1), threading.Semaphore(1)
    third.may_reset = threading.Semaphore(0)
    env.reset(seed=0)
    begun = time.monotonic()
    with pytest.raises(OSError, match="no simulator"):
        env.close()
    assert time.monotonic() - begun < 5
    assert (first.is_closed, third.is_closed) == (True, False)
    third.may_reset.release()
    until(lambda: third.is_closed)
    with pytest.raises(AssertionError, match="reset comes first"):
        env.step(np.int64(0))


def test_one_that_takes_its_time_to_close_is_waited_for_beside_a_reset(monkeypatch):
    monkeypatch.setattr(spares, "RESET_GRACE_S", 0.01)
    first, second = Slow(), Slow()
    first.may_reset, second.may_reset = threading.Semaphore(1), threading.Semaphore(0)
    close = first.close
    first.close = lambda: (time.sleep(0.2), close())
    env = ResetAhead([first, second])
    env.reset(seed=0)
    env.close()
    assert (first.is_closed, second.is_closed) == (True, False)
    second.may_reset.release()


HANGS = """
import time
from bench.probes import Counting
from impala_async.envs.spares import ResetAhead

class Hanging(Counting):
    def reset(self, *, seed=None, options=None):
        time.sleep(600)

env = ResetAhead([Counting(), Hanging()])
env.reset(seed=0)
env.close()
print("played")
"""


def test_a_reset_that_hangs_does_not_hold_up_the_end_of_the_process():
    done = subprocess.run(
        [sys.executable, "-c", HANGS], timeout=30, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "played\n"), done.stderr
