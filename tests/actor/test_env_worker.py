"""The process itself, spoken to through its pipes."""

import json
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from impala_async.actor.env_worker import (
    FAULT,
    RESET,
    STEP,
    Order,
    read_json,
    write_json,
)
from impala_async.actor.shared_memory import SharedColumns, new_memory
from impala_async.actor.worker import PROGRAM
from impala_async.config.policies import ONE_POLICY
from impala_async.envs.describe import read_answer
from impala_async.envs.make import build_envs
from tests.actor.worlds import section

POLE = section("CartPole-v1")


class Spoken:
    """A worker, and the ends of its pipes that an actor has."""

    def __init__(self):
        theirs, self.commands = os.pipe()
        self.replies, replies = os.pipe()
        self.memory = new_memory()
        given = (theirs, replies, self.memory)
        self.process = subprocess.Popen(
            [*PROGRAM, *map(str, given)], pass_fds=given, stderr=subprocess.PIPE
        )
        os.close(theirs)
        os.close(replies)

    def order(self, env=POLE, num_envs=2, first_env=3):
        given = env.model_dump(mode="json"), ONE_POLICY.model_dump(mode="json")
        write_json(self.commands, Order(*given, num_envs, first_env)._asdict())

    def hang_up(self):
        if self.commands >= 0:
            os.close(self.commands)
            self.commands = -1


@contextmanager
def spoken():
    made = Spoken()
    try:
        yield made
    finally:
        made.hang_up()
        _, told = made.process.communicate(timeout=20)
        os.close(made.replies)
        os.close(made.memory)
        assert b"Traceback" not in told


def test_it_steps_what_it_is_told_to_where_it_is_told_to():
    with spoken() as worker:
        worker.order()
        assert os.read(worker.replies, 1) == b"\0"
        look = read_json(worker.replies)
        assert (look["name"], look["autoreset"]) == ("CartPole-v1", "NextStep")
        here = build_envs("serial", POLE, 5)
        assert look["spaces"]["num_columns"] == 2
        shared = SharedColumns.over(worker.memory, here.obs_spec, here.action_spec, 6)
        shared.touch()
        write_json(worker.commands, [6, 1])
        write_json(worker.commands, 11, before=RESET)
        assert os.read(worker.replies, 1) == b"\0"
        expected = here.reset(11)[""]
        assert shared.obs[""].tolist() == [[0] * 4, *expected[3:].tolist(), *[[0] * 4] * 3]
        shared.actions[""][1:3] = 1, 0
        os.write(worker.commands, STEP)
        assert os.read(worker.replies, 1) == b"\0"
        step = here.step({"": shared.actions[""][[0, 0, 0, 1, 2]]})
        assert shared.obs[""][1:3].tolist() == step.obs[""][3:].tolist()
        assert shared.rewards_C.tolist() == [0, 1, 1, 0, 0, 0]
        worker.hang_up()
        assert worker.process.wait(20) == 0


def test_it_ends_with_its_actor_whatever_it_waits_for():
    with spoken() as worker:
        worker.hang_up()
        assert worker.process.wait(20) == 0
    with spoken() as worker:
        worker.order()
        os.read(worker.replies, 1)
        read_answer(json.dumps(read_json(worker.replies)["spaces"]).encode())
        worker.hang_up()
        assert worker.process.wait(20) == 0


def test_a_fault_is_its_last_word():
    with spoken() as worker:
        worker.order(section("Unmade"))
        assert os.read(worker.replies, 1) == bytes([FAULT])
        told = read_json(worker.replies)
        assert "Unmade failed to be made: ValueError: not today" in told["error"]
        assert "worlds.py" in told["traceback"]
        assert worker.process.wait(20) == 2


@pytest.mark.parametrize("how", ["SystemExit", "KeyboardInterrupt"])
def test_an_environment_that_would_end_it_is_a_fault_too(how):
    with spoken() as worker:
        worker.order(section("Unmade", kwargs={"how": how}))
        assert os.read(worker.replies, 1) == bytes([FAULT])
        told = read_json(worker.replies)
        assert f"Unmade failed to be made with kwargs {{'how': '{how}'}}: {how}" in told["error"]
        assert "worlds.py" in told["traceback"]
        assert worker.process.wait(20) == 2


@pytest.mark.parametrize("value", [None, 7, {"a": [1, "b" * 100_000]}])
def test_values_of_any_size_go_through_a_pipe(value):
    read, write = os.pipe()
    with ThreadPoolExecutor(1) as thread:
        written = thread.submit(write_json, write, value)
        assert read_json(read) == value
        written.result()
    os.close(write)
    with pytest.raises(EOFError):
        read_json(read)
    os.close(read)
