"""An actor with neither environments nor sockets: its side of the protocol, and somebody who
carries what it says to a learner's data port."""

from impala_async.wire.actor_side import ActorSide, Handshake
from impala_async.wire.messages import BYE_REASONS, Bye, ByeOk, Reject, code_of, pack


class PureActor:
    """It says what is due whenever it is asked to, and answers what it hears.

    `say` carries frames away if it can be now; `encode` makes those of a trajectory, by its seq.
    """

    def __init__(self, actor, *spec, streams=1, say, encode, lockstep_lag=None, now=0.0):
        self.side = ActorSide(actor)
        self.side.set_spec(*spec, streams)
        self.is_over = False
        self.goodbyes = []
        self._say, self._encode = say, encode
        self._lockstep_lag = lockstep_lag
        self._greeting = self._new_handshake(now)

    def tick(self, now):
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

    def hear(self, message, now):
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

    def come_back(self, now):
        """Look for a learner again; what is not settled goes again."""
        self.side.lose()
        self._greeting = self._new_handshake(now)

    def _new_handshake(self, now):
        # Simulations play the same twice.
        return Handshake(self.side.handshake(now).hello, now, chance=lambda: 0.5)
