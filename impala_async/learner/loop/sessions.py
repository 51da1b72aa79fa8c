"""Everything that an actor says except its trajectories, decided without sockets and threads: a
message and a moment go in, answers come out.

Runs on: event loop
"""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import NamedTuple

from impala_async import __version__
from impala_async.envs.faults import WHERES, say_hang
from impala_async.errors import CheckpointError, ProtocolError, SpacesError, plain
from impala_async.learner.loop.placement import Placement
from impala_async.learner.loop.publisher import Publisher
from impala_async.learner.slots import SlotFiller
from impala_async.metrics.names import ACTOR_TIMERS, AGENTS_PER_STEP, LEAST_OF_ACTORS
from impala_async.metrics.report import Counters
from impala_async.schema import MAX_SCHEMA_BYTES, Schema, digest_of
from impala_async.weights import NO_VERSION, Weights, WeightsLayout
from impala_async.wire import messages as wire
from impala_async.wire.peer import Peer
from impala_async.wire.session import SessionTable, reject
from impala_async.wire.sockets import NO_FRAME, Router

logger = logging.getLogger(__name__)

MAX_LINES_PER_S = 20
HANG_EVERY_S = 10.0
# The times of an actor whose heartbeats stay away for so many of them are out of date.
SILENT_HEARTBEATS = 2.5
HANG_NAMES = ("hang_s", "hang_in", "hang_first", "hang_last")
# Nothing takes longer than an hour in one trajectory.
LONGEST_MS = 3.6e6
# To look at a schema takes 0.3 us a byte, and 0.8 where it has very many choices: all that are not
# ours have a twelfth of the loop at most.
LOOK_S_PER_BYTE = 1e-5
# The reader of a difference is on either side.
HERE, THERE = "at the learner", "at the actor"


class Answer(NamedTuple):
    """Frames that are to be sent, and the connection over which."""

    route: bytes
    frames: Sequence[wire.Frame]
    instead: Sequence[wire.Frame] = ()
    """These are sent if those cannot be sent now."""
    replaces: bytes = b""
    """The connection whose place this one takes: it is to be ended."""
    on_sent: Callable[[], None] = lambda: None


class PeerLog:
    """Says what peers make it say: so many lines a second, each of one line, and how many more."""

    def __init__(self) -> None:
        # The lines of the last second.
        self._said_at = deque[float]()
        self._num_left_out = 0

    def say(self, level: int, text: str, *args: object) -> None:
        now, num_lines = time.monotonic(), 2 if self._num_left_out else 1
        while self._said_at and now - self._said_at[0] >= 1:
            self._said_at.popleft()
        if len(self._said_at) + num_lines > MAX_LINES_PER_S:
            self._num_left_out += 1
            return
        self._said_at.extend([now] * num_lines)
        if self._num_left_out:
            logger.warning("%d more lines like these", self._num_left_out)
            self._num_left_out = 0
        logger.log(level, text, *(plain(arg) if isinstance(arg, str) else arg for arg in args))


