"""The server of the actors: both sockets, and all that is decided behind them.

It owns the sockets, the session table, the ledger, the ingest and the publisher; what comes out of
it is full slots, what goes into it is released slots and new weights.

Runs on: event loop
"""

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from impala_async.config.run import ActorSettings, RunConfig
from impala_async.errors import ConfigError, ProtocolError
from impala_async.learner.loop.endpoint import Endpoint, WireCounters
from impala_async.learner.loop.filler import Count, SlotFiller, Submit
from impala_async.learner.loop.ingest import Filler, Ingest
from impala_async.learner.loop.ledger import Ledger, Settlement
from impala_async.learner.loop.lockstep import LockstepFiller
from impala_async.learner.loop.peer_log import Strangers
from impala_async.learner.loop.publisher import Publisher
from impala_async.learner.loop.reporter import LoopLag
from impala_async.learner.loop.sessions import SessionMessages
from impala_async.learner.recorder import Recorder
from impala_async.learner.slots import Episodes, Slot
from impala_async.schema import Schema
from impala_async.weights import NO_VERSION, Lineage, Version, Weights, WeightsLayout
from impala_async.wire.codec import EPISODE_BYTES, encode_settings
from impala_async.wire.messages import MAX_MESSAGE_BYTES, Data, Message, Welcome
from impala_async.wire.peer import WINDOW
from impala_async.wire.session import SessionTable
from impala_async.wire.sockets import AddressError, LocalLink, Router, new_context

logger = logging.getLogger(__name__)

# A peer is asked for a sign of life when it has been silent for this many heartbeats.
SILENT_HEARTBEATS = 1.5
LOOK_EVERY_S, LOOK_AGAIN_S = 0.25, 0.05
# An actor that gets no credit meanwhile is told after so long what became of what it sent.
ACKNOWLEDGE_AFTER_S = 0.1
# Beside trajectories: what any peer may send between two looks.
SPARE_BYTES = 1 << 17


@dataclass(frozen=True)
class Events:
    """The server tells these to the service."""

    on_schema: Callable[[Schema], None]
    on_episodes: Callable[[Episodes], None]
    on_loss: Callable[[], None]
    """In lockstep a session has ended, and `pace.on_loss` is "stop"."""
    find_layout: Callable[[Schema], bytes | None] = lambda _: None
    """Asked of the service: the digest of the weights of a schema, if that can be told unbuilt."""


