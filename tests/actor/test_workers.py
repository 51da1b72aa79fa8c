"""Env workers are to a sampler what the same environments are in one process."""

import os
import time

import numpy as np
import pytest

from impala_async.actor import worker as worker_module
from impala_async.actor import workers as module
from impala_async.actor.workers import WorkerEnvs, count_cores
from impala_async.config.policies import ONE_POLICY
from impala_async.envs.make import build_envs
from impala_async.errors import EnvError
from tests.actor.worlds import PAIR, bytes_of, play, section


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Eight cores, and control groups without a word about them."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(8)})
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(module, "CGROUPS", tmp_path)
    monkeypatch.setattr(module, "OWN_CGROUP", tmp_path / "own")
    (tmp_path / "own").write_text("0::/outer/inner\n")
    (tmp_path / "outer/inner").mkdir(parents=True)
    return tmp_path


def test_those_of_the_affinity(machine):
    assert count_cores() == 8
    (machine / "own").unlink()
    assert count_cores() == 8


@pytest.mark.parametrize("group", [".", "outer", "outer/inner"])
@pytest.mark.parametrize(
    ("text", "expected"),
    [("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1), ("9900000 100000", 8), ("", 8)],
)
def test_no_more_than_the_quota_of_any_group_around_it(machine, group, text, expected):
    (machine / group / "cpu.max").write_text(text + "\n")
    assert count_cores() == expected


def test_this_machine_has_some():
    assert 1 <= count_cores() <= (os.cpu_count() or 1)


LIVES = "tests.envs.test_agents:Lives"
STILL = {"": np.zeros(4, np.int32)}


@pytest.mark.parametrize(
    ("name", "settings", "policies"),
    [
        ("CartPole-v1", {"kwargs": {"max_episode_steps": 11}}, ONE_POLICY),
        ("Masked", {}, ONE_POLICY),
        ("Masked", {"last_action": True, "last_reward": True}, ONE_POLICY),
        (LIVES, {"kwargs": {"lengths": (2, 3, 1), "starts": (0, 0, 1)}}, ONE_POLICY),
        (LIVES, {}, PAIR),
        ("short_poles", {"kwargs": {"mode": "NextStep"}}, ONE_POLICY),
        ("short_poles", {"kwargs": {"mode": "SameStep"}}, ONE_POLICY),
    ],
)
@pytest.mark.parametrize("num_workers", [1, 3])
def test_trajectories_are_those_of_one_process_to_the_last_bit(
    name, settings, policies, num_workers
):
    env = section(name, **settings)
    expected = play(build_envs("parallel", env, 5, policies), 64)
    found = play(WorkerEnvs(env, 5, num_workers, policies), 64)
    assert len(found) >= 8
    assert bytes_of(found) == bytes_of(expected)
    assert any(message.episodes for message in found)


def test_it_looks_like_the_batch_in_one_process():
    env = section("short_poles")
    workers, here = WorkerEnvs(env, 4, 2), build_envs("vector", env, 4)
    both = workers, here
    for name in ("name", "num_envs", "obs_spec", "action_spec", "autoreset"):
        there, expected = (getattr(envs, name) for envs in both)
        assert there == expected
    workers.close()
    here.close()


def test_workers_are_processes_of_their_own_without_torch():
    envs = WorkerEnvs(section("Telling"), 4, 2)
    envs.reset(0)
    seen = envs.step(STILL).obs[""]
    # A process id may be more than a float32 holds; two of them are still two.
    assert len({*seen[:, 0].tolist()}) == 2
    assert seen[:, 1].tolist() == [0.0] * 4
    envs.close()


def test_an_environment_that_raises_is_named_and_where():
    env = section("bench.probes:Failing", kwargs={"after": 2})
    envs = WorkerEnvs(env, 4, 2)
    envs.reset(0)
    envs.step(STILL)
    envs.step(STILL)
    with pytest.raises(EnvError, match="Failing failed in step: RuntimeError: this probe") as error:
        envs.step(STILL)
    assert "\n" not in str(error.value)
    assert "probes.py" in str(error.value.__cause__)
    # The other worker's is no news.
    with pytest.raises(EnvError, match="Failing failed in step"):
        envs.close()
    envs.close()


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("kill", "environments 0 to 1 of .*Dying was killed .SIGKILL.*ran out"),
        ("exit", "ended with exit code 7; what it printed, if anything, is above"),
    ],
)
def test_a_worker_that_dies_is_named(how, says):
    envs = WorkerEnvs(section("Dying", kwargs={"after": 0, "how": how}), 4, 2)
    envs.reset(0)
    with pytest.raises(EnvError, match=says):
        envs.step(STILL)
    with pytest.raises(EnvError, match=says):
        envs.step(STILL)
    envs.close()


def test_its_death_is_seen_though_a_child_of_its_own_holds_the_pipe():
    envs = WorkerEnvs(section("Forking"), 2, 1)
    envs.reset(0)
    before = time.monotonic()
    with pytest.raises(EnvError, match=r"was killed \(SIGKILL"):
        envs.step({"": np.zeros(2, np.int32)})
    envs.close()
    assert time.monotonic() - before < 2.5


def test_a_worker_that_cannot_make_its_environments_says_why():
    with pytest.raises(EnvError, match="Unmade failed to be made: ValueError: not today"):
        WorkerEnvs(section("Unmade"), 2, 2)
    with pytest.raises(EnvError, match="nobody_has_this"):
        WorkerEnvs(section("nobody_has_this:Env"), 2, 2)


class Enough(Exception):
    pass


def test_environments_that_look_unlike_are_refused():
    with pytest.raises(EnvError, match=r"env worker of environment 1 .* has other spaces than"):
        WorkerEnvs(section("Moody"), 2, 2)


def test_while_a_worker_hangs_others_are_heard_and_an_end_comes():
    looks = []

    def look_up():
        looks.append(None)
        if is_patient is False and len(looks) == 3:
            raise Enough

    is_patient = True
    envs = WorkerEnvs(section("Hanging", kwargs={"after": 1}), 4, 2, look_up=look_up)
    envs.reset(0)
    envs.step(STILL)
    is_patient = False
    looks.clear()
    with pytest.raises(Enough):
        envs.step(STILL)
    before = time.monotonic()
    envs.close()
    assert time.monotonic() - before < worker_module.CLOSE_S + 2


def test_a_fault_in_close_is_told():
    envs = WorkerEnvs(section("BadEnd"), 4, 2)
    with pytest.raises(EnvError, match="BadEnd failed in close: RuntimeError: cannot close"):
        envs.close()


def test_what_an_environment_starts_holds_nobody_up():
    envs = WorkerEnvs(section("Parent"), 2, 2)
    envs.reset(0)
    before = time.monotonic()
    envs.close()
    assert time.monotonic() - before < 3