@dataclass(eq=False, kw_only=True)
class Sessions:
    """Knows who is here and what is trained, and hands out the weights."""

    table: SessionTable
    publisher: Publisher
    filler: SlotFiller
    welcome: wire.Welcome
    """It is still without a session and a number."""
    settings_frame: bytes
    rows: int
    on_schema: Callable[[Schema], None]
    """Builds what the first actor's schema asks for, where there was none before."""
    find_layout: Callable[[Schema], bytes | None]
    """Tells the digest of the weights of a schema, if that can be told unbuilt."""
    placement: Placement = field(default_factory=Placement)

    def __post_init__(self) -> None:
        self.schema: Schema | None = None
        self.is_closing = False
        self._layout: WeightsLayout | None = None
        self._log = PeerLog()
        self._last_death: str | None = None
        self._agents_per_step: float | None = None
        self._counters = Counters(f"sessions/{how}" for how in ("expired", "refused", "closed"))
        self._look_at = -math.inf
        self._schema_buffer = memoryview(bytearray(MAX_SCHEMA_BYTES))

    def open(self, schema: Schema, layout: WeightsLayout) -> None:
        self.schema, self._layout = schema, layout
        # Everybody knows the model by its float32 layout, whatever weights come in.
        self.publisher.layout_digest = layout.coarse(()).digest

    def hear(self, route: bytes, message: wire.Message, rest: Router, now: float) -> list[Answer]:
        if isinstance(message, wire.Hello):
            if self.is_closing or not self.placement.is_known:
                return []  # the actor asks again, and then another learner may be here
            if (url := self._place(message, now)) is not None:
                return [Answer(route, [wire.pack(reject("elsewhere", url, 0.0))])]
            opened = self.table.hello(message, route, now)
            if isinstance(opened, wire.Reject):
                return self._refuse(route, opened)
            welcome = self.welcome._replace(session=opened.session, number=opened.number)
            return [Answer(route, [wire.pack(welcome), self.settings_frame])]
        if not isinstance(message, wire.Spec | wire.Bye | wire.ByeOk):
            raise ProtocolError("not_allowed_now", f"{type(message).__name__} on the data port")
        peer = self.table.find(message.session, now)
        if isinstance(message, wire.Spec):
            if peer is None:
                raise ProtocolError("unknown_session")
            peer.data_route = route
            return self._agree(peer, message, rest, now)
        return [] if peer is None else self._part(peer, route, message)

    def hear_pull(
        self, route: bytes, message: wire.Message, rest: Router, now: float
    ) -> list[Answer]:
        if not isinstance(message, wire.Get | wire.Heartbeat):
            raise ProtocolError("not_allowed_now", f"{type(message).__name__} on the weights port")
        peer = self.table.find(message.session, now)
        if peer is None:
            raise ProtocolError("unknown_session")
        if route == peer.left_route:
            return []
        # It has connected again; whoever has not, and reads nothing, would make us keep much.
        replaces = peer.weights_route if peer.weights_route != route else b""
        peer.left_route, peer.weights_route = replaces or peer.left_route, route
        if isinstance(message, wire.Heartbeat):
            self._note_beat(peer, message.timers, now)
            return [Answer(route, self.grant(peer).frames, replaces=replaces)]
        may_begin = self.filler.may_begin(peer, self.publisher.version.update)
        version = self.publisher.choose(message, may_begin=may_begin)
        # Who reads nothing holds a version each: strangers are given none.
        if not peer.columns or not peer.may_pull(version, now):
            version = NO_VERSION
        frames = self.publisher.reply(version)
        if version == NO_VERSION:
            return [Answer(route, frames, replaces=replaces)]
        # Where so many are under way to it, it asks again, sooner than if it heard nothing.
        instead = self.publisher.nothing_new()
        return [Answer(route, frames, instead, replaces, partial(peer.note_pull, version, now))]

    def grant(self, peer: Peer) -> Answer:
        """Say what an actor may do now, and what became of what it sent."""
        return Answer(peer.data_route, [wire.pack(peer.grant(self.publisher.version))])

    def publish(self, weights: Weights) -> list[Answer]:
        """There is a new version. Where everybody waits for it, it is told at once to all who have
        asked before, and over the weights port, as another thread fetches weights."""
        self.publisher.publish(weights)
        if not self.is_closing:
            self.filler.note_version(weights.version.update)
        if not self.filler.is_lockstep:
            return []
        return self._tell_at_once(self.table.joined)

    def cut(self, update: int) -> list[Answer]:
        """Other ranks wait for the batch that is trained after this update: whoever is late for it
        cuts its part. Each is told at once, and again with every grant until that has come."""
        if self.is_closing:
            return []
        late = self.filler.late_for(update)
        told = [peer for peer in late if peer.cut != peer.watermark.below]
        for peer in told:
            # Its parts come in order.
            peer.cut = peer.watermark.below
        return self._tell_at_once(told)

    def _tell_at_once(self, peers: Iterable[Peer]) -> list[Answer]:
        """Grants over the weights port, where another thread listens, to whoever is known there."""
        told = [peer for peer in peers if peer.weights_route]
        return [self.grant(peer)._replace(route=peer.weights_route) for peer in told]

    def say_bye(self, reason: str) -> list[Answer]:
        code = wire.BYE_REASONS.index(reason)
        byes = [(peer.data_route, wire.Bye(peer.session, code)) for peer in self.table]
        return [Answer(route, [wire.pack(bye)]) for route, bye in byes]

    def let_one_go(self, now: float) -> list[Answer]:
        """Another rank has no actor at work: end the newest session of one that may go, which is
        told first what became of all that it sent."""
        joined = self.table.joined
        at_work = [peer for peer in joined if not peer.is_newcomer]
        # This rank keeps one that works.
        those = at_work if len(at_work) > 1 else [peer for peer in joined if peer.is_newcomer]
        free = [peer for peer in those if not peer.is_numbered]
        if not free:
            return []
        peer = max(free, key=lambda peer: peer.opened_at)
        self.table.end(peer)
        self.placement.let_go(peer.actor, now)
        self._counters.add("sessions/closed")
        self._log.say(logging.INFO, "actor %d goes to another rank, where none works", peer.number)
        bye = wire.Bye(peer.session, wire.BYE_REASONS.index("moving"))
        return [self.grant(peer), Answer(peer.data_route, [wire.pack(bye)])]

    def expire(self, now: float) -> None:
        for peer in self.table.expire(now):
            self.lose(peer, "its lease is over")

    def lose(self, peer: Peer, why: str) -> None:
        self.table.end(peer)
        self._counters.add("sessions/expired")
        if peer.columns:
            self._log.say(logging.WARNING, "actor %d is gone: %s", peer.number, why)

    def report(self, now: float) -> dict[str, object]:
        """The counts, and medians of the times that actors tell: one actor alone moves none."""
        live = self.table.joined
        report: dict[str, object] = {
            **self.publisher.report(),
            "num_actors": len(live),
            "sessions/opened": self.table.num_opened,
            **self._counters,
            "sessions/given_way": self.table.num_given_way,
            "actor/last_death": self._last_death,
            "actor/hang": None,
        }
        # Times that a silent actor told are not those of now.
        oldest = now - SILENT_HEARTBEATS * self.welcome.heartbeat_s
        fresh = [peer.timers for peer in live if peer.beat_at >= oldest]
        for name in ACTOR_TIMERS:
            values = [timers[name] for timers in fresh if name in timers]
            over_all = min if name in LEAST_OF_ACTORS else median
            report[f"actor/{name}"] = over_all(values) if values else None
        # It stays true when no actor is left to tell.
        if agents := [timers[AGENTS_PER_STEP] for timers in fresh if AGENTS_PER_STEP in timers]:
            self._agents_per_step = median(agents)
        report[f"actor/{AGENTS_PER_STEP}"] = self._agents_per_step
        if hangs := [peer.hang for peer in live if peer.hang is not None]:
            since, line = min(hangs, key=lambda hang: hang[0])
            report["actor/hang"] = line(now - since)
        return report

    def _place(self, hello: wire.Hello, now: float) -> str | None:
        """The address of the rank that it is to work for, unless that is this one."""
        is_free = hello.protocol == wire.PROTOCOL and hello.number == wire.NO_NUMBER
        if not is_free or self.table.is_here(hello.actor):
            return None
        return self.placement.send(hello.actor, len(self.table.joined), now)

    def _agree(self, peer: Peer, spec: wire.Spec, rest: Router, now: float) -> list[Answer]:
        size = rest.receive_into(self._schema_buffer)
        if size == NO_FRAME or rest.has_more_frames:
            raise ProtocolError("wrong_frame_count", "Spec comes with one frame more, its schema")
        if size > MAX_SCHEMA_BYTES:
            raise ProtocolError("wrong_size", f"a schema of {size} bytes")
        frame = bytes(self._schema_buffer[:size])
        digest = digest_of(frame)
        schema = self._read_schema(frame, digest, now)
        if schema is None:
            return self._put_off(peer, "too many schemas that are not the learner's come in")
        if self.is_closing:
            return []
        if peer.columns and (spec.columns, spec.streams) != (peer.columns, peer.streams):
            # The credit it holds was counted by the first one.
            raise ProtocolError("not_allowed_now", "a second Spec that differs from the first")
        fault = self._misfit(schema, spec)
        # It is that of the text, however it is written.
        if fault is None and spec.schema_digest != digest:
            fault = "the schema is not the one of its digest"
        if fault is None and self.schema is None:
            fault = self._decide_schema(peer, schema, spec)
        if fault is not None:
            self.table.end(peer)
            return self._refuse(peer.data_route, reject("mismatch", fault))
        is_new = not peer.columns
        if not self.table.join(peer, spec.columns, spec.streams, gives_way=bool(spec.gives_way)):
            return self._put_off(peer, "its place is taken")
        if is_new:
            self._note_join(peer)
        answer = self.grant(peer)
        if spec.layout_digest == wire.NO_LAYOUT and self._layout is not None:
            answer = answer._replace(frames=[*answer.frames, self._layout.to_json()])
        return [answer]

    def _read_schema(self, frame: bytes, digest: bytes, now: float) -> Schema | None:
        """None where others have been looked at for so long that this one must wait."""
        if self.schema is not None and digest == self.schema.digest:
            return self.schema
        if now < self._look_at:
            return None
        self._look_at = now + len(frame) * LOOK_S_PER_BYTE
        try:
            return Schema.from_json(frame)
        except SpacesError as error:
            raise ProtocolError("malformed_header", str(error)) from None

    def _put_off(self, peer: Peer, why: str) -> list[Answer]:
        self.table.end(peer)
        return [Answer(peer.data_route, [wire.pack(reject("hello_again", why, 0.0))])]

    def _note_join(self, peer: Peer) -> None:
        # A death before this is not the reason if nobody is there later.
        self._last_death = None
        self._log.say(logging.INFO, "actor %d joined with %d columns", peer.number, peer.columns)
        if peer.build != __version__:
            text = f"actor %d runs %s, the learner {__version__}"
            self._log.say(logging.WARNING, text, peer.number, peer.build)

    def _decide_schema(self, peer: Peer, schema: Schema, spec: wire.Spec) -> str | None:
        try:
            fault = _model_misfit(self.find_layout(schema), spec)
            if fault is not None:
                return fault
            self.on_schema(schema)
        except (SpacesError, CheckpointError, MemoryError) as error:
            return f"this learner cannot train on such an environment: {str(error) or 'no memory'}"
        self.schema = self.schema or schema
        self._log.say(logging.INFO, "actor %d, the first, has decided what is trained", peer.number)
        # The layout of some models is known only now.
        return _model_misfit(self.publisher.layout_digest, spec)

    def _misfit(self, schema: Schema, spec: wire.Spec) -> str | None:
        if self.schema is None and schema.rows != self.rows:
            return f"trajectory.rows: {self.rows} {HERE}, {schema.rows} {THERE}"
        if self.schema is not None and schema != self.schema:
            return f"the environment differs: {self.schema.difference(schema, HERE, THERE)}"
        if spec.columns > self.welcome.max_columns:
            return (
                f"actor.num_envs: {spec.columns} at the actor, but a batch of this learner has "
                f"learner.batch_columns = {self.welcome.max_columns}: start fewer environments"
            )
        return self.filler.find_misfit(spec) or _model_misfit(self.publisher.layout_digest, spec)

    def _note_beat(self, peer: Peer, timers: Mapping[str, float], now: float) -> None:
        """A heartbeat says how long things took, and that an environment hangs."""
        peer.beat_at = now
        peer.timers = {
            name: float(ms)
            for name, ms in timers.items()
            if name in (*ACTOR_TIMERS, AGENTS_PER_STEP) and 0 <= ms <= LONGEST_MS
        }
        seconds, where, first, last = (int(timers.get(name, -1)) for name in HANG_NAMES)
        if seconds < 0 or not 0 <= first <= last <= wire.MAX_COLUMNS:
            peer.hang = None
            return
        # It hangs no longer than its session lasts.
        seconds = min(seconds, math.ceil(now - peer.opened_at))
        line = partial(say_hang, WHERES[where == 1], first, last, f"actor {peer.number}")
        if now >= peer.hang_due:
            self._log.say(logging.WARNING, "%s", line(seconds))
            peer.hang_due = now + HANG_EVERY_S
        peer.hang = now - seconds, line

    def _part(self, peer: Peer, route: bytes, message: wire.Bye | wire.ByeOk) -> list[Answer]:
        self.table.end(peer)
        self._counters.add("sessions/closed")
        why, death = "left", None
        if isinstance(message, wire.Bye):
            why = f"said goodbye ({wire.BYE_REASONS[message.reason]})"
            if message.text:
                death = f"died of {plain(message.text)}"
                why = f"it {death}"
        # Nobody misses who never joined.
        if peer.columns:
            self._log.say(logging.INFO, "actor %d is gone: %s", peer.number, why)
            if death is not None:
                self._last_death = f"actor {peer.number} {death}"
        answer = Answer(route, [wire.pack(wire.ByeOk(message.session))])
        return [answer] if isinstance(message, wire.Bye) else []

    def _refuse(self, route: bytes, refusal: wire.Reject) -> list[Answer]:
        self._counters.add("sessions/refused")
        self._log.say(logging.WARNING, "an actor was refused: %s", refusal.text)
        return [Answer(route, [wire.pack(refusal)])]


def _model_misfit(layout: bytes | None, spec: wire.Spec) -> str | None:
    if not layout or spec.layout_digest in (layout, wire.NO_LAYOUT):
        return None
    return (
        f"the model differs: layout {layout.hex()} {HERE}, {spec.layout_digest.hex()} {THERE}: "
        "install the same release of impala-async on both sides"
    )
