"""Session messages: everything that an actor says except its trajectories.

Sessions are opened and closed here, schemas compared, heartbeats taken, weights handed out.

Runs on: event loop
"""

import logging
from collections.abc import Callable
from statistics import median

from impala_async import __version__
from impala_async.errors import ProtocolError, SpacesError
from impala_async.learner.loop.endpoint import Endpoint, WrongPortError
from impala_async.learner.loop.peer_log import ActorFailures, PeerLog
from impala_async.learner.loop.publisher import Publisher
from impala_async.metrics.names import ACTOR_TIMERS
from impala_async.metrics.report import Counters
from impala_async.schema import Schema, digest_of
from impala_async.weights import NO_VERSION, Version, WeightsLayout
from impala_async.wire.codec import Frame
from impala_async.wire.connections import REPLACED
from impala_async.wire.messages import (
    BYE_REASONS,
    NO_LAYOUT,
    Bye,
    ByeOk,
    Get,
    Heartbeat,
    Hello,
    Message,
    Reject,
    Spec,
    Welcome,
    pack,
    plain,
)
from impala_async.wire.peer import Peer
from impala_async.wire.session import SessionTable, reject
from impala_async.wire.sockets import NO_FRAME

logger = logging.getLogger(__name__)

MAX_SCHEMA_BYTES = 65536
# Nothing takes longer than an hour in one trajectory.
LONGEST_MS = 3.6e6
# Who reads of a difference is on either side.
HERE, THERE = "at the learner", "at the actor"


