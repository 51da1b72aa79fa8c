"""The process itself, spoken to through its pipes."""

import json
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest

from impala_async.actor.env_worker import (
    FAULT,
    RESET,
    STEP,
    SharedColumns,
    read_json,
    write_json,
)
from impala_async.actor.workers import PROGRAM
from impala_async.envs.batch import Step
from impala_async.envs.describe import read_answer
from impala_async.envs.make import build_envs
from impala_async.schema import ActionPart, ActionSpec, ArraySpec, ObsSpec
from tests.actor.test_workers import order_of
from tests.actor.worlds import section

POLE = section("CartPole-v1")


class Spoken:
    """A worker, and the ends of its pipes that an actor has."""

    def __init__(self):
        theirs, self.commands = os.pipe()
        self.replies, replies = os.pipe()
        self.memory = os.memfd_create("columns")
        given = (theirs, replies, self.memory)
        self.process = subprocess.Popen(
            [*PROGRAM, *map(str, given)], pass_fds=given, stderr=subprocess.PIPE
        )
        os.close(theirs)
        os.close(replies)

    def order(self, env=POLE):
        write_json(self.commands, order_of(env, num_envs=2, first_env=3))

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
        assert os.read(worker.replies, 1) == b"\1"
        expected = here.reset(11)[""]
        assert shared.obs[""].tolist() == [[0] * 4, *expected[3:].tolist(), *[[0] * 4] * 3]
        shared.actions[""][1:3] = 1, 0
        os.write(worker.commands, STEP)
        assert os.read(worker.replies, 1) == b"\x0f"
        step = here.step({"": shared.actions[""][[0, 0, 0, 1, 2]]})
        assert shared.obs[""][1:3].tolist() == step.obs[""][3:].tolist()
        assert shared.read(15).rewards.tolist() == [0, 1, 1, 0, 0, 0]
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


@pytest.mark.parametrize("how", ["ValueError", "SystemExit", "KeyboardInterrupt"])
def test_a_fault_is_its_last_word(how):
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


OBS = ObsSpec((ArraySpec("a", (3,), "uint8"), ArraySpec("b", (), "float64")))
ACTION = ActionSpec(
    (ActionPart("go", "discrete", (2,)), ActionPart("push", "continuous", (), (2,)))
)
C = 5


def step_of(num_columns, value, is_full):
    flags = [np.arange(num_columns) % 2 == bit for bit in (0, 1)]
    obs = {
        "a": np.full((num_columns, 3), value, np.uint8),
        "b": np.full(num_columns, value + 0.5),
    }
    step = Step(obs, np.full(num_columns, value, np.float32), *flags)
    final_obs = {name: array + 1 for name, array in obs.items()}
    return (
        step._replace(final_obs=final_obs, idle=flags[1], untrained=flags[0]) if is_full else step
    )


def test_what_one_side_writes_the_other_reads_and_neighbours_keep_theirs():
    memory = os.memfd_create("columns")
    here = SharedColumns.over(memory, OBS, ACTION, C)
    here.touch()
    # It has no name that could be left behind.
    assert os.fstat(memory).st_nlink == 0
    there = SharedColumns.over(os.dup(memory), OBS, ACTION, C)
    os.close(memory)
    first, rest = there.columns(0, 2), there.columns(2, 5)
    brought = first.write(step_of(2, 7, is_full=False))
    assert brought == 0b1111
    assert here.read(brought)[4:] == (None, None, None)
    brought = rest.write(step_of(3, 9, is_full=True))
    assert brought == 0b1111111
    step = here.read(brought)
    assert step.obs["a"][:, 0].tolist() == [7, 7, 9, 9, 9]
    assert step.obs["b"].tolist() == [7.5, 7.5, 9.5, 9.5, 9.5]
    assert step.rewards.tolist() == [7, 7, 9, 9, 9]
    assert step.terminated.tolist() == [True, False, True, False, True]
    assert step.truncated.tolist() == [False, True, False, True, False]
    assert step.final_obs["b"].tolist() == [0, 0, 10.5, 10.5, 10.5]
    assert step.idle.tolist() == [False, False, False, True, False]
    assert step.untrained.tolist() == [False, False, True, False, True]
    here.actions["go"][...] = range(C)
    here.actions["push"][3] = 2.5
    assert rest.actions["go"].tolist() == [2, 3, 4]
    assert rest.actions["push"].tolist() == [[0, 0], [2.5, 2.5], [0, 0]]


def test_no_array_reaches_into_another():
    shared = SharedColumns.over(os.memfd_create("columns"), OBS, ACTION, C)
    shared.touch()
    step = shared.read(0b1111111)
    arrays = [*step.obs.values(), *step.final_obs.values(), *shared.actions.values(), *step[1:4]]
    arrays.append(step.idle)
    for number, array in enumerate(arrays):
        array.reshape(-1).view(np.uint8).fill(number + 1)
    for number, array in enumerate(arrays):
        assert {*array.reshape(-1).view(np.uint8).tolist()} == {number + 1}
        assert array.ctypes.data % array.itemsize == 0
    assert not step.untrained.any()
