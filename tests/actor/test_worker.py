"""One worker, as its actor sees it; and what becomes of it when there is no actor any more."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from impala_async.actor import worker as worker_module
from impala_async.actor.env_worker import RESET, Order
from impala_async.actor.shared_memory import SharedColumns, new_memory
from impala_async.actor.worker import Worker, end_workers
from impala_async.config.policies import ONE_POLICY
from impala_async.envs.faults import RUNNING
from impala_async.envs.watch import describe
from impala_async.errors import EnvError, EnvHangsError
from tests.actor.worlds import section

ROOT = Path(__file__).resolve().parents[2]


class Stopped(Exception):
    pass


@contextmanager
def working(env, look_up=lambda: None, num_envs=1):
    """A worker that has been reset."""
    given = env.model_dump(mode="json"), ONE_POLICY.model_dump(mode="json")
    memory = new_memory()
    worker = Worker(Order(*given, num_envs, 0), memory, look_up)
    try:
        worker.hear_look()
        spaces = worker.spaces
        worker.place = SharedColumns.over(memory, spaces.obs, spaces.action, num_envs).place
        worker.tell([num_envs, 0])
        worker.tell(1, RESET)
        worker.hear()
        yield worker
    finally:
        os.close(memory)
        end_workers([worker], is_quiet=True)


def test_one_that_takes_long_is_told_of():
    """By whoever looks at what runs, as it is told of a call in this process."""
    seen = []

    def look_up():
        is_in_step = RUNNING.call is not None and RUNNING.call[0].where == "in step"
        # And the worker has said which of its environments it steps.
        if RUNNING.call is not None and is_in_step and RUNNING.place[0]:
            call, _ = RUNNING.call
            seen.append(describe(call, RUNNING.place[0], 12.0, "actor 2"))
            raise Stopped

    with working(section("Hanging", kwargs={"after": 0}), look_up) as worker:
        worker.begin_step()
        with pytest.raises(Stopped):
            worker.hear()
    assert seen == ["environment 0 of actor 2 has been in step for 12 s"]
    assert RUNNING.call is None


def test_one_that_takes_too_long_tells_its_stack(capfd):
    with working(section("Hanging", kwargs={"after": 0})) as worker:
        # Not before: a reset may take longer on a busy machine.
        worker._timeout_s = 0.1
        worker.begin_step()
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
        worker.begin_step()
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
            worker.begin_step()
        is_told = True
        with pytest.raises(Stopped):
            worker.begin_step()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_left_to_its_actor(number):
    with working(section("CartPole-v1")) as worker:
        worker.process.send_signal(number)
        for _ in range(3):
            worker.begin_step()
            worker.hear()
        assert worker.process.poll() is None


def test_ended_twice_does_no_harm():
    with working(section("CartPole-v1")) as worker:
        end_workers([worker])
        assert worker.process.returncode == 0
        end_workers([worker])


def is_alive(process):
    """Nobody may be there to take note of its end."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


ACTOR = """
import sys
import numpy as np
from impala_async.actor.workers import WorkerEnvs
from impala_async.config.env import EnvSection

envs = WorkerEnvs(EnvSection(id=sys.argv[1], kwargs={"after": 1}), 2, 2)
envs.reset(0)
envs.step({"": np.zeros(2, np.int32)})
print("ready", flush=True)
if sys.argv[2] == "in step":
    envs.step({"": np.zeros(2, np.int32)})
sys.stdin.read()
"""


@pytest.mark.parametrize("when", ["in step", "between steps"])
def test_when_its_actor_is_killed_it_ends_and_leaves_nothing(when: str) -> None:
    command = [sys.executable, "-c", ACTOR, "tests.actor.worlds:Hanging", when]
    actor = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert actor.stdout is not None
    assert actor.stdin is not None
    try:
        assert actor.stdout.readline() == b"ready\n"
        workers = psutil.Process(actor.pid).children()
        assert len(workers) == 2
    finally:
        actor.kill()
        actor.wait()
        actor.stdout.close()
        actor.stdin.close()
    give_up_at = time.monotonic() + 20
    while any(is_alive(worker) for worker in workers):
        assert time.monotonic() < give_up_at
        time.sleep(0.02)