class SessionMessages:
    """Owns nothing but counters and the last timers of each actor; decides by the table."""

    def __init__(
        self,
        table: SessionTable,
        publisher: Publisher,
        *,
        welcome: Welcome,
        settings_frame: bytes,
        rows: int,
        lockstep_columns: int | None,
        clock: Callable[[], float],
        on_schema: Callable[[Schema], None],
        find_layout: Callable[[Schema], bytes | None],
    ) -> None:
        self.schema: Schema | None = None
        self.layout: WeightsLayout | None = None
        """The layout of published weights, once it is known."""
        self.is_closing = False
        self._table = table
        self._publisher = publisher
        # Without a session and a rank.
        self._welcome = welcome
        self._settings_frame = settings_frame
        self._rows = rows
        self._lockstep_columns = lockstep_columns
        self._clock = clock
        self._on_schema = on_schema
        self._find_layout = find_layout
        # Strangers can make it say only so much.
        self._log = PeerLog(logger, clock)
        self._timers: dict[bytes, dict[str, float]] = {}
        self._failures = ActorFailures(self._log.warning, clock)
        self._sessions = Counters(("expired", "refused", "closed"), prefix="sessions/")
        self._schema_buffer = memoryview(bytearray(MAX_SCHEMA_BYTES))

    def handle_data_side(self, endpoint: Endpoint, route: bytes, message: Message) -> None:
        """A message on the data port that is no trajectory."""
        if isinstance(message, Hello):
            self._greet(endpoint, route, message)
            return
        peer = self._find(message)
        if peer is None:
            return
        peer.data_route = route
        if isinstance(message, Spec):
            self._agree(endpoint, peer, message)
        elif isinstance(message, Bye):
            why = f"said goodbye ({BYE_REASONS[message.reason]})" if peer.columns else ""
            if message.text and peer.columns:
                why = self._failures.hear_death(peer.rank, plain(message.text))
            self._close(peer, why)
            endpoint.send(route, [pack(ByeOk(message.session))])
        elif isinstance(message, ByeOk):
            self._close(peer, "left" if peer.columns else "")
        else:
            raise ProtocolError("not_allowed_now", f"{type(message).__name__} on the data port")

    def handle_weights_side(self, endpoint: Endpoint, route: bytes, message: Message) -> None:
        """A message on the weights port."""
        if isinstance(message, Hello):
            raise WrongPortError("not_allowed_now", "Hello on the weights port")
        if not isinstance(message, Get | Heartbeat):
            raise ProtocolError("not_allowed_now", f"{type(message).__name__} on the weights port")
        peer = self._find(message)
        if peer is None:
            return
        if route != peer.weights_route:
            # It has connected again; whoever has not, and reads nothing, would make us keep much.
            endpoint.cut(peer.weights_route, REPLACED)
            peer.weights_route = route
        if isinstance(message, Get):
            frames = self._weights_for(peer, message)
            if not endpoint.send(route, frames) and len(frames) > 1:
                # So many are under way to it: it asks again, sooner than if it heard nothing.
                endpoint.send(route, self._publisher.nothing_new())
        else:
            self._timers[peer.session] = {
                name: float(ms)
                for name, ms in message.timers.items()
                if name in ACTOR_TIMERS and 0 <= ms <= LONGEST_MS
            }
            age_s = self._clock() - peer.opened_at
            self._failures.hear_beat(peer.session, peer.rank, message.timers, age_s)
            endpoint.send(route, [pack(peer.grant(self._publisher.version))])

    def expire(self) -> None:
        """End the sessions whose lease is over."""
        for peer in self._table.expire(self._clock()):
            self._note_loss(peer, "its lease is over")

    def remind(self, endpoint: Endpoint, peer: Peer) -> bool:
        """Say again what a silent actor may do; False if its connection is closed."""
        return endpoint.send(peer.data_route, [pack(peer.grant(self._publisher.version))])

    def announce(self, weights: Endpoint) -> None:
        """Name the newest version to everybody who has asked for weights before."""
        for peer in self._table.joined:
            if peer.weights_route:
                grant = peer.grant(self._publisher.version)
                weights.send(peer.weights_route, [pack(grant)])

    def lose(self, peer: Peer, why: str) -> None:
        """The actor is gone without a word."""
        self._table.end(peer)
        self._note_loss(peer, why)

    def say_bye(self, endpoint: Endpoint, reason: str) -> None:
        """Tell every actor that this learner ends."""
        for peer in self._table:
            endpoint.send(peer.data_route, [pack(Bye(peer.session, BYE_REASONS.index(reason)))])

    @property
    def num_actors(self) -> int:
        """Actors that have joined and not left."""
        return len(self._table.joined)

    def report(self) -> dict[str, object]:
        """Sessions, and the medians of what actors say of their time: one alone moves none."""
        report: dict[str, object] = {
            "num_actors": self.num_actors,
            "sessions/opened": self._table.num_opened,
            **self._sessions.snapshot(),
            "sessions/given_way": self._table.num_given_way,
        }
        # A session may end without a word to us: by a second hello of the same actor.
        live = {peer.session for peer in self._table.joined}
        self._timers = {key: timers for key, timers in self._timers.items() if key in live}
        for name in ACTOR_TIMERS:
            values = [timers[name] for timers in self._timers.values() if name in timers]
            report[f"actor/{name}"] = median(values) if values else None
        return report | self._failures.report(live)

    def _find(self, message: Message) -> Peer | None:
        """The peer that speaks; None if it says goodbye to a session that is over already."""
        session = getattr(message, "session", None)
        if session is None:
            raise ProtocolError("not_allowed_now", f"{type(message).__name__} from an actor")
        peer = self._table.find(session, self._clock())
        if peer is None and not isinstance(message, Bye | ByeOk):
            raise ProtocolError("unknown_session")
        return peer

    def _greet(self, endpoint: Endpoint, route: bytes, hello: Hello) -> None:
        if self.is_closing:
            return  # the actor asks again, and then another learner may be here
        opened = self._table.hello(hello, route, self._clock())
        if isinstance(opened, Reject):
            self._refuse(endpoint, route, opened)
            return
        welcome = self._welcome._replace(session=opened.session, rank=opened.rank)
        endpoint.send(route, [pack(welcome), self._settings_frame])

    def _weights_for(self, peer: Peer, get: Get) -> list[Frame]:
        """In lockstep a session begins with the weights of its first batch, and not before."""
        is_first = Version(get.epoch, get.update) == NO_VERSION
        if is_first and self._lockstep_columns is not None:
            newest = self._publisher.version.update
            if peer.begins_at is None or newest < peer.begins_at:
                return self._publisher.nothing_new()
        return self._publisher.reply(get)

    def _agree(self, endpoint: Endpoint, peer: Peer, spec: Spec) -> None:
        """Compare the actor's schema with ours; without one yet, the first actor's is ours."""
        schema, digest = self._receive_schema(endpoint)
        if self.is_closing:
            return
        if peer.columns and (spec.columns, spec.streams) != (peer.columns, peer.streams):
            # The credit it holds was counted by the first one.
            raise ProtocolError("not_allowed_now", "a second Spec that differs from the first")
        fault = self._misfit(schema, spec)
        if fault is None and spec.schema_digest != digest:
            fault = "the schema is not the one of its digest"
        if fault is None and self.schema is None:
            fault = self._decide_schema(peer, schema, spec)
        if fault is not None:
            self._refuse(endpoint, peer.data_route, reject("mismatch", fault))
            self._table.end(peer)
            return
        is_new = not peer.columns
        gives_way = bool(spec.gives_way)
        if not self._table.join(peer, spec.columns, spec.streams, gives_way=gives_way):
            self._table.end(peer)
            endpoint.send(peer.data_route, [pack(reject("hello_again", "its place is taken", 0.0))])
            return
        if is_new:
            self._log.info("actor %d joined with %d columns", peer.rank, peer.columns)
        if is_new and peer.build != __version__:
            self._log.warning(
                "actor %d runs %s, the learner %s", peer.rank, peer.build, __version__
            )
        frames: list[Frame] = [pack(peer.grant(self._publisher.version))]
        if spec.layout_digest == NO_LAYOUT and self.layout is not None:
            frames.append(self.layout.to_json())
        endpoint.send(peer.data_route, frames)

    def _decide_schema(self, peer: Peer, schema: Schema, spec: Spec) -> str | None:
        """Build what this schema asks for, unless that is impossible; then it is not ours."""
        try:
            layout = self._find_layout(schema)
            if layout and spec.layout_digest not in (layout, NO_LAYOUT):
                return _other_model(layout, spec)
            self._on_schema(schema)
        except SpacesError as error:
            return f"this learner cannot train on such an environment: {error}"
        self.schema = self.schema or schema
        self._log.info("actor %d, the first, has decided what is trained", peer.rank)
        # The layout of some models is known only now.
        return self._misfit(schema, spec)

    def _receive_schema(self, endpoint: Endpoint) -> tuple[Schema, bytes]:
        """And its digest: that of the text, however it is written."""
        size = endpoint.router.receive_into(self._schema_buffer)
        if size == NO_FRAME:
            raise ProtocolError("wrong_frame_count", "Spec comes with a schema")
        if size > MAX_SCHEMA_BYTES:
            raise ProtocolError("wrong_size", f"a schema of {size} bytes")
        if endpoint.router.has_more_frames():
            raise ProtocolError("wrong_frame_count", "Spec has two frames")
        frame = bytes(self._schema_buffer[:size])
        try:
            return Schema.from_json(frame), digest_of(frame)
        except SpacesError as error:
            raise ProtocolError("malformed_header", str(error)) from None

    def _misfit(self, schema: Schema, spec: Spec) -> str | None:
        if self.schema is None and schema.rows != self._rows:
            return f"trajectory.rows: {self._rows} {HERE}, {schema.rows} {THERE}"
        if self.schema is not None and schema != self.schema:
            return f"the environment differs: {self.schema.difference(schema, HERE, THERE)}"
        if spec.columns > self._welcome.max_columns:
            return (
                f"actor.num_envs: {spec.columns} at the actor, but a batch of this learner has "
                f"learner.batch_columns = {self._welcome.max_columns}: start fewer environments"
            )
        wanted = self._lockstep_columns
        if wanted is not None and (spec.columns, spec.streams) != (wanted, 1):
            return (
                f"pace.mode lockstep wants one message of {wanted} columns from each actor, this "
                f"one has {spec.streams} of {spec.columns}: start it without --num-envs, and use "
                "actor.sampler = serial where the environment's own vectors reset in the same "
                "step; learner.batch_columns must be train.num_actors times the columns of one, "
                "and an environment has a column for each of its agents"
            )
        layout = self._publisher.layout_digest
        if layout and spec.layout_digest not in (layout, NO_LAYOUT):
            return _other_model(layout, spec)
        return None

    def _refuse(self, endpoint: Endpoint, route: bytes, refusal: Reject) -> None:
        self._sessions.add("refused")
        self._log.warning("an actor was refused: %s", refusal.text)
        endpoint.send(route, [pack(refusal)])

    def _close(self, peer: Peer, why: str) -> None:
        """Nobody misses who never joined: without a reason nothing is said."""
        self._table.end(peer)
        self._sessions.add("closed")
        if why:
            self._log.info("actor %d is gone: %s", peer.rank, why)

    def _note_loss(self, peer: Peer, why: str) -> None:
        self._sessions.add("expired")
        if peer.columns:
            self._log.warning("actor %d is gone: %s", peer.rank, why)


def _other_model(layout: bytes, spec: Spec) -> str:
    return (
        f"the model differs: layout {layout.hex()} {HERE}, {spec.layout_digest.hex()} {THERE}: "
        "install the same release of impala-async on both sides"
    )
