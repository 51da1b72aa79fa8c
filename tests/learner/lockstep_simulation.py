"""A learner in lockstep without sockets, clocks or threads, and actors that pace themselves as
`Client` does. The test decides who moves next, so that any order of events can be played.

    batch b, from 0, is trained by update `first_update + b + 1`
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from impala_async.weights import NO_VERSION, Lineage, Version
from impala_async.wire.actor_side import ActorSide
from impala_async.wire.messages import (
    Bye,
    Data,
    Get,
    NotModified,
    Reject,
    WeightsReply,
    Welcome,
    encode_data,
    unpack,
)
from impala_async.wire.pulls import LONGEST_PAUSE_S, Pulls
from tests.learner.columns import planes_of, small_schema
from tests.learner.hand_actor import MODEL
from tests.learner.pure_learner import PureLearner

SCHEMA = small_schema()
WIDTH = 2
Trajectory = tuple[int, int, Version]
"""Who sent it, its number, and the version it acted with."""


@dataclass(eq=False)
class SimulatedActor:
    """An actor whose next move the test chooses. `route` is empty when it is dead."""

    simulation: "LockstepSimulation"
    number: int
    acting: Version | None = None
    num_acted: int = 0
    rank: int = -1
    now: float = 0.0
    is_dead: bool = False
    arrived: list[Version] = field(default_factory=list)
    is_turned_away: bool = False
    reason_to_refuse: str = ""

    def __post_init__(self) -> None:
        self.side: ActorSide[Trajectory] = ActorSide(self.number.to_bytes(16, "big"))
        self.side.set_spec(SCHEMA, MODEL.digest, WIDTH, 1)

    @property
    def route(self) -> bytes:
        return b"" if self.is_dead else b"route-%d" % self.number

    @property
    def is_at_work(self) -> bool:
        return self.side.is_joined and not self.is_dead

    def hear(self, frames: Any) -> None:
        message = unpack(bytes(frames[0]))
        if self.is_dead:
            return
        if isinstance(message, Welcome):
            self.rank = message.rank
            self.side.accept(message, self.now, lockstep_lag=self.simulation.lag)
            times = {"heartbeat_s": 2.0, "reply_timeout_s": 10.0, "now": self.now}
            self.pulls = Pulls(message.session, have=NO_VERSION, layouts=(MODEL,), **times)
        elif isinstance(message, Reject):
            self.is_turned_away = True
        elif isinstance(message, WeightsReply | NotModified):
            weights = self.pulls.take(message, list(frames), self.now)
            self.arrived += [weights.version] if weights else []
        elif self.side.has_session:
            self.side.take(message, self.now)
            self.pulls.name(self.side.named)

    # What it does, each if it can; whether it could.

    def join(self) -> bool:
        if self.side.is_joined or self.is_dead:
            return False
        self.is_turned_away = False
        self.simulation.take(self, self.side.handshake(self.now).hello)
        if self.is_turned_away:
            return False
        spec, schema = self.side.spec_frames()
        self.simulation.take(self, unpack(bytes(spec)), schema)
        return True

    def pull(self) -> bool:
        self.now += LONGEST_PAUSE_S
        get = self.pulls.get(self.now) if self.is_at_work else None
        if get is None:
            return False
        before = len(self.arrived)
        self.pulls.said_get(self.now)
        self.simulation.take_get(self, get)
        # In lockstep it keeps no more than it may need.
        assert len(self.arrived) <= 1 + self.simulation.lag
        return len(self.arrived) > before

    def begin(self) -> bool:
        """A trajectory boundary: all that is finished must be under way, then weights."""
        if not self.is_at_work or self.acting or self.side.outbox.num_unsent:
            return False
        if not self.side.keeps_weights():
            if not self.arrived:
                return False
            self.side.act_with(self.arrived.pop(0))
        self.acting = self.side.version
        return True

    def finish(self) -> bool:
        if self.acting is None or self.is_dead or len(self.side.outbox) > 2:
            return False
        acted, self.acting = self.acting, None
        self.num_acted += self.side.put((self.number, self.num_acted, acted))
        return True

    def send(self) -> bool:
        """The first that has credit; it may be damaged."""
        one = self.side.outbox.sendable() if self.is_at_work else None
        if one is None:
            return False
        self.side.outbox.mark_sent(one[0], self.now)
        self.simulation.take_data(self, *one)
        return True

    def beat(self) -> bool:
        """How it finds out that its session is over."""
        is_over = self.is_at_work and not self.simulation.knows(self)
        if is_over:
            self.lose()
        return is_over

    def lose(self) -> None:
        """Its session is over, as it finds out: what it holds is given up."""
        self.side.lose()
        self.arrived.clear()

    def die(self) -> None:
        self.is_dead = True

    WORK = ("pull", "begin", "finish", "send")
    MOVES = ("join", "beat", *WORK)


MAX_ROUNDS = 1000


class LockstepSimulation(PureLearner):
    """The learner's side, and everybody who talks to it."""

    def __init__(self, num_ranks, lag, *, first_update=0, stops_at_loss=False):
        self.num_ranks, self.lag = num_ranks, lag
        self.num_losses = 0
        self.batches: list[list[Trajectory | None]] = []
        self.lags: list[list[int | None]] = []
        self.actors: list[SimulatedActor] = []
        epoch = 1 if first_update == 0 else 2
        super().__init__(
            SCHEMA,
            columns=num_ranks * WIDTH,
            lineage=Lineage(epoch - 1).resumed(epoch, first_update),
            num_ranks=num_ranks,
            lag=lag,
            on_loss=self._note_loss if stops_at_loss else None,
        )

    def add_actors(self, num_actors: int | None = None) -> list[SimulatedActor]:
        first = 1 + len(self.actors)
        numbers = range(first, first + (num_actors or self.num_ranks))
        new = [SimulatedActor(self, number) for number in numbers]
        self.actors += new
        self.listeners |= {actor.route: actor.hear for actor in new}
        return new

    def _note_loss(self) -> None:
        self.num_losses += 1
        self.admission.close()

    def knows(self, actor: SimulatedActor) -> bool:
        return self.table.peer_of(actor.side.session) is not None

    def take(self, actor: SimulatedActor, message: Any, *rest: Any) -> None:
        self.hear(actor.route, message, *rest)
        self.end_burst()

    def take_get(self, actor: SimulatedActor, get: Get) -> None:
        if not actor.beat():
            self.hear_pull(actor.route, get)

    def take_data(self, actor: SimulatedActor, seq: int, trajectory: Trajectory) -> None:
        """With what it is in its rewards, so that a slot shows what lies where."""
        if actor.beat():
            return
        number, acted, version = trajectory
        planes = planes_of(SCHEMA, WIDTH, seed=number * 1000 + acted)
        planes.columns.rewards_CT[:] = number * 1000 + acted
        if actor.reason_to_refuse:
            planes.columns.obs[""][0, 1] = np.nan
        header = Data(actor.side.session, seq, *version, SCHEMA.rows, WIDTH, 0, 0, None)
        episodes = [(float(actor.rank), acted + 1)]
        (frame,) = encode_data(header, planes.obs, planes.small, episodes)
        self.hear_frames(actor.route, frame)
        self.end_burst()

    def end_burst(self) -> None:
        super().end_burst()
        self.check()

    def check(self) -> None:
        """What must hold at any moment."""
        assert self.table.outstanding_columns <= self.filler.free_columns
        report = self.ledger.report()
        count = {k.removeprefix("trajectories/"): v for k, v in report.items()}
        assert count["received"] == count["admitted"] + count["rejected"]
        assert count["admitted"] == count["trained"] + count["dropped"] + count["in_slots"]
        assert 0 <= count["in_slots"] <= len(self.slots) * self.num_ranks * WIDTH

    def train(self) -> bool:
        """The update of the oldest full slot, as the learner thread tells of it."""
        if not self.full:
            return False
        slot = self.full.pop(0)
        assert slot.batch == len(self.batches) + 1
        assert np.isfinite(slot.columns.obs[""]).all()
        lags = (self.update - slot.updates_B).tolist()
        rewards = slot.columns.rewards_CT[:, 0].astype(int).tolist()
        places = range(0, len(slot.filled_B), WIDTH)
        self.batches.append(
            [
                (rewards[p] // 1000, rewards[p] % 1000, Version(1, int(slot.updates_B[p])))
                if slot.filled_B[p]
                else None
                for p in places
            ]
        )
        self.lags.append([lags[p] if slot.filled_B[p] else None for p in places])
        self.update += 1
        self.publish()
        self.settle(slot)
        return True

    def end_session(self, actor: SimulatedActor) -> None:
        """Its lease is over."""
        for peer in self.table:
            if peer.actor == actor.side.actor:
                self.sessions.lose(peer, "its lease is over")
        self.end_burst()

    def leave(self, actor: SimulatedActor) -> None:
        """It says goodbye."""
        self.take(actor, Bye(actor.side.session, 1))
        actor.is_dead = True

    def settle_down(self, moves: tuple[str, ...] = SimulatedActor.WORK) -> int:
        """Everybody who can moves until nobody can; how many updates there were.

        A simulation that can go on does so for ever, so this ends after some.
        """
        before = self.update
        for _ in range(MAX_ROUNDS):
            if self.update - before >= 12:
                break
            has_moved = [getattr(c, move)() for c in self.actors for move in moves]
            if not self.train() and not any(has_moved):
                break
        return self.update - before
