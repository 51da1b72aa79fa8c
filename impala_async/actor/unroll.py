"""Writes rows of env steps into message buffers, one trajectory after the other.

`Unroll` owns what outlives a trajectory: the
observation that ends one and begins the next, which columns wait for their reset, and the running
episodes. Its columns share a cursor; columns that do not complete together need one `Unroll` each.

A row after an episode's end (the final observation) is no transition: mask False, action,
log-probability and reward 0, no flags. Such a row is in no return and no length. Rows of columns
that wait for others, or whose policy is not trained, are masked in the same way.

`StackWriter` writes an observation that is a window over frames: each frame once, and which ones a
row shows. A column holds an empty frame, the frames of its first row, and one for each row after
it. All that a row shows must be among those: its newest frame is new, and the others are in the
row before it, or empty, or the newest itself, as behind a reset. Any other frame would be lost, so
it is an error.

    C columns, T action rows, S = T+1 observation rows, K frames of a window; leaves of a buffer are
    seen time-major here

Runs on: sampler thread
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from impala_async.actor.sending import Episode, Finished, MessageBuffer, Rows
from impala_async.errors import EnvError
from impala_async.schema import ArraySpec, Schema
from impala_async.weights import NO_VERSION, Version

Obs = Mapping[str, NDArray[Any]]
State = Mapping[str, NDArray[Any]]
NO_STATE: State = {}
EMPTY = 0


class StackWriter:
    """The frames of one leaf of some columns that share a cursor."""

    def __init__(self, leaf: ArraySpec, num_columns: int) -> None:
        self._name = leaf.name
        self._num_window = leaf.shape[0]
        # The last row that was seen: what the next one continues.
        self._last = np.zeros((num_columns, *leaf.shape), leaf.dtype)
        self._words = _wide(self._last)
        self._frames: NDArray[np.uint8]
        self._windows: NDArray[np.int32]

    def show(self, obs: NDArray[Any]) -> None:
        """The row at which the next trajectory begins."""
        np.copyto(self._last, obs)

    def begin(self, frames: NDArray[np.uint8], windows: NDArray[np.int32]) -> None:
        """Open a trajectory in `[C, frames, ...]` and `[C, S, K]`, with the last row as row 0."""
        self._frames, self._windows = frames, windows
        frames[:, EMPTY] = 0
        first = slice(1, 1 + self._num_window)
        frames[:, first] = self._last
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

    def _find(self, column: int, row: int, newest: int, window: NDArray[Any]) -> list[int]:
        """Where a window that does not continue the last one has its frames."""
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
    """The trajectories of some columns that share a cursor.

    `start` once, then in turn: `begin` when `needs_buffer`, else `append`.
    """

    def __init__(self, schema: Schema, num_columns: int) -> None:
        self.num_columns = num_columns
        self._num_rows = schema.rows
        self._buffer: MessageBuffer | None = None
        self._version = NO_VERSION
        self._episodes: list[Episode] = []
        self._stacks = {
            leaf.name: StackWriter(leaf, num_columns) for leaf in schema.obs.leaves if leaf.is_stack
        }
        # The observation of the row at which the next trajectory begins.
        self._carry = {
            leaf.name: np.zeros((num_columns, *leaf.shape), leaf.dtype)
            for leaf in schema.obs.leaves
            if not leaf.is_stack
        }
        self._cursor = 0
        self._is_over = np.zeros(num_columns, np.bool_)
        self._num_over = 0
        self._returns = np.zeros(num_columns)
        # Lengths are differences of this clock, so that an ordinary row costs them nothing.
        self._num_appended = 0
        self._begun_at = [0] * num_columns

    @property
    def needs_buffer(self) -> bool:
        return self._buffer is None

    def start(self, obs: Obs) -> None:
        """Take the observations of environments that were just reset."""
        self._buffer = None
        self._is_over.fill(False)
        self._num_over = 0
        self._returns.fill(0)
        self._begun_at = [self._num_appended] * self.num_columns
        for name, stack in self._stacks.items():
            stack.show(obs[name])
        self._copy_carry(obs)

    def begin(self, buffer: MessageBuffer, version: Version, state: State = NO_STATE) -> None:
        """Open a trajectory in a buffer: the weights and the state that act at its first row."""
        rows = buffer.rows
        for name, carry in self._carry.items():
            rows.obs[name][0] = carry
        for name, stack in self._stacks.items():
            stack.begin(buffer.columns.obs[name], buffer.columns.windows[name])
        for name, array in buffer.columns.state.items():
            array[...] = state[name]
        # Most rows have these; `append` writes only the others.
        rows.mask.fill(True)
        rows.terminated.fill(False)
        rows.truncated.fill(False)
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
    ) -> Finished | None:
        """Write one row and the observation after it; the trajectory, when that was its last."""
        assert self._buffer is not None, "begin comes before append"
        if masked is not None:
            self._mark(masked)
        rows, t = self._buffer.rows, self._cursor
        for name, values in actions.items():
            rows.actions[name][t] = values
        rows.log_probs[t] = log_probs
        rewards_t = rows.rewards[t]
        rewards_t[:] = rewards
        for name in self._carry:
            rows.obs[name][t + 1] = next_obs[name]
        for name, stack in self._stacks.items():
            stack.write(t + 1, next_obs[name])
        if self._num_over:
            self._mask_row(rows, t)
        self._returns += rewards_t
        is_ending = terminated | truncated
        if self._num_over or np.count_nonzero(is_ending):
            self._end_episodes(rows, t, terminated, truncated, is_ending)
        self._num_appended += 1
        self._cursor = t + 1
        return self._finish(next_obs) if self._cursor == self._num_rows else None

    def _mark(self, masked: NDArray[np.bool_]) -> None:
        """Mask this row of these columns; an episode counts from the row after it."""
        self._is_over |= masked
        self._num_over = int(np.count_nonzero(self._is_over))
        for column in np.flatnonzero(masked).tolist():
            self._begun_at[column] = self._num_appended + 1

    def _mask_row(self, rows: Rows, t: int) -> None:
        """Take out of row t the columns that are being reset in it."""
        is_over = self._is_over
        rows.mask[t][is_over] = False
        rows.rewards[t][is_over] = 0
        rows.log_probs[t][is_over] = 0
        for array in rows.actions.values():
            array[t][is_over] = 0

    def _end_episodes(
        self,
        rows: Rows,
        t: int,
        terminated: NDArray[np.bool_],
        truncated: NDArray[np.bool_],
        is_ending: NDArray[np.bool_],
    ) -> None:
        """Write row t's flags, and note the episodes that end with it."""
        is_valid = ~self._is_over
        np.logical_and(terminated, is_valid, out=rows.terminated[t])
        np.logical_and(truncated, is_valid, out=rows.truncated[t])
        np.logical_and(is_ending, is_valid, out=self._is_over)
        ended = np.flatnonzero(self._is_over)
        for column in ended.tolist():
            length = self._num_appended - self._begun_at[column] + 1
            self._episodes.append(Episode(float(self._returns[column]), length))
            self._returns[column] = 0
            # The next row is the one that is masked.
            self._begun_at[column] = self._num_appended + 2
        self._num_over = len(ended)

    def _finish(self, last_obs: Obs) -> Finished:
        assert self._buffer is not None
        finished = Finished(self._buffer, self._version, self._episodes)
        self._copy_carry(last_obs)
        # From here on the buffer belongs to whoever gets the message.
        self._buffer = None
        return finished

    def _copy_carry(self, obs: Obs) -> None:
        for name, carry in self._carry.items():
            np.copyto(carry, obs[name])
