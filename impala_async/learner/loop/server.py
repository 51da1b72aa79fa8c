"""The server of the actors: both sockets, and the clock and the timers of what is decided behind
them. It gives the learner thread full slots, and takes released slots and new weights from it.

Runs on: event loop
"""

import asyncio
import logging
import math
import random
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from impala_async.config.ranks import Place
from impala_async.config.run import ActorSettings, RunConfig
from impala_async.errors import ConfigError
from impala_async.learner.loop.admission import Admission
from impala_async.learner.loop.delay import SlotDelay
from impala_async.learner.loop.endpoint import WIRE_COUNTS, Endpoint
from impala_async.learner.loop.lockstep import LockstepFiller
from impala_async.learner.loop.placement import Placement
from impala_async.learner.loop.publisher import Publisher
from impala_async.learner.loop.sessions import Sessions
from impala_async.learner.recorder import Recorder
from impala_async.learner.slots import Episodes, Settlement, Slot, SlotFiller
from impala_async.metrics.report import Counters
from impala_async.processes import Growth
from impala_async.schema import Schema
from impala_async.weights import NO_VERSION, Lineage, Version, Weights, WeightsLayout
from impala_async.wire import messages as wire
from impala_async.wire.connections import UNHEARD
from impala_async.wire.keys import Key
from impala_async.wire.local_link import LocalLink
from impala_async.wire.session import SessionTable
from impala_async.wire.sockets import Router, new_context

logger = logging.getLogger(__name__)

# A peer is asked for a sign of life when it has been silent for this many heartbeats.
SILENT_HEARTBEATS = 1.5
LOOK_EVERY_S, LOOK_AGAIN_S = 0.25, 0.05
# A checkpoint copies the weights, the two moments of each and those of a target network, and each
# is copied once more to be written. The evaluator may be given as much at the same time.
OWN_COPIES = 16
# An actor that gets no credit meanwhile is told after so long what became of what it sent.
ACKNOWLEDGE_AFTER_S = 0.1
STRANGERS_EVERY_S = 10.0
UNANSWERED = "hellos were not answered"
# A port that was shut to newcomers for longer meanwhile is told of.
LEAST_SHUT_S = 1.0
# Beside trajectories: what any peer may send between two looks.
SPARE_BYTES = 1 << 17