class ActorServer:
    """Bound as soon as it is made; takes trajectories once it is opened."""

    def __init__(
        self,
        config: RunConfig,
        *,
        run_id: bytes,
        lineage: Lineage,
        schema: Schema | None,
        events: Events,
        accounts: dict[str, Any] | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self._config = config
        self._recorder, self._events = recorder, events
        self._lineage = lineage
        # It may refuse the config: then nothing is bound yet.
        settings_frame = _settings_frame(config)
        self._heartbeat_s = config.learner.heartbeat_s
        self._is_lockstep = config.pace.is_lockstep
        self._lag = LoopLag()
        self.ledger = Ledger()
        self.table = _make_table(config, run_id, lineage)
        # Before any actor is heard: what it sent to an earlier start must be known by then.
        if accounts is not None:
            self.ledger.restore(accounts["ledger"])
            self.table.restore_watermarks(accounts["watermarks"], time.monotonic())
        # In lockstep a version may be asked for after the next one is out.
        self._publisher = Publisher(num_kept=1 + config.pace.lag)
        self._wire = WireCounters()
        self._ingest = Ingest(
            self.table,
            self.ledger,
            self._publisher,
            max_columns=config.learner.batch_columns,
            clock=time.monotonic,
            on_episodes=events.on_episodes,
            make_filler=self._make_filler,
            recorder=recorder,
        )
        self._strangers = Strangers(logger.warning, time.monotonic)
        self._link = LocalLink()
        data, weights = self._bind(schema)
        self.data_url, self.weights_url = data.connectable_url(), weights.connectable_url()
        self._sessions = self._make_sessions(settings_frame, weights.port)
        # From now on it notices if we stand still, as a learner does that builds a large model.
        self._sessions.expire()
        loop = self._loop = asyncio.get_running_loop()
        self._acknowledgements: asyncio.TimerHandle | None = None
        self._data = Endpoint(loop, data, self._wire, self._on_data_message, self._answer)
        self._weights = Endpoint(loop, weights, self._wire, self._on_weights_message, lambda: None)

    @property
    def num_actors(self) -> int:
        """Actors that have joined and not left."""
        return self._sessions.num_actors

    def tasks(self) -> dict[str, Coroutine[Any, Any, None]]:
        """The tasks that are to run beside it on the loop, by name."""
        return {"loop lag": self._lag.watch(), "connections": self._watch_connections()}

    def open(
        self,
        schema: Schema,
        slots: list[Slot],
        submit: Callable[[int], None],
        layout: WeightsLayout,
    ) -> None:
        """There are slots for trajectories of this schema: give out credit."""
        if self._recorder is not None:
            epoch = self._lineage.epoch
            first = Version(epoch, self._lineage.forks[epoch])
            settings = self._config.model_dump(mode="json", by_alias=True)
            self._recorder.begin(first, schema, settings, self._answer)
        self._sessions.schema = schema
        self._sessions.layout = layout
        # Everybody knows the model by its float32 layout, whatever weights come in.
        self._publisher.layout_digest = layout.coarse(()).digest
        self._ingest.open(schema, slots, submit)
        self._answer()

    def publish(self, weights: Weights) -> None:
        is_first = self._publisher.version == NO_VERSION
        self._publisher.publish(weights)
        self._ingest.note_version(weights.version.update)
        if self._is_lockstep:
            # Everybody waits for it: the thread that fetches weights is told at once.
            self._sessions.announce(self._weights)
        if is_first:
            self._answer()

    def settle(self, settlement: Settlement) -> None:
        """A batch is done with, and its slot empty, if it lay in one to its end."""
        self.ledger.settle(settlement)
        if settlement.slot is not None:
            self.release(settlement.slot)

    def release(self, slot: int) -> None:
        """A slot is empty again; its columns are credit now."""
        self._ingest.release(slot)
        self._answer()

    def reap(self) -> None:
        """Once a second: end what is over. A grant to an actor that is gone cannot be routed."""
        # Should an edge ever be missed, nobody waits for longer than this.
        self._data.look_again()
        self._weights.look_again()
        self._sessions.expire()
        longest_s = self._heartbeat_s * SILENT_HEARTBEATS
        for peer in self.table.silent(time.monotonic(), longest_s):
            # In lockstep the others wait for it as long as its lease runs, whatever its connection.
            if not self._sessions.remind(self._data, peer) and not self._is_lockstep:
                self._sessions.lose(peer, "its connection is closed")
        self._strangers.look(self._data.hellos, self.table.num_given_way, self._cut_off())
        self._answer()

    async def _watch_connections(self) -> None:
        is_doubtful = False
        while True:
            await asyncio.sleep(LOOK_AGAIN_S if is_doubtful else LOOK_EVERY_S)
            is_doubtful = self.look_at_connections()
            self.take_back()

    def look_at_connections(self) -> bool:
        """A peer with a session may have sent what its credit allows, and a message more. Whether
        there is a doubt."""
        joined = self.table.joined
        schema = self._sessions.schema
        largest = [_largest_message(peer.columns, schema) for peer in joined if schema is not None]
        data = {
            peer.data_route: (WINDOW * peer.streams + 1) * each + SPARE_BYTES
            for peer, each in zip(joined, largest, strict=True)
        }
        weights = {peer.weights_route: SPARE_BYTES for peer in joined if peer.weights_route}
        lease_s = self._config.learner.lease_s
        doubts = self._data.look(data, lease_s), self._weights.look(weights, lease_s)
        return any(doubts)

    def take_back(self) -> None:
        """Credit that lies unused goes to those who wait for some; in lockstep nobody does."""
        if self.table.take_back(time.monotonic()):
            self._answer()

    def close_admission(self) -> None:
        """Nothing more comes in."""
        self._sessions.is_closing = True
        self._ingest.close()

    async def say_bye(self, reason: str, timeout_s: float) -> None:
        """Tell every actor, and wait a moment until they have understood."""
        self._sessions.say_bye(self._data, reason)
        give_up_at = time.monotonic() + timeout_s
        while len(self.table) and time.monotonic() < give_up_at:
            await asyncio.sleep(0.01)

    def accounts(self) -> dict[str, Any]:
        """For a checkpoint: the ledger, and what actors need not send again."""
        return {"ledger": self.ledger.save(), "watermarks": self.table.watermarks()}

    def report(self) -> dict[str, object]:
        return {
            **self._lag.report(),
            **self.ledger.report(),
            **self._publisher.report(),
            **self._wire.report(),
            "wire/cut": self._cut_off().total(),
            **self._ingest.report(),
            **self._sessions.report(),
            **(self._recorder.report() if self._recorder else {}),
        }

    def close(self) -> None:
        if self._acknowledgements is not None:
            self._acknowledgements.cancel()
        if self._recorder is not None:
            self._recorder.close()
        self._data.close()
        self._weights.close()
        self._context.term()
        self._link.close()

    def _cut_off(self) -> Counter[str]:
        return self._data.cut_off + self._weights.cut_off

    def _answer(self) -> None:
        self._ingest.answer(self._data)
        if self._ingest.owes_acknowledgements and self._acknowledgements is None:
            self._acknowledgements = self._loop.call_later(ACKNOWLEDGE_AFTER_S, self._acknowledge)

    def _acknowledge(self) -> None:
        self._acknowledgements = None
        self._ingest.acknowledge(self._data)

    def _on_data_message(self, route: bytes, message: Message) -> None:
        if isinstance(message, Data):
            self._ingest.handle(self._data, route, message)
        else:
            # A goodbye or a new hello is said after what was sent before.
            self._ingest.decide()
            self._sessions.handle_data_side(self._data, route, message)

    def _on_weights_message(self, route: bytes, message: Message) -> None:
        self._sessions.handle_weights_side(self._weights, route, message)

    def _bind(self, schema: Schema | None) -> tuple[Router, Router]:
        bind, max_message_bytes = self._config.bind, MAX_MESSAGE_BYTES
        if schema is not None:
            # Nobody has a reason to send more than a whole batch at once.
            max_message_bytes = _largest_message(self._config.learner.batch_columns, schema)
        self._context = new_context()
        routers: list[Router] = []
        ends = (
            ("bind.data", bind.data, self._link.data_path),
            ("bind.weights", bind.weights, self._link.weights_path),
        )
        for key, url, ipc_path in ends:
            try:
                size = max_message_bytes
                routers.append(Router(self._context, url, ipc_path, size))
            except AddressError as error:
                for router in routers:
                    router.close()
                self._context.term()
                self._link.close()
                advice = "is another learner running? name another port, or * for any free one"
                if not error.is_taken:
                    advice = "name an address of this host, or 0.0.0.0 for all of them"
                raise ConfigError(f"{key}: {error}; {advice}") from None
        return routers[0], routers[1]

    def _make_filler(self, slots: list[Slot], submit: Submit, count: Count) -> Filler:
        pace = self._config.pace
        if not self._is_lockstep:
            return SlotFiller(slots, submit, count)
        return LockstepFiller(
            slots,
            submit,
            count,
            num_ranks=self._config.train.num_actors,
            lag=pace.lag,
            first_update=self._lineage.forks[self._lineage.epoch],
            on_loss=self._events.on_loss if pace.on_loss == "stop" else None,
        )

    def _make_sessions(self, settings_frame: bytes, weights_port: int) -> SessionMessages:
        learner = self._config.learner
        lockstep_columns = None
        if self._is_lockstep:
            lockstep_columns = learner.batch_columns // self._config.train.num_actors
        welcome = Welcome(
            run_id=self.table.run_id,
            epoch=self._lineage.epoch,
            session=b"",
            rank=-1,
            weights_port=weights_port,
            ipc_data=self._link.data_path,
            ipc_weights=self._link.weights_path,
            nonce_path=self._link.nonce_path,
            nonce=self._link.nonce,
            lease_s=learner.lease_s,
            heartbeat_s=learner.heartbeat_s,
            max_columns=learner.batch_columns,
        )
        return SessionMessages(
            self.table,
            self._publisher,
            welcome=welcome,
            settings_frame=settings_frame,
            rows=self._config.trajectory.rows,
            lockstep_columns=lockstep_columns,
            clock=time.monotonic,
            on_schema=self._events.on_schema,
            find_layout=self._events.find_layout,
        )


def _make_table(config: RunConfig, run_id: bytes, lineage: Lineage) -> SessionTable:
    is_lockstep = config.pace.is_lockstep
    return SessionTable(
        run_id=run_id,
        lineage=lineage,
        lease_s=config.learner.lease_s,
        max_lag=config.pace.lag if is_lockstep else config.learner.max_lag,
        new_id=lambda: secrets.token_bytes(16),
        num_ranks=config.train.num_actors if is_lockstep else None,
    )


def _settings_frame(config: RunConfig) -> bytes:
    try:
        return encode_settings(ActorSettings.of(config).model_dump(mode="json"))
    except ProtocolError as error:
        raise ConfigError(f"env.kwargs: {error}") from None


def _largest_message(columns: int, schema: Schema) -> int:
    column_bytes = schema.layout.column_bytes + EPISODE_BYTES * schema.rows
    return columns * column_bytes + 65536
