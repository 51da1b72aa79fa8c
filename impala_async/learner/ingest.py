"""Trajectories in: from the data port straight into slots, each with one verdict, counted.

It touches sockets, numpy views of slots and two queues of slot indices, and nothing else, so
that the same class can run on the learner's loop or in a process of its own.

Runs on: event loop
"""

import logging
import math
from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from impala_async.errors import ProtocolError
from impala_async.layout import Bytes2D
from impala_async.learner.ledger import Ledger
from impala_async.learner.port import Port
from impala_async.learner.publisher import Publisher
from impala_async.learner.slots import (
    Arrival,
    Count,
    Episodes,
    Filler,
    Slot,
    SlotFiller,
    Submit,
)
from impala_async.screen import Screen
from impala_async.spec import Schema
from impala_async.trajectory import Fault
from impala_async.weights import NO_VERSION, Version
from impala_async.wire.codec import body_sizes, decode_episodes, split_inline
from impala_async.wire.compression import PLAIN, ZSTD, decompress_into
from impala_async.wire.messages import Data, pack
from impala_async.wire.session import Peer, SessionTable
from impala_async.wire.sockets import NO_FRAME

logger = logging.getLogger(__name__)

UNKNOWN_VERSION = "it was acted with weights of a version that it cannot have had"
TWO_FRAMES = "a body that is not inline has 2 frames"
WARN_EVERY_S = 10.0
MakeFiller = Callable[[list[Slot], Submit, Count], Filler]


class Tap(Protocol):
    """Whoever wants to have all that is admitted."""

    @property
    def is_behind(self) -> bool:
        """Whether no more should come for now."""
        ...

    def take(self, rank: int, data: Data, obs: Bytes2D, small: NDArray[np.uint8]) -> None:
        """A message that is admitted; its planes are soon written to again."""
        ...


