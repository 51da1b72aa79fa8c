"""An actor with neither environments nor sockets: its side of the protocol, and somebody who
carries what it says to a learner's data port."""

from collections.abc import Callable
from typing import Generic

from impala_async.schema import Schema
from impala_async.wire.actor_side import ActorSide, Handshake, Item
from impala_async.wire.messages import (
    BYE_REASONS,
    Bye,
    ByeOk,
    Frame,
    Grant,
    Message,
    Reject,
    code_of,
    pack,
)

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

    def hear(self, message: Message, now: float) -> Grant | Reject | Bye | None:
        """Do what a message of the learner asks for."""
        if not self.side.has_session:
            welcome = self._greeting.take(message, now)
            if welcome is not None and not self.is_over:
                self.side.accept(welcome, now, max_lag=1 << 30, lockstep_lag=self._lockstep_lag)
                self._say(self.side.spec_frames())
                self.side.said_spec(now)
            return None
        taken = self.side.take(message, now)
        is_lost = isinstance(taken, Reject) and code_of(taken) == "hello_again"
        if isinstance(taken, Bye):
            self._say([pack(ByeOk(taken.session))])
            self.goodbyes.append(BYE_REASONS[taken.reason])
            self.is_over = self.goodbyes[-1] == "finished"
        if is_lost or isinstance(taken, Bye):
            self.come_back(now)
        return taken

    def come_back(self, now: float) -> None:
        """Look for a learner again; what is not settled goes again."""
        self.side.lose()
        self._greeting = self._new_handshake(now)

    def _new_handshake(self, now: float) -> Handshake:
        # Simulations play the same twice.
        return Handshake(self.side.handshake(now).hello, now, chance=lambda: 0.5)
