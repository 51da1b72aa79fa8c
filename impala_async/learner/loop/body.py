"""The bodies of trajectory messages: from the socket, or out of the header, into their place, and
then their values are checked.

Sizes come from the agreed schema; whatever does not have them is refused.

Runs on: event loop
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from impala_async.errors import ProtocolError
from impala_async.learner.slots import Episodes, Region
from impala_async.schema import Schema
from impala_async.trajectory import LARGEST, ColumnChecks, Fault
from impala_async.wire.codec import (
    PLAIN,
    ZSTD,
    BodySizes,
    body_sizes,
    decode_episodes,
    decompress_into,
    split_inline,
)
from impala_async.wire.messages import Data
from impala_async.wire.sockets import NO_FRAME, Router

TWO_FRAMES = "a body that is not inline has 2 frames"
NO_FRAMES = "a body that is inline has no frames of its own"


class BodyReader:
    """Receives and checks the bodies of one schema's messages."""

    def __init__(self, schema: Schema, most_columns: int) -> None:
        self._schema = schema
        self._checks = ColumnChecks(schema)
        largest = body_sizes(schema.layout, most_columns, most_columns * schema.rows)
        self._small = np.zeros(largest.small, np.uint8)
        self._packed = np.zeros(largest.obs, np.uint8)

    def receive(self, router: Router, data: Data, region: Region) -> Episodes | None:
        """Both planes into their place, and the episodes that came with them, if any.

        Raises:
            ProtocolError: it has another size, or another form, than such a message can have.
        """
        if data.rows != self._schema.rows:
            raise ProtocolError("wrong_size", f"{data.rows} rows, not {self._schema.rows}")
        if data.num_episodes > data.columns * data.rows:
            raise ProtocolError("wrong_size", f"{data.num_episodes} episodes in {data.rows} rows")
        sizes = body_sizes(self._schema.layout, data.columns, data.num_episodes)
        if data.body is not None:
            if router.has_more_frames():
                raise ProtocolError("wrong_frame_count", NO_FRAMES)
            small = _unpack_inline(data, data.body, sizes, region)
        else:
            small = self._receive_frames(router, data, sizes, region)
        region.small.reshape(-1)[:] = small[: region.small.nbytes]
        if not data.num_episodes:
            return None
        # The next message will be received where they lie now.
        return decode_episodes(small[region.small.nbytes :].tobytes())

    def find_faults(self, received: Sequence[tuple[Region, Episodes | None]]) -> list[Fault | None]:
        """Find the fault of each. Where there is none, one look at all of them shows it."""
        faults = [_find_episode_fault(episodes) for _, episodes in received]
        if len(received) > 1:
            whole = received[0][0].through(received[-1][0])
            if self._checks.find_fault(whole.obs, whole.small) is None:
                return faults
        return [
            self._checks.find_fault(region.obs, region.small) or fault
            for (region, _), fault in zip(received, faults, strict=True)
        ]

    def count_valid(self, region: Region) -> NDArray[np.int64]:
        """How many rows of each column are valid."""
        return self._checks.count_valid(region.small)

    def _receive_frames(
        self, router: Router, data: Data, sizes: BodySizes, region: Region
    ) -> np.ndarray:
        small = self._small[: sizes.small]
        obs = region.obs.reshape(-1).data
        if data.codec == ZSTD:
            packed = self._packed.data[: sizes.obs]
            decompress_into(obs, packed[: _receive_frame(router, packed)])
        else:
            _receive_exactly(router, obs)
        _receive_exactly(router, small.data)
        if router.has_more_frames():
            raise ProtocolError("wrong_frame_count", TWO_FRAMES)
        return small


def _receive_frame(router: Router, into: memoryview) -> int:
    received = router.receive_into(into)
    if received == NO_FRAME:
        raise ProtocolError("wrong_frame_count", TWO_FRAMES)
    if received > len(into):
        raise ProtocolError("wrong_size", f"a frame of {received} bytes, more than {len(into)}")
    return received


def _receive_exactly(router: Router, into: memoryview) -> None:
    received = _receive_frame(router, into)
    if received != len(into):
        raise ProtocolError("wrong_size", f"a frame of {received} bytes, not {len(into)}")


def _unpack_inline(data: Data, body: bytes, sizes: BodySizes, region: Region) -> np.ndarray:
    if data.codec != PLAIN:
        raise ProtocolError("wrong_size", "a body that is inline is never compressed")
    obs, small = split_inline(body, sizes)
    region.obs.reshape(-1)[:] = np.frombuffer(obs, np.uint8)
    return np.frombuffer(small, np.uint8)


def _find_episode_fault(episodes: Episodes | None) -> Fault | None:
    """A return that is no number would stay in every mean and in every checkpoint."""
    if episodes is None:
        return None
    totals, lengths = episodes["total"], episodes["length"]
    if lengths.min() >= 1 and (np.abs(totals) <= LARGEST * lengths).all():
        return None
    if not np.isfinite(totals).all():
        return Fault("nonfinite", "the return of an episode is not finite")
    if lengths.min() < 1:
        return Fault("invalid", "an episode has no steps")
    # The reward that made it so was refused, and with its mean it could end the run.
    return Fault("nonfinite", f"an episode has a return of more than {LARGEST:g} a step")
