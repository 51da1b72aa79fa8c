"""Messages that an actor sends: what it runs, and its trajectories, which are compressed where the
line is long and it pays.

Runs on: sampler thread
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from impala_async.config.learner import is_loopback
from impala_async.schema import Bytes2D, Schema
from impala_async.trajectory import Columns, columns_over
from impala_async.weights import Version, WeightsLayout
from impala_async.wire.codec import PLAIN, Frame, compress, encode_data
from impala_async.wire.messages import SLOWEST_BYTES_PER_S, Data
from impala_async.wire.peer import WINDOW

# Compression must make data this much smaller, or its time is better spent on acting.
WORTH = 0.8
# So many messages go plain before it is tried again.
RETRY_AFTER = 100

Episode = tuple[float, int]
"""A finished one: the sum of its rewards as the environment gave them, and its steps."""


class MessageBuffer:
    """The memory of one message: some columns of one trajectory each, in two planes.

    It is written to by the row, through time-major views: `[t]` is a row of all columns, found
    without a slice.
    """

    def __init__(self, schema: Schema, num_columns: int) -> None:
        layout = schema.layout
        self.num_columns = num_columns
        self.obs = np.empty((num_columns, layout.obs_bytes), np.uint8)
        self.small = np.empty((num_columns, layout.small_bytes), np.uint8)
        # Touches the pages, and gives the padding between leaves a value that can be sent.
        self.obs.fill(0)
        self.small.fill(0)
        self.columns: Columns = columns_over(schema, self.obs, self.small)
        columns = self.columns
        self.obs_SC = {name: array.swapaxes(0, 1) for name, array in columns.obs.items()}
        self.actions_TC = {name: array.swapaxes(0, 1) for name, array in columns.actions.items()}
        self.log_probs_TC = columns.log_probs_CT.T
        self.rewards_TC = columns.rewards_CT.T
        self.terminated_TC = columns.terminated_CT.T
        self.truncated_TC = columns.truncated_CT.T
        self.mask_TC = columns.mask_CT.T


class Finished(NamedTuple):
    """A whole trajectory in a buffer, the version at its first row, episodes that ended in it."""

    buffer: MessageBuffer
    version: Version
    episodes: list[Episode]


class Compressor:
    """Compresses while that pays, and tries again from time to time where it did not."""

    def __init__(self, choice: Literal["auto", "on", "off"], data_url: str) -> None:
        is_remote = data_url.startswith("tcp://") and not is_loopback(data_url)
        self._is_off = choice == "off" or (choice == "auto" and not is_remote)
        self._num_to_skip = 0

    def compress(self, obs: Bytes2D) -> bytes | None:
        """The planes in one compressed frame; None if they should go as they are."""
        if self._is_off:
            return None
        if self._num_to_skip:
            self._num_to_skip -= 1
            return None
        frame = compress(obs.data.cast("B"))
        if len(frame) <= WORTH * obs.nbytes:
            return frame
        self._num_to_skip = RETRY_AFTER
        return None


@dataclass(frozen=True)
class ActorSpec:
    """Says what an actor runs, once per session; sizes and dtypes never travel with the data."""

    schema: Schema
    layout: WeightsLayout
    columns: int
    """Each message has so many."""
    streams: int
    """Messages that are written side by side."""
    coarse_layout: WeightsLayout | None = None
    """The other one that weights may come in."""

    @property
    def weights_s(self) -> float:
        """How long weights may take to come down."""
        return self.layout.num_bytes / SLOWEST_BYTES_PER_S

    @property
    def layouts(self) -> tuple[WeightsLayout, ...]:
        """Weights come in one of these, or are those of another model."""
        return tuple(layout for layout in (self.layout, self.coarse_layout) if layout is not None)

    def make_buffers(self) -> list[MessageBuffer]:
        """For each stream a window under way, and one that is being written."""
        num_buffers = self.streams * (WINDOW + 1)
        return [MessageBuffer(self.schema, self.columns) for _ in range(num_buffers)]

    def data_frames(
        self, session: bytes, seq: int, finished: Finished, compressor: Compressor
    ) -> list[Frame]:
        """Big frames are views of the buffer, which must stay as it is until seq is settled."""
        buffer = finished.buffer
        rows, columns = self.schema.rows, buffer.num_columns
        data = Data(session, seq, *finished.version, rows, columns, PLAIN, 0, None)
        return encode_data(data, buffer.obs, buffer.small, finished.episodes, compressor.compress)
