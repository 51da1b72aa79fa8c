"""Writes rows of env steps into message buffers, one trajectory after the other.

`MessageBuffer` owns the two planes of one message. `Unroll` owns what outlives a trajectory: the
observation that ends one and begins the next, which columns wait for their reset, and the running
episodes. Its columns share a cursor; columns that do not complete together need one `Unroll` each.

A row after an episode's end (the final observation) is no transition: mask False, action,
log-probability and reward 0, no flags. Such a row is in no return and no length. Rows of columns
that wait for others, or whose policy is not trained, are masked in the same way.

    C columns, T action rows, S = T+1 observation rows; leaves of a buffer are seen time-major here

Runs on: sampler thread
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from impala_async.actor.stacks import StackWriter
from impala_async.spec import Schema
from impala_async.trajectory import Columns, columns_over
from impala_async.weights import NO_VERSION, Version

Obs = Mapping[str, NDArray[Any]]
State = Mapping[str, NDArray[Any]]

NO_STATE: State = {}


class Episode(NamedTuple):
    """One finished episode: the sum of its rewards as the environment gave them, and its steps."""

    episode_return: float
    length: int


class MessageBuffer:
    """The memory of one message: some columns of one trajectory each, in two planes."""

    def __init__(self, schema: Schema, num_columns: int) -> None:
        layout = schema.layout
        self.num_columns = num_columns
        self.obs = np.empty((num_columns, layout.obs_bytes), np.uint8)
        self.small = np.empty((num_columns, layout.small_bytes), np.uint8)
        # Touches the pages, and gives the padding between leaves a value that can be sent.
        self.obs.fill(0)
        self.small.fill(0)
        self.columns: Columns = columns_over(schema, self.obs, self.small)
        self.rows = _Rows(self.columns)


class Finished(NamedTuple):
    """A whole trajectory in a buffer, the version at its first row, episodes that ended in it."""

    buffer: MessageBuffer
    version: Version
    episodes: list[Episode]


class _Rows:
    """Time-major views of a buffer: `[t]` is a row of all columns, found without a slice."""

    __slots__ = ("actions", "log_probs", "mask", "obs", "rewards", "terminated", "truncated")

    def __init__(self, columns: Columns) -> None:
        self.obs = {name: array.swapaxes(0, 1) for name, array in columns.obs.items()}
        self.actions = {name: array.swapaxes(0, 1) for name, array in columns.actions.items()}
        self.log_probs = columns.log_probs_CT.T
        self.rewards = columns.rewards_CT.T
        self.terminated = columns.terminated_CT.T
        self.truncated = columns.truncated_CT.T
        self.mask = columns.mask_CT.T


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
        # What most rows have; `append` writes only the others.
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
        """Of these columns this row is masked, and what counts of an episode begins after it."""
        self._is_over |= masked
        self._num_over = int(np.count_nonzero(self._is_over))
        for column in np.flatnonzero(masked).tolist():
            self._begun_at[column] = self._num_appended + 1

    def _mask_row(self, rows: _Rows, t: int) -> None:
        """Take out of row t the columns that are being reset in it."""
        is_over = self._is_over
        rows.mask[t][is_over] = False
        rows.rewards[t][is_over] = 0
        rows.log_probs[t][is_over] = 0
        for array in rows.actions.values():
            array[t][is_over] = 0

    def _end_episodes(
        self,
        rows: _Rows,
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
