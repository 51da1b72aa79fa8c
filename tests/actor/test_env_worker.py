"""The memory and the pipes that an env worker shares with its actor."""

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from impala_async.actor.env_worker import SharedColumns, as_line, read_json, write
from impala_async.actor.workers import PROGRAM
from impala_async.envs.batch import Step
from impala_async.schema import ActionPart, ActionSpec, ArraySpec, ObsSpec

OBS = ObsSpec((ArraySpec("a", (3,), "uint8"), ArraySpec("b", (), "float64")))
ACTION = ActionSpec(
    (ActionPart("go", "discrete", (2,)), ActionPart("push", "continuous", (), (2,)))
)
C = 5


def test_it_ends_with_its_actor_before_it_has_an_order():
    commands, ours = os.pipe()
    memory = os.memfd_create("columns")
    given = (commands, os.open(os.devnull, os.O_WRONLY), memory)
    worker = subprocess.Popen([*PROGRAM, *map(str, given)], pass_fds=given, stderr=subprocess.PIPE)
    for fd in (*given, ours):
        os.close(fd)
    _, told = worker.communicate(timeout=20)
    assert (worker.returncode, told) == (0, b"")


@pytest.mark.parametrize("value", [None, 7, {"a": [1, "b" * 100_000]}])
def test_values_of_any_size_go_through_a_pipe(value):
    read, into = os.pipe()
    with ThreadPoolExecutor(1) as thread:
        written = thread.submit(write, into, as_line(value))
        assert read_json(read) == value
        written.result()
    os.close(into)
    with pytest.raises(EOFError):
        read_json(read)
    os.close(read)


def step_of(num_columns, value):
    flags = [np.arange(num_columns) % 2 == bit for bit in (0, 1)]
    obs = {"a": np.full((num_columns, 3), value, np.uint8), "b": np.full(num_columns, value + 0.5)}
    return Step(obs, np.full(num_columns, value, np.float32), *flags)


def test_what_one_side_writes_the_other_reads_and_neighbours_keep_theirs():
    memory = os.memfd_create("columns")
    here = SharedColumns.over(memory, OBS, ACTION, C)
    # It has no name that could be left behind.
    assert os.fstat(memory).st_nlink == 0
    there = SharedColumns.over(os.dup(memory), OBS, ACTION, C)
    os.close(memory)
    first, rest = there.columns(0, 2), there.columns(2, 5)
    assert first.write([step_of(2, 3).obs]) == 0b1
    assert here.obs["a"][:, 0].tolist() == [3, 3, 0, 0, 0]
    brought = first.write(step_of(2, 7))
    assert brought == 0b1111
    assert here.read(brought)[4:] == (None, None, None)
    step = step_of(3, 9)
    final_obs = {name: array + 1 for name, array in step.obs.items()}
    step = step._replace(final_obs=final_obs, idle=step.truncated, untrained=step.terminated)
    assert rest.write(step) == 0b1111111
    step = here.read(0b1111111)
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
