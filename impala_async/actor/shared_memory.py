"""An actor and its env workers share one block of memory with a row for each column.

An actor writes actions; a worker writes all else, and only the rows of its own columns. The memory
has no name: it is a descriptor that workers inherit, and the kernel frees it with the last process
that has it, however that ends.

C columns

Runs on: sampler thread, env worker
"""

import mmap
import os
from itertools import accumulate, chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from impala_async.envs.batch import Obs, Step
from impala_async.schema import ActionSpec, ArraySpec, ObsSpec

# Bits of what a step brought besides what every step brings.
HAS_FINAL_OBS, HAS_IDLE, HAS_UNTRAINED = 1, 2, 4
ALIGNMENT = 64
OTHERS = (
    *(ArraySpec(name, (), "bool") for name in ("terminated", "truncated", "idle", "untrained")),
    *(ArraySpec("reward", (), "float32"), ArraySpec("place", (), "int32")),
)


def new_memory() -> int:
    """The descriptor of a block that has no size yet: environments must be seen before."""
    return os.memfd_create("impala-async-columns")


class SharedColumns:
    """Typed views of the memory, or of some columns in it."""

    def __init__(self, *groups: dict[str, NDArray[Any]]) -> None:
        """Observations, final observations, actions, and what has a number for each column."""
        self._groups = groups
        self.obs, self.final_obs, self.actions, others = groups
        self.rewards_C, self._places_C = others["reward"], others["place"]
        self.terminated_C, self.truncated_C = others["terminated"], others["truncated"]
        self.idle_C, self.untrained_C = others["idle"], others["untrained"]

    @staticmethod
    def over(memory: int, obs: ObsSpec, action: ActionSpec, num_columns: int) -> "SharedColumns":
        """Give the memory its size, if it has none, and map it."""
        actions = tuple(part.array for part in action.parts)
        groups = (obs.leaves, obs.leaves, actions, OTHERS)
        sizes = [
            -(-num_columns * spec.num_bytes // ALIGNMENT) * ALIGNMENT for spec in chain(*groups)
        ]
        *offsets, num_bytes = accumulate(sizes, initial=0)
        if not os.fstat(memory).st_size:
            os.ftruncate(memory, num_bytes)
        buffer, places = mmap.mmap(memory, num_bytes), iter(offsets)
        return SharedColumns(
            *(
                {
                    spec.name: np.ndarray(
                        (num_columns, *spec.shape), spec.dtype, buffer, next(places)
                    )
                    for spec in group
                }
                for group in groups
            )
        )

    @property
    def place(self) -> memoryview:
        """Where the worker of these columns says which environment it is in: `Running.place`."""
        return self._places_C[:1].data

    def touch(self) -> None:
        """Write to every page, so that none has to be found while environments step."""
        for group in self._groups:
            for array in group.values():
                array.fill(0)

    def columns(self, first: int, last: int) -> "SharedColumns":
        """Views of the columns from `first` to before `last`."""
        return SharedColumns(
            *({name: array[first:last] for name, array in group.items()} for group in self._groups)
        )

    def write_obs(self, obs: Obs) -> None:
        for name, array in self.obs.items():
            array[...] = obs[name]

    def write(self, step: Step) -> int:
        """Store what a step gave; the bits of what it brought besides."""
        self.write_obs(step.obs)
        self.rewards_C[...] = step.rewards
        self.terminated_C[...] = step.terminated
        self.truncated_C[...] = step.truncated
        brought = 0
        if step.final_obs is not None:
            brought |= HAS_FINAL_OBS
            for name, array in self.final_obs.items():
                array[...] = step.final_obs[name]
        if step.idle is not None:
            brought |= HAS_IDLE
            self.idle_C[...] = step.idle
        if step.untrained is not None:
            brought |= HAS_UNTRAINED
            self.untrained_C[...] = step.untrained
        return brought

    def read(self, brought: int) -> Step:
        """The step that was stored, without copies."""
        return Step(
            self.obs,
            self.rewards_C,
            self.terminated_C,
            self.truncated_C,
            self.final_obs if brought & HAS_FINAL_OBS else None,
            self.idle_C if brought & HAS_IDLE else None,
            self.untrained_C if brought & HAS_UNTRAINED else None,
        )
