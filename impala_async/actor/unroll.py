"""Writes rows of env steps into message buffers, one trajectory after the other.

    C columns, T action rows, S = T+1 observation rows, K frames of a window

Runs on: sampler thread
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from impala_async.errors import EnvError, MismatchError
from impala_async.metrics.host import find_memory
from impala_async.schema import ArraySpec, Schema
from impala_async.trajectory import columns_over
from impala_async.weights import NO_VERSION, Version
from impala_async.wire.peer import WINDOW

Obs = Mapping[str, NDArray[Any]]
EMPTY = 0
GIB = 1 << 30
# A trajectory is cut when it has this share of its rows: with fewer it would not be worth a batch.
LEAST_SHARE = 0.25

Episode = tuple[float, int]
"""A finished one: the sum of its rewards as the environment gave them, and its steps."""


class MessageBuffer:
    """The memory of one message: some columns of one trajectory each, in two planes. It is written
    to by the row, in time-major views: `[t]` is a row of all columns, found without a slice."""

    def __init__(self, schema: Schema, num_columns: int) -> None:
        layout = schema.layout
        self.num_columns = num_columns
        # Unlike `zeros` it touches the pages; and padding gets a value that can be sent.
        self.obs = np.full((num_columns, layout.obs_bytes), 0, np.uint8)
        self.small = np.full((num_columns, layout.small_bytes), 0, np.uint8)
        columns = self.columns = columns_over(schema, self.obs, self.small)
        self.obs_SC = {name: array.swapaxes(0, 1) for name, array in columns.obs.items()}
        self.actions_TC = {name: array.swapaxes(0, 1) for name, array in columns.actions.items()}
        self.log_probs_TC = columns.log_probs_CT.T
        self.rewards_TC = columns.rewards_CT.T
        self.terminated_TC = columns.terminated_CT.T
        self.truncated_TC = columns.truncated_CT.T
        self.mask_TC = columns.mask_CT.T


def plan_buffers(schema: Schema, columns: int, streams: int) -> tuple[int, int]:
    """How many buffers an actor has, and their bytes: for each stream a window under way, and one
    that is being written. Raises where this host has not the memory."""
    num = streams * (WINDOW + 1)
    wanted, memory = num * columns * schema.layout.column_bytes, find_memory()
    if wanted > memory.free:
        # Memory that others hold may be free again soon.
        raise (MismatchError if wanted > memory.total else MemoryError)(
            f"what this actor has under way wants {wanted / GIB:.1f} GiB of memory, and "
            f"{memory.free / GIB:.1f} GiB are free here: lower trajectory.rows, "
            "actor.num_envs, or the actor's own --num-envs"
        )
    return num, wanted


class Finished(NamedTuple):
    """A whole trajectory in a buffer, the version at its first row, episodes that ended in it, and
    how many of its rows were cut."""

    buffer: MessageBuffer
    version: Version
    episodes: list[Episode]
    num_cut: int = 0


class StackWriter:
    """Writes an observation that is a window over frames: each frame once, and which ones a row
    shows.

    A column holds an empty frame, the frames of its first row, and one for each row after it. A
    row's newest frame is new; the others are in the row before it, or empty, or the newest itself,
    as behind a reset. Any other frame would be lost, so it is an error.
    """

    def __init__(self, leaf: ArraySpec, obs: NDArray[Any]) -> None:
        self._name = leaf.name
        self._num_window = leaf.shape[0]
        # The last row that was seen: what the next one continues.
        self._last = np.array(obs, leaf.dtype, order="C")
        self._words = _wide(self._last)

    def begin(self, frames: NDArray[np.uint8], windows: NDArray[np.int32]) -> None:
        """Open a trajectory in `[C, frames, ...]` and `[C, S, K]`, with the last row as row 0."""
        self._frames, self._windows = frames, windows
        frames[:, EMPTY] = 0
        frames[:, 1 : 1 + self._num_window] = self._last
        windows[:, 0] = np.arange(1, 1 + self._num_window)

    def write(self, row: int, obs: NDArray[Any]) -> None:
        """The observation of a row after row 0, in order."""
        newest = self._num_window + row
        self._frames[:, newest] = obs[:, -1]
        windows = self._windows
        windows[:, row, :-1] = windows[:, row - 1, 1:]
        windows[:, row, -1] = newest
        words = _wide(obs)
        if not np.array_equal(words[:, :-1], self._words[:, 1:]):
            slides = (words[:, :-1] == self._words[:, 1:]).reshape(len(words), -1).all(1)
            for column in np.flatnonzero(~slides).tolist():
                windows[column, row] = self._find(column, row, newest, obs[column])
        np.copyto(self._last, obs)

    def repeat(self, row: int) -> None:
        """All rows after this one show what it shows."""
        self._windows[:, row + 1 :] = self._windows[:, row, None]
        # No frame is left of what lay in the buffer before.
        self._frames[:, 1 + self._num_window + row :] = 0

    def _find(self, column: int, row: int, newest: int, window: NDArray[Any]) -> list[int]:
        frames = self._frames[column]
        known = [newest, EMPTY, *self._windows[column, row - 1].tolist()]
        found = []
        for frame in window:
            place = next((place for place in known if np.array_equal(frames[place], frame)), None)
            if place is None:
                which = repr(self._name) if self._name else "the observation"
                raise EnvError(
                    f"env.frame_stack: {which} does not slide by one frame per step, and what "
                    "does not would be lost: set it to off"
                )
            found.append(place)
        return found


def _wide(stacks: NDArray[Any]) -> NDArray[Any]:
    """`[C, K, ...]` as `[C, K, words]`, of as many bytes as fit: fewer items to compare."""
    flat = stacks.reshape(*stacks.shape[:2], -1)
    return flat if flat.shape[-1] % 8 else flat.view(np.uint64)


class Unroll:
    """Columns that share a cursor: `begin` when `needs_buffer`, else `append`. It owns what
    outlives a trajectory: the observation that begins the next one, and the running episodes."""

    def __init__(self, schema: Schema, obs: Obs) -> None:
        """Begin with the observations of environments that were just reset."""
        self._num_rows = schema.rows
        self._buffer: MessageBuffer | None = None
        self._version = NO_VERSION
        self._episodes: list[Episode] = []
        leaves = schema.obs.leaves
        self._stacks = {
            leaf.name: StackWriter(leaf, obs[leaf.name]) for leaf in leaves if leaf.is_stack
        }
        # The observation of the row at which the next trajectory begins.
        self._carry = {
            leaf.name: np.array(obs[leaf.name], leaf.dtype) for leaf in leaves if not leaf.is_stack
        }
        self._cursor = 0
        num_columns = len(obs[leaves[0].name])
        self._returns = np.zeros(num_columns)
        # Lengths are differences of this clock, so that an ordinary row costs them nothing.
        self._num_appended = 0
        self._begun_at = np.zeros(num_columns, np.int64)

    @property
    def needs_buffer(self) -> bool:
        return self._buffer is None

    def begin(self, buffer: MessageBuffer, version: Version, state: Obs) -> None:
        """Open a trajectory in a buffer: the weights and the state that act at its first row."""
        for name, carry in self._carry.items():
            buffer.obs_SC[name][0] = carry
        for name, stack in self._stacks.items():
            stack.begin(buffer.columns.obs[name], buffer.columns.windows[name])
        for name, array in buffer.columns.state.items():
            array[...] = state[name]
        # Most rows have these; `append` writes only the others.
        buffer.mask_TC.fill(True)
        buffer.terminated_TC.fill(False)
        buffer.truncated_TC.fill(False)
        self._buffer = buffer
        self._version = version
        self._episodes = []
        self._cursor = 0

    def append(
        self,
        actions: Mapping[str, NDArray[Any]],
        log_probs: NDArray[np.float32],
        rewards: NDArray[np.float32],
        terminated: NDArray[np.bool_],
        truncated: NDArray[np.bool_],
        next_obs: Obs,
        masked: NDArray[np.bool_] | None = None,
    ) -> list[Finished]:
        """Write one row and the observation after it; the trajectory, when that was its last.

        The row of a `masked` column is no transition, and in no return and no length. Such is the
        one behind each end of an episode, which shows its last observation.
        """
        assert self._buffer is not None, "begin comes before append"
        buffer, t = self._buffer, self._cursor
        for name, values in actions.items():
            buffer.actions_TC[name][t] = values
        buffer.log_probs_TC[t] = log_probs
        rewards_C = buffer.rewards_TC[t]
        rewards_C[:] = rewards
        for name in self._carry:
            buffer.obs_SC[name][t + 1] = next_obs[name]
        for name, stack in self._stacks.items():
            stack.write(t + 1, next_obs[name])
        self._num_appended += 1
        if masked is not None and np.count_nonzero(masked):
            buffer.mask_TC[t][masked] = False
            for array in (buffer.rewards_TC, buffer.log_probs_TC, *buffer.actions_TC.values()):
                array[t][masked] = 0
            self._begun_at[masked] = self._num_appended
            terminated, truncated = terminated & ~masked, truncated & ~masked
        self._returns += rewards_C
        is_ending = terminated | truncated
        if np.count_nonzero(is_ending):
            buffer.terminated_TC[t], buffer.truncated_TC[t] = terminated, truncated
            for column in np.flatnonzero(is_ending).tolist():
                length = self._num_appended - int(self._begun_at[column])
                self._episodes.append((float(self._returns[column]), length))
                self._returns[column] = 0
        self._cursor = t + 1
        return [] if self._cursor < self._num_rows else self._end(buffer)

    def cut(self) -> list[Finished]:
        """End the trajectory here, if it has enough rows: a truncation whose rest is masked. The
        environments know nothing of it, and their episodes go on in the next one."""
        buffer, t = self._buffer, self._cursor
        if buffer is None or t < LEAST_SHARE * self._num_rows:
            return []
        # Row t shows what the environments show now: returns end with its value.
        buffer.truncated_TC[t - 1] |= buffer.mask_TC[t - 1] & ~buffer.terminated_TC[t - 1]
        rest = buffer.rewards_TC, buffer.log_probs_TC, *buffer.actions_TC.values()
        for array in (buffer.mask_TC, *rest):
            array[t:] = 0
        for name in self._carry:
            obs_SC = buffer.obs_SC[name]
            obs_SC[t + 1 :] = obs_SC[t]
        for stack in self._stacks.values():
            stack.repeat(t)
        return self._end(buffer)

    def _end(self, buffer: MessageBuffer) -> list[Finished]:
        # From here on the buffer belongs to whoever gets the message.
        self._buffer = None
        for name, carry in self._carry.items():
            np.copyto(carry, buffer.obs_SC[name][self._cursor])
        num_cut = self._num_rows - self._cursor
        return [Finished(buffer, self._version, self._episodes, num_cut)]