class ActorServer:
    """Bound as soon as it is made; takes trajectories once it is opened."""

    def __init__(
        self,
        config: RunConfig,
        *,
        run_id: bytes,
        lineage: Lineage,
        schema: Schema | None,
        on_schema: Callable[[Schema], None],
        on_episodes: Callable[[Episodes], None],
        on_loss: Callable[[], None],
        find_layout: Callable[[Schema], bytes | None] = lambda _: None,
        accounts: Mapping[str, Any] | None = None,
        recorder: Recorder | None = None,
        actor_seed: int | None = None,
        place: Place | None = None,
        nonce: bytes | None = None,
        key: Key | None = None,
    ) -> None:
        """Without a schema `on_schema` takes that of the first actor, and `find_layout` may tell
        the digest of its weights before anything is built. `on_loss` is called when a session has
        ended in lockstep and `pace.on_loss` is "stop". The `accounts` are those of a checkpoint.
        Actors know this start by the `nonce`, which all ranks have, as they have the `key`."""
        self._config, self._lineage, self._recorder = config, lineage, recorder
        settings_frame = _told(ActorSettings.of(config, actor_seed))
        self._filler = self._make_filler(on_episodes, on_loss)
        self.ledger = self._filler.ledger
        self.table = self._make_table(run_id)
        # Before any actor is heard: what it sent to an earlier start must be known by then.
        if accounts is not None:
            self.ledger.restore(accounts["ledger"])
            self.table.restore_watermarks(accounts["watermarks"], time.monotonic())
        self._link, self.key = LocalLink(nonce), key
        most = config.train.num_actors if config.pace.is_lockstep else None
        self.placement = Placement(place, most)
        data, weights = both = self._bind(schema)
        self.data_url, self.weights_url = (x.connectable_url(config.bind.host) for x in both)
        self.sessions = Sessions(
            table=self.table,
            # In lockstep a version may be asked for after the next one is out.
            publisher=Publisher(num_kept=1 + config.pace.lag),
            filler=self._filler,
            welcome=self._welcome(weights.port),
            settings_frame=settings_frame,
            rows=config.trajectory.rows,
            on_schema=on_schema,
            find_layout=find_layout,
            placement=self.placement,
        )
        self.admission = Admission(self.sessions, recorder)
        # From now on it notices if we stand still, as a learner does that builds a large model.
        self.sessions.expire(time.monotonic())
        # In lockstep actors wait for weights, and for no slot.
        self._delay: SlotDelay | None = None
        self._acknowledgements: asyncio.TimerHandle | None = None
        loop = self._loop = asyncio.get_running_loop()
        self._wire = Counters(WIRE_COUNTS)
        self._data = Endpoint(loop, data, self._wire, self.admission.hear, self._answer)
        self._weights = Endpoint(loop, weights, self._wire, self.sessions.hear_pull)
        self._growth, self._told_of, self._own_bytes = Growth(), Counter[str](), 0
        self._tell_at, self._shut_s = time.monotonic() + STRANGERS_EVERY_S, 0.0

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
        if not self._filler.is_lockstep:
            # On a GPU some of the slots are on the device.
            num_slots = self._config.batches_under_way
            self._delay = SlotDelay(num_slots, self._config.learner.minibatch_buffer_size)

        def note_and_submit(index: int) -> None:
            if self._delay:
                self._delay.note_full(time.monotonic())
            submit(index)

        self._own_bytes = OWN_COPIES * sum(array.num_bytes for array in layout.arrays)
        self.sessions.open(schema, layout)
        self.admission.open(schema, slots, note_and_submit)
        self._answer()

    def publish(self, weights: Weights) -> None:
        is_first = self.sessions.publisher.version == NO_VERSION
        self._weights.say(self.sessions.publish(weights))
        if is_first:
            self._answer()

    def cut(self, update: int) -> None:
        """Other ranks wait for the batch that is trained after this update."""
        self._weights.say(self.sessions.cut(update))

    def settle(self, settlement: Settlement) -> None:
        self.ledger.settle(settlement)
        if self._delay:
            self._delay.note_done(time.monotonic())
        if settlement.slot is not None:
            self.release(settlement.slot)

    def release(self, slot: int) -> None:
        """A slot is empty: there is credit for it, at once or when that is soon enough."""
        if self._delay and self._delay.seconds:
            self._loop.call_later(self._delay.seconds, self._offer, slot)
        else:
            self._offer(slot)

    def _offer(self, slot: int) -> None:
        if not self.sessions.is_closing:
            self._filler.release(slot)
            self._answer()

    def reap(self) -> None:
        """End what is over, once a second. A grant to an actor that is gone cannot be routed."""
        # Should an edge ever be missed, nobody waits for longer than this.
        self._data.look_again()
        self._weights.look_again()
        now = time.monotonic()
        self.sessions.expire(now)
        longest_s = self._config.learner.heartbeat_s * SILENT_HEARTBEATS
        for peer in [p for p in self.table.joined if now - p.last_heard > longest_s]:
            is_there = self._data.send(peer.data_route, self.sessions.grant(peer).frames)
            # In lockstep the others wait for it as long as its lease runs, whatever its connection.
            if not is_there and not self._filler.is_lockstep:
                self.sessions.lose(peer, "its connection is closed")
        if now >= self._tell_at:
            self._tell_at = now + STRANGERS_EVERY_S
            self._tell_of_strangers()
        self._answer()

    async def watch(self) -> None:
        """A task: who sends too much is cut off."""
        is_doubtful = False
        while True:
            # Who finds a port shut knocks once a second: regular looks would open it in vain.
            usual_s = LOOK_EVERY_S * random.uniform(0.6, 1.4)
            await asyncio.sleep(LOOK_AGAIN_S if is_doubtful else usual_s)
            is_doubtful = self.look_at_connections()

    def look_at_connections(self) -> bool:
        """A peer with a session may have sent what its credit allows, and a message more. Whether
        there is a doubt. Credit that lies unused goes to others; in lockstep none does."""
        data, weights, expected_bytes = dict[bytes, int](), dict[bytes, int](), self._own_bytes
        for peer in self.table.joined:
            assert self.sessions.schema is not None
            # By its credit: how many streams it has is what it says of itself.
            largest = wire.MAX_HEADER_BYTES + _largest_body(peer.columns, self.sessions.schema)
            data[peer.data_route] = (peer.outstanding_messages + 1) * largest + SPARE_BYTES
            expected_bytes += peer.outstanding_messages * largest
            if peer.weights_route:
                weights[peer.weights_route] = SPARE_BYTES
        lease_s = self._config.learner.lease_s
        is_growing = self._growth.is_seen(expected_bytes)
        doubts = [
            endpoint.look(allowances, lease_s, is_memory_growing=is_growing)
            for endpoint, allowances in ((self._data, data), (self._weights, weights))
        ]
        self.table.take_back(now := time.monotonic())
        # Where nothing comes because those who have credit do not use it, nothing else calls it.
        self._answer()
        self._look_for_silence(now)
        if self.placement.is_to_let_go(now):
            self.admission.decide(now)
            self._data.say(self.sessions.let_one_go(now))
        return any(doubts)

    def counts(self, *, are_others_ready: bool) -> tuple[int, int]:
        """How many actors have joined, and how many sessions there are. Those of a silent rank do
        not count while others wait for it. Asked by another thread."""
        is_lacking = self.placement.is_silent and are_others_ready
        return 0 if is_lacking else len(self.table.joined), len(self.table)

    async def say_bye(self, reason: str, timeout_s: float) -> None:
        self._data.say(self.sessions.say_bye(reason))
        give_up_at = time.monotonic() + timeout_s
        while len(self.table) and time.monotonic() < give_up_at:
            await asyncio.sleep(0.01)

    def accounts(self) -> dict[str, Any]:
        return {"ledger": self.ledger.save(), "watermarks": self.table.watermarks()}

    def report(self) -> dict[str, object]:
        return {
            **self.ledger.report(),
            **self._wire,
            "wire/bad": sum(n for name, n in self._wire.items() if name.startswith("bad/")),
            "wire/cut": self._cut_off().total(),
            "wire/left": sum(x.connections.num_left for x in (self._data, self._weights)),
            **self.admission.report(),
            "credit/delay_ms": 1000 * self._delay.seconds if self._delay else None,
            **self.sessions.report(time.monotonic()),
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
        return self._data.connections.cut_off + self._weights.connections.cut_off

    def _tell_of_strangers(self) -> None:
        """Tell in one line what is new, over both sockets; then their hellos are forgotten."""
        before, hellos = self._told_of, self._data.hellos
        ends = self._data.connections, self._weights.connections
        shut_before_s, self._shut_s = self._shut_s, max(end.shut_s for end in ends)
        unheard = sum(end.num_left for end in ends if end.is_locked)
        more = {
            "gave way": self.table.num_given_way,
            UNHEARD: unheard,
            UNANSWERED: self._data.num_unanswered,
        }
        self._told_of = self._cut_off() + Counter(more)
        new = [f"{number:,} {what}" for what, number in (self._told_of - before).items()]
        if (shut_s := self._shut_s - shut_before_s) >= LEAST_SHUT_S:
            new.append(f"nobody was let in for {shut_s:.1f} s, as too many came")
        if new:
            new[-1] += f"; {hellos.total():,} hellos over {len(hellos):,} connections"
            logger.warning("strangers in %.0f s: %s", STRANGERS_EVERY_S, ", ".join(new))
        for endpoint in (self._data, self._weights):
            endpoint.hellos.clear()

    def _look_for_silence(self, now: float) -> None:
        if self._filler.is_lockstep or not self.placement.can_send:
            return
        joined, was_silent = self.table.joined, self.placement.is_silent
        usual_s = min((peer.usual_s for peer in joined), default=math.inf)
        num_admitted = self.ledger.report()["trajectories/admitted"]
        # A rank that has a batch, or only lacks a part of one, has less.
        has_room = self._filler.free_columns > self._filler.batch_columns
        is_waiting = has_room and len(joined) > 0
        self.placement.note_admitted(num_admitted, usual_s, now, is_waiting=is_waiting)
        if self.placement.is_silent and not was_silent:
            logger.warning("nothing comes from the %d actors that joined this rank", len(joined))

    def _answer(self) -> None:
        self._data.say(self.admission.deal(time.monotonic()))
        if self.admission.to_acknowledge and self._acknowledgements is None:
            self._acknowledgements = self._loop.call_later(ACKNOWLEDGE_AFTER_S, self._acknowledge)

    def _acknowledge(self) -> None:
        self._acknowledgements = None
        self._data.say(self.admission.acknowledge(time.monotonic()))

    def _welcome(self, weights_port: int) -> wire.Welcome:
        """The welcome of every actor, still without a session and a number."""
        learner = self._config.learner
        return wire.Welcome(
            run_id=self.table.run_id,
            epoch=self._lineage.epoch,
            session=b"",
            number=-1,
            weights_port=weights_port,
            ipc_data=self._link.data_path,
            ipc_weights=self._link.weights_path,
            nonce_path=self._link.nonce_path,
            nonce=self._link.nonce,
            lease_s=learner.lease_s,
            heartbeat_s=learner.heartbeat_s,
            max_columns=learner.batch_columns,
        )

    def _make_table(self, run_id: bytes) -> SessionTable:
        config, is_lockstep = self._config, self._config.pace.is_lockstep
        return SessionTable(
            run_id=run_id,
            lineage=self._lineage,
            lease_s=config.learner.lease_s,
            max_lag=config.pace.lag if is_lockstep else config.learner.max_lag,
            new_id=lambda: secrets.token_bytes(16),
            num_actors=config.train.num_actors if is_lockstep else None,
        )

    def _make_filler(
        self, on_episodes: Callable[[Episodes], None], on_loss: Callable[[], None]
    ) -> SlotFiller:
        pace, num_actors = self._config.pace, self._config.train.num_actors
        if not pace.is_lockstep:
            return SlotFiller(on_episodes)
        return LockstepFiller(
            on_episodes,
            num_actors=num_actors,
            width=self._config.learner.batch_columns // num_actors,
            lag=pace.lag,
            first_update=self._lineage.forks[self._lineage.epoch],
            on_loss=on_loss if pace.on_loss == "stop" else None,
        )

    def _bind(self, schema: Schema | None) -> list[Router]:
        bind, link, routers = self._config.bind, self._link, list[Router]()
        size = wire.MAX_MESSAGE_BYTES
        if schema is not None:
            # Nobody has a reason to send more than a whole batch at once.
            size = _largest_body(self._config.learner.batch_columns, schema) + 65536
        self._context = new_context()
        ends = ("data", bind.data, link.data_path), ("weights", bind.weights, link.weights_path)
        for name, url, ipc_path in ends:
            try:
                routers.append(Router(self._context, url, ipc_path, size, self.key))
            except ConfigError as error:
                for router in routers:
                    router.close()
                self._context.term()
                link.close()
                raise ConfigError(f"bind.{name}: {error}") from None
        return routers


def _told(settings: ActorSettings) -> bytes:
    return wire.encode_settings(settings.model_dump(mode="json"))


def _largest_body(columns: int, schema: Schema) -> int:
    return columns * (schema.layout.column_bytes + wire.EPISODE_BYTES * schema.rows)
