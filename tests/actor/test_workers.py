"""Env workers are to a sampler what the same environments are in one process."""

import errno
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from impala_async.actor import workers as worker_module
from impala_async.actor.env_worker import RESET, STEP, SharedColumns, as_line
from impala_async.actor.workers import Worker, WorkerEnvs
from impala_async.config.policies import ONE_POLICY
from impala_async.envs.faults import RUNNING
from impala_async.envs.make import build_envs
from impala_async.errors import EnvError, EnvHangsError
from tests.actor.worlds import PAIR, bytes_of, play, section
from tests.e2e.harness import is_alive
from tests.wire.ends import until

LIVES = "tests.envs.test_agents:Lives"
STILL = {"": np.zeros(4, np.int32)}


@pytest.mark.parametrize(
    ("name", "settings", "policies"),
    [
        ("Masked", {"last_action": True, "last_reward": True}, ONE_POLICY),
        (LIVES, {"kwargs": {"lengths": (2, 3, 1), "starts": (0, 0, 1)}}, ONE_POLICY),
        (LIVES, {}, PAIR),
        ("short_poles", {"kwargs": {"mode": "NextStep"}}, ONE_POLICY),
        ("short_poles", {"kwargs": {"mode": "SameStep"}}, ONE_POLICY),
    ],
)
def test_trajectories_are_those_of_one_process_to_the_last_bit(name, settings, policies):
    env, cuts = section(name, **settings), [n % 11 == 10 for n in range(64)]
    expected = play(build_envs("parallel", env, 5, policies), 64, cuts=cuts)
    found = play(WorkerEnvs(env, 5, 2, policies), 64, cuts=cuts)
    assert len(found) >= 8
    assert any(message.num_cut for message in found)
    assert bytes_of(found) == bytes_of(expected)
    assert any(message.episodes for message in found)


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
    # So it is for who goes on with them, as an actor does that only measured them.
    with pytest.raises(EnvError) as again:
        envs.reset(0)
    assert again.value is error.value
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


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Unmade", "Unmade failed to be made: ValueError: not today"),
        ("nobody_has_this:Env", "nobody_has_this"),
        ("Moody", r"env worker of environment 1 .* has other spaces than"),
    ],
)
def test_workers_that_cannot_be_had_say_why(name, says):
    with pytest.raises(EnvError, match=says):
        WorkerEnvs(section(name), 2, 2)


def test_one_that_cannot_be_started_is_no_bug_and_ends_the_others(monkeypatch):
    started, start = [], subprocess.Popen

    def refuse(*args, **kwargs):
        if started:
            raise OSError(errno.EMFILE, "Too many open files")
        started.append(start(*args, **kwargs))
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(EnvError, match="worker 1 of 2 cannot be started: Too many open") as caught:
        WorkerEnvs(section("Counting"), 2, 2)
    assert caught.value.is_death  # the next try may find room
    assert started[0].poll() is not None


def test_memory_that_cannot_be_had_is_no_bug(monkeypatch):
    def refuse(*_):
        raise OSError(errno.EFBIG, "File too large")

    monkeypatch.setattr(os, "ftruncate", refuse)
    with pytest.raises(EnvError, match="2 env workers share cannot be had: File too") as caught:
        WorkerEnvs(section("Counting"), 2, 2)
    assert caught.value.is_death


def test_while_a_worker_hangs_others_are_heard_and_an_end_comes(monkeypatch):
    monkeypatch.setattr(worker_module, "CLOSE_S", 1.0)
    seen = []

    def look_up():
        is_in_step = RUNNING.call is not None and RUNNING.call[0].where == "in step"
        # And the worker has said which of its environments it steps.
        if is_in_step and RUNNING.place[0]:
            call, _ = RUNNING.call
            seen.append(call.describe(12.0, "actor 2"))
        if len(seen) == 3:
            raise Stopped

    envs = WorkerEnvs(section("Hanging", kwargs={"after": 0}), 4, 2, look_up=look_up)
    envs.reset(0)
    with pytest.raises(Stopped):
        envs.step(STILL)
    assert seen == ["environment 0 of actor 2 has been in step for 12 s"] * 3
    assert RUNNING.call is None
    before = time.monotonic()
    envs.close()
    assert time.monotonic() - before < worker_module.CLOSE_S + 2


def test_simulators_that_end_slowly_are_ended(tmp_path, caplog):
    env = section("Simulator", kwargs={"folder": str(tmp_path), "takes_s": 0.4})
    envs = WorkerEnvs(env, 4, 1)
    envs.reset(0)
    envs.close()
    assert len([*tmp_path.iterdir()]) == 4
    assert not caplog.messages


def test_many_that_do_not_end_are_one_line(caplog, monkeypatch):
    monkeypatch.setattr(worker_module, "CLOSE_S", 1.0)
    envs = WorkerEnvs(section("Hanging", kwargs={"after": 0}), 3, 3)
    envs.reset(0)
    for worker in envs._workers:
        worker.tell(STEP, "in step")
    envs.close()
    (line,) = caplog.messages
    assert re.fullmatch(
        "the env worker of environment 0 of .* does not end, nor do 2 more: killed", line
    )


