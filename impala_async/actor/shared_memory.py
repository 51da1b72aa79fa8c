"""What an actor and its env workers share: one block of memory with a row for each column.

An actor writes actions; a worker writes all else, and only the rows of its own columns. The memory
has no name: it is a descriptor that workers inherit, and the kernel frees it with the last process
that has it, however that ends.

C columns

Runs on: sampler thread, env worker
"""

import math
import mmap
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from impala_async.envs.batch import Obs, Step
from impala_async.schema import ActionSpec, ArraySpec, ObsSpec

# Bits of what a step brought besides what every step brings.
HAS_FINAL_OBS, HAS_IDLE, HAS_UNTRAINED = 1, 2, 4
ALIGNMENT = 64


def new_memory() -> int:
    """The descriptor of a block that has no size yet: environments must be seen before."""
    return os.memfd_create("impala-async-columns")


class SharedColumns:
    """Typed views of the memory, or of some columns in it."""

    def __init__(
        self,
        obs: Obs,
        final_obs: Obs,
        actions: dict[str, NDArray[Any]],
        flags: dict[str, NDArray[np.bool_]],
        rewards_C: NDArray[np.float32],
        places_C: NDArray[np.int32],
    ) -> None:
        self.obs, self.final_obs, self.actions = obs, final_obs, actions
        self.rewards_C = rewards_C
        self._places_C = places_C
        self._flags = flags
        self.terminated_C, self.truncated_C = flags["terminated"], flags["truncated"]
        self.idle_C, self.untrained_C = flags["idle"], flags["untrained"]

    @staticmethod
    def over(memory: int, obs: ObsSpec, action: ActionSpec, num_columns: int) -> "SharedColumns":
        """Give the memory its size, if it has none, and map it."""
        arrays = _Arrays(num_columns)
        observed = [arrays.of_all(obs.leaves) for _ in range(2)]
        actions = arrays.of_all(part.array for part in action.parts)
        flags = arrays.of_all(
            ArraySpec(name, (), "bool") for name in ("terminated", "truncated", "idle", "untrained")
        )
        rewards = arrays.of_all([ArraySpec("", (), "float32")])
        places = arrays.of_all([ArraySpec("", (), "int32")])
        if not os.fstat(memory).st_size:
            os.ftruncate(memory, arrays.num_bytes)
        buffer = mmap.mmap(memory, arrays.num_bytes)
        obs_C, final_obs_C, actions_C, flags_C, rewards_C, places_C = (
            {name: _view(buffer, *place) for name, place in group.items()}
            for group in (*observed, actions, flags, rewards, places)
        )
        return SharedColumns(obs_C, final_obs_C, actions_C, flags_C, rewards_C[""], places_C[""])

    @property
    def place(self) -> memoryview:
        """Where the worker of these columns says which environment it is in: `Running.place`."""
        return self._places_C[:1].data

    def touch(self) -> None:
        """Write to every page, so that none has to be found while environments step."""
        for array in (
            *self.obs.values(),
            *self.final_obs.values(),
            *self.actions.values(),
            *self._flags.values(),
            self.rewards_C,
            self._places_C,
        ):
            array.fill(0)

    def columns(self, first: int, last: int) -> "SharedColumns":
        """Views of the columns from `first` to before `last`."""

        def cut(arrays: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
            return {name: array[first:last] for name, array in arrays.items()}

        return SharedColumns(
            cut(self.obs),
            cut(self.final_obs),
            cut(self.actions),
            cut(self._flags),
            self.rewards_C[first:last],
            self._places_C[first:last],
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


class _Arrays:
    """Places of arrays one after the other, with a row for each column."""

    def __init__(self, num_columns: int) -> None:
        self._num_columns = num_columns
        self.num_bytes = 0

    def of_all(self, specs: Any) -> dict[str, tuple[int, tuple[int, ...], np.dtype[Any]]]:
        return {spec.name: self._place(spec) for spec in specs}

    def _place(self, spec: ArraySpec) -> tuple[int, tuple[int, ...], np.dtype[Any]]:
        shape, dtype = (self._num_columns, *spec.shape), np.dtype(spec.dtype)
        offset = self.num_bytes
        size = math.prod(shape) * dtype.itemsize
        self.num_bytes += -(-size // ALIGNMENT) * ALIGNMENT
        return offset, shape, dtype


def _view(
    buffer: mmap.mmap, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> NDArray[Any]:
    return np.ndarray(shape, dtype, buffer=buffer, offset=offset)