class Ingest:
    """Admits columns into slots and gives out credit for what is free.

    Until `open` has given it slots, it admits and grants nothing.
    """

    def __init__(
        self,
        table: SessionTable,
        ledger: Ledger,
        publisher: Publisher,
        *,
        clock: Callable[[], float],
        on_episodes: Callable[[Episodes], None],
        make_filler: MakeFiller = SlotFiller,
        tap: Tap | None = None,
    ) -> None:
        self._table = table
        self._ledger = ledger
        self._publisher = publisher
        self._clock = clock
        self._on_episodes = on_episodes
        self._make_filler = make_filler
        self._tap = tap
        self._schema: Schema | None = None
        self._screen: Screen | None = None
        self._filler: Filler | None = None
        self._small = np.empty(0, np.uint8)
        self._packed = np.empty(0, np.uint8)
        self._to_answer: dict[bytes, Peer] = {}
        self._is_closed = False
        self._warn_at = -math.inf

    def open(self, schema: Schema, slots: list[Slot], submit: Callable[[int], None]) -> None:
        """Slots are there: credit can be given out."""

        def submit_batch(slot: Slot) -> None:
            self._ledger.submit(slot.batch, int(slot.filled_B.sum()))
            submit(slot.index)

        self._schema = schema
        self._screen = Screen(schema)
        self._filler = self._make_filler(slots, submit_batch, self._on_episodes)
        columns = self._filler.batch_columns
        largest = body_sizes(schema.layout, columns, columns * schema.rows)
        self._small = np.zeros(largest.small, np.uint8)
        self._packed = np.zeros(largest.obs, np.uint8)

    def handle(self, port: Port, route: bytes, data: Data) -> None:
        """Reserve by the header, receive the body, check it, commit; or give the reason."""
        peer = self._table.find(data.session, self._clock())
        if peer is None:
            self._refuse(data, "unknown_session")
            raise ProtocolError("unknown_session")
        peer.data_route = route
        self._to_answer[peer.session] = peer
        if self._is_closed:
            return  # what is under way at the end never came: the actor is told so by our goodbye
        if self._filler is None or self._schema is None:
            raise ProtocolError("not_allowed_now", "Data before Spec")
        verdict = self._table.reserve(peer, data, self._publisher.version)
        verdict = verdict or self._filler.judge(peer.rank, Version(data.epoch, data.update))
        fault = Fault("invalid", UNKNOWN_VERSION) if verdict == "invalid" else None
        try:
            if verdict is None:
                fault = self._take_body(port, peer, data, self._schema, self._filler)
        except ProtocolError as error:
            fault = Fault("invalid", str(error))
            raise
        finally:
            if fault is not None:
                verdict = fault.reason
                self._warn(peer, data, fault)
            self._settle(peer, data, verdict)

    def release(self, slot: int) -> None:
        """A slot is empty again."""
        assert self._filler is not None
        self._filler.release(slot)

    def note_version(self, update: int) -> None:
        """A version is published."""
        if self._filler is not None and not self._is_closed:
            self._filler.note_version(update)

    def answer(self, port: Port) -> None:
        """Deal out the free credit; tell whoever got some, or waits for a word on what it sent."""
        # Before the first version nothing can be judged: what an earlier start earned looks wrong.
        is_ready = self._publisher.version != NO_VERSION and not self._is_closed
        is_held_back = self._tap is not None and self._tap.is_behind
        if self._filler is not None and is_ready and not is_held_back:
            for peer in self._filler.deal(self._table):
                self._to_answer[peer.session] = peer
        for peer in self._to_answer.values():
            port.send(peer.data_route, [pack(peer.grant(self._publisher.version))])
        self._to_answer.clear()

    def close(self) -> None:
        """Nothing more comes in; what fills the last slot is given up."""
        self._is_closed = True
        self._ledger.abandon_filling()

    def report(self) -> dict[str, object]:
        return {
            "credit/granted_columns": self._table.outstanding_columns,
            "credit/free_columns": self._filler.free_columns if self._filler else 0,
            **(self._filler.report() if self._filler else {}),
        }

    def _take_body(
        self, port: Port, peer: Peer, data: Data, schema: Schema, filler: Filler
    ) -> Fault | None:
        if data.rows != schema.rows:
            raise ProtocolError("wrong_size", f"{data.rows} rows, not {schema.rows}")
        if data.num_episodes > data.columns * data.rows:
            raise ProtocolError("wrong_size", f"{data.num_episodes} episodes in {data.rows} rows")
        obs = filler.obs_target(data.columns, peer.rank)
        small = self._receive(port, data, schema, obs)
        num_small = data.columns * schema.layout.small_bytes
        small_columns = small[:num_small].reshape(data.columns, -1)
        episodes = decode_episodes(small[num_small:].data) if data.num_episodes else None
        assert self._screen is not None
        fault = self._screen.find_fault(obs, small_columns) or _find_episode_fault(episodes)
        if fault is not None:
            return fault
        valid_rows = self._screen.count_valid(small_columns)
        self._ledger.receive(data.columns)
        self._ledger.admit(data.columns)
        if self._tap is not None:
            self._tap.take(peer.rank, data, obs, small)
        version = Version(data.epoch, data.update)
        filler.commit(Arrival(peer.rank, obs, small_columns, valid_rows, version, episodes))
        return None

    def _receive(self, port: Port, data: Data, schema: Schema, obs: Bytes2D) -> NDArray[np.uint8]:
        """Observations into their place, the rest into the scratch; wrong sizes are refused."""
        sizes = body_sizes(schema.layout, data.columns, data.num_episodes)
        small = self._small[: sizes.small]
        target = obs.reshape(-1)
        if data.body is not None:
            if data.codec != PLAIN:
                raise ProtocolError("wrong_size", "a body that is inline is never compressed")
            obs_part, small_part = split_inline(data.body, sizes)
            target[:] = np.frombuffer(obs_part, np.uint8)
            small[:] = np.frombuffer(small_part, np.uint8)
            return small
        if data.codec == ZSTD:
            packed = self._packed.data[: sizes.obs]
            received = _receive_frame(port, packed, at_most=sizes.obs)
            decompress_into(target.data, packed[:received])
        else:
            _receive_exactly(port, target.data, sizes.obs)
        _receive_exactly(port, small.data, sizes.small)
        if port.router.has_more_frames():
            raise ProtocolError("wrong_frame_count", TWO_FRAMES)
        return small

    def _settle(self, peer: Peer, data: Data, verdict: str | None) -> None:
        """Count what was refused, and give its credit back."""
        if verdict is not None:
            self._refuse(data, verdict)
        if verdict != "duplicate":
            self._table.settle(peer, data.seq, verdict)
            if verdict is not None and self._filler is not None:
                self._filler.skip(peer.rank)

    def _warn(self, peer: Peer, data: Data, fault: Fault) -> None:
        """What is wrong with the data itself is wrong at its source: say so, now and then."""
        now = self._clock()
        if now < self._warn_at:
            return
        logger.warning(
            "actor %d: a message of %d columns is refused: %s (%s, %d columns so far from all "
            "actors). Is it the environment?",
            peer.rank,
            data.columns,
            fault.what,
            fault.reason,
            self._ledger.rejected(fault.reason) + data.columns,
        )
        self._warn_at = now + WARN_EVERY_S

    def _refuse(self, data: Data, reason: str) -> None:
        self._ledger.receive(data.columns)
        self._ledger.reject(data.columns, reason)


def _receive_frame(port: Port, into: memoryview, *, at_most: int) -> int:
    received = port.router.receive_into(into)
    if received == NO_FRAME:
        raise ProtocolError("wrong_frame_count", TWO_FRAMES)
    if received > at_most:
        raise ProtocolError("wrong_size", f"a frame of {received} bytes, more than {at_most}")
    return received


def _receive_exactly(port: Port, into: memoryview, size: int) -> None:
    received = _receive_frame(port, into, at_most=size)
    if received != size:
        raise ProtocolError("wrong_size", f"a frame of {received} bytes, not {size}")


def _find_episode_fault(episodes: Episodes | None) -> Fault | None:
    """A return that is no number would stay in every mean and in every checkpoint."""
    if episodes is None:
        return None
    if not np.isfinite(episodes["total"]).all():
        return Fault("nonfinite", "the return of an episode is not finite")
    if episodes["length"].min() < 1:
        return Fault("invalid", "an episode has no steps")
    return None
