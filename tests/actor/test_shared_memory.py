import os

import numpy as np

from impala_async.actor.shared_memory import (
    HAS_FINAL_OBS,
    HAS_IDLE,
    HAS_UNTRAINED,
    SharedColumns,
    new_memory,
)
from impala_async.envs.batch import Step
from impala_async.schema import ActionPart, ActionSpec, ArraySpec, ObsSpec

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
    memory = new_memory()
    here = SharedColumns.over(memory, OBS, ACTION, C)
    here.touch()
    there = SharedColumns.over(os.dup(memory), OBS, ACTION, C)
    os.close(memory)
    first, rest = there.columns(0, 2), there.columns(2, 5)
    assert first.write(step_of(2, 7, is_full=False)) == 0
    brought = rest.write(step_of(3, 9, is_full=True))
    assert brought == HAS_FINAL_OBS | HAS_IDLE | HAS_UNTRAINED
    step = here.read(brought)
    assert step.obs["a"][:, 0].tolist() == [7, 7, 9, 9, 9]
    assert step.obs["b"].tolist() == [7.5, 7.5, 9.5, 9.5, 9.5]
    assert step.rewards.tolist() == [7, 7, 9, 9, 9]
    assert step.terminated.tolist() == [True, False, True, False, True]
    assert step.truncated.tolist() == [False, True, False, True, False]
    assert step.final_obs is not None
    assert step.final_obs["b"].tolist() == [0, 0, 10.5, 10.5, 10.5]
    assert step.idle is not None
    assert step.idle.tolist() == [False, False, False, True, False]
    assert step.untrained is not None
    assert step.untrained.tolist() == [False, False, True, False, True]
    here.actions["go"][...] = range(C)
    here.actions["push"][3] = 2.5
    assert rest.actions["go"].tolist() == [2, 3, 4]
    assert rest.actions["push"].tolist() == [[0, 0], [2.5, 2.5], [0, 0]]


def test_what_a_step_did_not_bring_is_not_there():
    shared = SharedColumns.over(new_memory(), OBS, ACTION, C)
    step = shared.read(shared.write(step_of(C, 1, is_full=False)))
    assert step.final_obs is None
    assert step.idle is None
    assert step.untrained is None


def test_no_array_reaches_into_another():
    shared = SharedColumns.over(new_memory(), OBS, ACTION, C)
    shared.touch()
    arrays = [*shared.obs.values(), *shared.final_obs.values(), *shared.actions.values()]
    arrays += [shared.rewards_C, shared.terminated_C, shared.truncated_C, shared.idle_C]
    for number, array in enumerate(arrays):
        array.reshape(-1).view(np.uint8).fill(number + 1)
    for number, array in enumerate(arrays):
        assert {*array.reshape(-1).view(np.uint8).tolist()} == {number + 1}
        assert array.ctypes.data % array.itemsize == 0
    assert not shared.untrained_C.any()


def test_it_has_no_name_that_could_be_left_behind() -> None:
    memory = new_memory()
    SharedColumns.over(memory, OBS, ACTION, 1000).touch()
    assert os.fstat(memory).st_nlink == 0
    os.close(memory)