def test_an_end_that_comes_while_they_start_is_heeded_at_once(monkeypatch):
    started, start = [], subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda *a, **k: started.append(start(*a, **k)) or started[-1]
    )

    def look_up():
        if started:
            raise Stopped

    with pytest.raises(Stopped):
        WorkerEnvs(section("Counting"), 9, 9, look_up=look_up)
    assert len(started) == 1
    assert started[0].poll() is not None


def test_what_an_environment_starts_holds_nobody_up():
    envs = WorkerEnvs(section("Parent"), 2, 2)
    envs.reset(0)
    before = time.monotonic()
    envs.close()
    assert time.monotonic() - before < 8.0
    envs = WorkerEnvs(section("Forking"), 2, 1)
    envs.reset(0)
    before = time.monotonic()
    with pytest.raises(EnvError, match=r"was killed \(SIGKILL"):
        envs.step({"": np.zeros(2, np.int32)})
    assert time.monotonic() - before < 10.0
    envs.close()


ROOT = Path(__file__).resolve().parents[2]


class Stopped(Exception):
    pass


@contextmanager
def working(env, look_up=lambda: None):
    """A worker that has been reset, of one environment."""
    memory = os.memfd_create("columns")
    sections = {"env": env, "policies": ONE_POLICY}
    order = {name: each.model_dump(mode="json") for name, each in sections.items()}
    worker = Worker(order | {"num_envs": 1, "first_env": 0}, memory, look_up)
    try:
        *_, (obs, action, _) = worker.hear_look()
        worker.place = SharedColumns.over(memory, obs, action, 1).place
        worker.tell(as_line([1, 0]))
        worker.tell(RESET + as_line(1), "in reset")
        worker.hear()
        yield worker
    finally:
        os.close(memory)
        os.close(worker.commands)
        worker.closes_until(time.monotonic() + 1.0)
        worker.process.kill()
        worker.end()


def test_one_that_takes_too_long_tells_its_stack(capfd):
    with working(section("Hanging", kwargs={"after": 0})) as worker:
        # Not before: a reset may take longer on a busy machine.
        worker._timeout_s = 0.1
        worker.tell(STEP, "in step")
        said = r"worlds:Hanging has been in step for \d+ s, longer than env.step_timeout_s"
        with pytest.raises(EnvHangsError, match=said) as caught:
            worker.hear()
    assert caught.value.exit_code == 70
    assert "in step" in capfd.readouterr().err


def test_an_actor_that_was_stopped_for_a_while_has_not_waited_meanwhile(monkeypatch):
    times = []

    def read_clock():
        times.append(10_000.0 if times else 0.0)
        return times[-1]

    def look_up():
        if len(times) > 3:
            raise Stopped

    with working(section("Hanging", kwargs={"after": 0}), look_up) as worker:
        worker.tell(STEP, "in step")
        monkeypatch.setattr(worker_module, "time", SimpleNamespace(monotonic=read_clock))
        with pytest.raises(Stopped):
            worker.hear()
        monkeypatch.undo()


def test_one_that_was_ended_with_its_actor_is_no_fault_of_its_own():
    """Who ends an actor may end all processes of its group."""
    is_told = False

    def look_up():
        if is_told:
            raise Stopped

    with working(section("CartPole-v1"), look_up) as worker:
        worker.process.kill()
        worker.process.wait()
        with pytest.raises(EnvError, match=r"was killed \(SIGKILL\)"):
            worker.tell(STEP, "in step")
        is_told = True
        with pytest.raises(Stopped):
            worker.tell(STEP, "in step")


def test_signals_are_left_to_its_actor():
    with working(section("CartPole-v1")) as worker:
        for number in (signal.SIGINT, signal.SIGTERM):
            worker.process.send_signal(number)
            for _ in range(3):
                worker.tell(STEP, "in step")
                worker.hear()
        assert worker.process.poll() is None


ACTOR = """
import sys
import numpy as np
from impala_async.actor.workers import WorkerEnvs
from impala_async.config.env import EnvSection

envs = WorkerEnvs(EnvSection(id=sys.argv[1], kwargs={"after": 1}), 2, 2)
envs.reset(0)
envs.step({"": np.zeros(2, np.int32)})
print("ready", flush=True)
envs.step({"": np.zeros(2, np.int32)})
"""


def test_when_its_actor_is_killed_in_a_step_it_ends_and_leaves_nothing():
    command = [sys.executable, "-c", ACTOR, "tests.actor.worlds:Hanging"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as actor:
        assert actor.stdout.readline() == b"ready\n"
        workers = psutil.Process(actor.pid).children()
        assert len(workers) == 2
        actor.kill()
    until(lambda: not any(is_alive(worker) for worker in workers))
