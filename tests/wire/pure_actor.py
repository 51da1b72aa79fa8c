"""An actor with neither environments nor sockets: its side of the protocol, and somebody who
carries what it says to a learner's data port."""

from collections.abc import Callable
from typing import Generic

from impala_async.schema import Schema
from impala_async.wire.actor_side import ActorSide, Event, Goodbye, Handshake, SessionOver
from impala_async.wire.codec import Frame
from impala_async.wire.messages import Message, Welcome, pack
from impala_async.wire.outbox import Item

Say = Callable[[list[Frame]], bool]
"""Carries a message away, if it can be now."""
Encode = Callable[[int, Item], list[Frame]]
"""The frames of a trajectory, by its seq."""


class PureActor(Generic[Item]):
    """It says what is due whenever it is asked to, and answers what it hears."""

    def __init__(
        self,
        actor: bytes,
        schema: Schema,
        layout_digest: bytes,
        columns: int,
        streams: int = 1,
        *,
        say: Say,
        encode: Encode[Item],
        lockstep_lag: int | None = None,
        now: float = 0.0,
    ) -> None:
        self.side: ActorSide[Item] = ActorSide(actor)
        self.side.set_spec(schema, layout_digest, columns, streams)
        self.is_over = False
        self.goodbyes: list[str] = []
        self._say, self._encode = say, encode
        self._lockstep_lag = lockstep_lag
        self._greeting = self._new_handshake(now)

    def tick(self, now: float) -> None:
        """A hello, or all that has credit, if that is due."""
        if self.is_over:
            return
        if not self.side.has_session:
            is_due = self._greeting.is_due(now, is_greeted=True)
            if is_due and self._say([pack(self._greeting.hello)]):
                self._greeting.said(now)
            return
        outbox = self.side.outbox
        outbox.resend_overdue(now, self.side.welcome.lease_s)
        while (one := outbox.sendable()) is not None and self._say(self._encode(*one)):
            outbox.mark_sent(one[0], now)

    def hear(self, message: Message, now: float) -> Event[Item] | None:
        """Do what a message of the learner asks for."""
        if not self.side.has_session:
            answer = self._greeting.take(message, now)
            if isinstance(answer, Welcome) and not self.is_over:
                self.side.accept(answer, now, max_lag=1 << 30, lockstep_lag=self._lockstep_lag)
                self._say(self.side.spec_frames())
                self.side.said_spec(now)
            return None
        event = self.side.take(message, now)
        if isinstance(event, Goodbye):
            self._say([pack(event.answer)])
            self.goodbyes.append(event.reason)
            self.is_over = event.reason == "finished"
        if isinstance(event, SessionOver | Goodbye):
            self.come_back(now)
        return event

    def come_back(self, now: float) -> None:
        """Look for a learner again; what is not settled goes again."""
        self.side.lose()
        self._greeting = self._new_handshake(now)

    def _new_handshake(self, now: float) -> Handshake:
        # Simulations play the same twice.
        return Handshake(self.side.handshake(now).hello, now, chance=lambda: 0.5)
