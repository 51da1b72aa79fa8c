"""Lockstep without sockets, clocks or threads, and actors that pace themselves as `Client` does:
whatever the order of events, the same batches, and nobody stuck.

    batch b, from 0, is trained by update `first_update + b + 1`
"""

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from impala_async.metrics.report import merge
from impala_async.weights import NO_VERSION, Lineage, Version
from impala_async.wire import messages as wire
from impala_async.wire.actor_side import ActorSide
from impala_async.wire.messages import VERDICTS, Data, encode_data, unpack
from impala_async.wire.pulls import LONGEST_PAUSE_S, Pulls
from tests.learner.columns import planes_of, small_schema
from tests.learner.hand_actor import MODEL
from tests.learner.pure_learner import HandActor, PureLearner
from tests.learner.server_harness import check_identities

SCHEMA = small_schema()
WIDTH = 2


class SimulatedActor:
    """An actor whose next move the test chooses. `route` is empty when it is dead."""

    def __init__(self, simulation, identity):
        self.simulation, self.identity = simulation, identity
        self.acting = None
        self.number, self.num_acted, self.now = -1, 0, 0.0
        self.is_dead = self.is_turned_away = self.is_broken = False
        self.arrived = []
        self.side = ActorSide(identity.to_bytes(16, "big"))
        self.side.set_spec(SCHEMA, MODEL.digest, WIDTH, 1)

    @property
    def route(self):
        return b"" if self.is_dead else b"route-%d" % self.identity

    @property
    def is_at_work(self):
        return self.side.is_joined and not self.is_dead

    def hear(self, frames):
        message = unpack(bytes(frames[0]))
        if self.is_dead:
            return
        if isinstance(message, wire.Welcome):
            self.number = message.number
            self.side.accept(message, self.now, lockstep_lag=self.simulation.lag)
            times = {"heartbeat_s": 2.0, "reply_timeout_s": 10.0, "now": self.now}
            self.pulls = Pulls(message.session, have=NO_VERSION, layouts=(MODEL,), **times)
        elif isinstance(message, wire.Reject):
            self.is_turned_away = True
        elif isinstance(message, wire.WeightsReply | wire.NotModified):
            weights = self.pulls.take(message, list(frames), self.now)
            self.arrived += [weights.version] if weights else []
        elif self.side.has_session:
            self.side.take(message, self.now)
            self.pulls.name(self.side.named)

    # The moves: each is made if it can be, and says whether it was.

    def join(self):
        if self.side.is_joined or self.is_dead:
            return False
        self.is_turned_away = False
        self.simulation.take(self, self.side.handshake(self.now).hello)
        if self.is_turned_away:
            return False
        spec, schema = self.side.spec_frames()
        self.simulation.take(self, unpack(bytes(spec)), schema)
        return True

    def pull(self):
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

    def begin(self):
        """A trajectory boundary: all that is finished must be under way, then weights."""
        if not self.is_at_work or self.acting or self.side.outbox.num_unsent:
            return False
        if not self.side.keeps_weights():
            if not self.arrived:
                return False
            self.side.act_with(self.arrived.pop(0))
        self.acting = self.side.version
        return True

    def finish(self):
        if self.acting is None or self.is_dead or len(self.side.outbox) > 2:
            return False
        acted, self.acting = self.acting, None
        self.num_acted += self.side.put((self.identity, self.num_acted, acted))
        return True

    def send(self):
        """The first that has credit; it may be damaged."""
        one = self.side.outbox.sendable() if self.is_at_work else None
        if one is None:
            return False
        self.side.outbox.mark_sent(one[0], self.now)
        self.simulation.take_data(self, *one)
        return True

    def beat(self):
        """How it finds out that its session is over: what it holds is given up."""
        is_over = self.is_at_work and self.simulation.table.peer_of(self.side.session) is None
        if is_over:
            self.lose()
        return is_over

    def lose(self):
        self.side.lose()
        self.arrived.clear()

    WORK = ("pull", "begin", "finish", "send")
    MOVES = ("join", "beat", *WORK)


MAX_ROUNDS = 1000


class LockstepSimulation(PureLearner):
    """The learner's side, and everybody who talks to it."""

    def __init__(self, num_actors, lag, *, first_update=0, stops_at_loss=False):
        self.num_actors, self.lag, self.num_losses = num_actors, lag, 0
        self.batches, self.lags, self.returns = [], [], []
        self.actors = []
        epoch = 1 if first_update == 0 else 2
        super().__init__(
            SCHEMA,
            columns=num_actors * WIDTH,
            lineage=Lineage(epoch - 1).resumed(epoch, first_update),
            num_actors=num_actors,
            lag=lag,
            on_loss=self._note_loss if stops_at_loss else None,
        )

    def add_actors(self, num_actors=None):
        first = 1 + len(self.actors)
        new = [SimulatedActor(self, first + n) for n in range(num_actors or self.num_actors)]
        self.actors += new
        self.listeners |= {actor.route: actor.hear for actor in new}
        return new

    def _note_loss(self):
        self.num_losses += 1
        self.admission.close()

    def take(self, actor, message, *rest):
        self.hear(actor.route, message, *rest)
        self.end_burst()

    def take_get(self, actor, get):
        if not actor.beat():
            self.hear_pull(actor.route, get)

    def take_data(self, actor, seq, trajectory):
        """Take a trajectory whose rewards say which it is, so that a slot shows what lies where."""
        if actor.beat():
            return
        number, acted, version = trajectory
        planes = planes_of(SCHEMA, WIDTH, seed=number * 1000 + acted)
        planes.columns.rewards_CT[:] = number * 1000 + acted
        if actor.is_broken:
            planes.columns.obs[""][0, 1] = np.nan
        header = Data(actor.side.session, seq, *version, SCHEMA.rows, WIDTH, 0, 0, None)
        episodes = [(float(actor.number), acted + 1)]
        (frame,) = encode_data(header, planes.obs, planes.small, episodes)
        self.hear_frames(actor.route, frame)
        self.end_burst()

    def end_burst(self):
        super().end_burst()
        self.check()

    def check(self):
        """Check what must hold at any moment."""
        assert self.table.outstanding_columns <= self.filler.free_columns
        check_identities(self.ledger.report())
        assert 0 <= self.ledger.in_slots <= len(self.slots) * self.num_actors * WIDTH

    def train(self):
        """The update of the oldest full slot, as the learner thread tells of it."""
        if not self.full:
            return False
        slot = self.full.pop(0)
        assert slot.batch == len(self.batches) + 1
        assert np.isfinite(slot.columns.obs[""]).all()
        lags = (self.update - slot.updates_B).tolist()
        rewards = slot.columns.rewards_CT[:, 0].astype(int).tolist()
        places = range(0, len(slot.filled_B), WIDTH)
        sent = [
            (rewards[p] // 1000, rewards[p] % 1000, Version(1, int(slot.updates_B[p])))
            for p in places
        ]
        filled = slot.filled_B[::WIDTH]
        self.batches.append([t if here else None for t, here in zip(sent, filled, strict=True)])
        self.returns.append([*slot.returns])
        self.lags.append([lags[p] if slot.filled_B[p] else None for p in places])
        self.update += 1
        self.publish()
        self.settle(slot)
        return True

    def end_session(self, actor):
        """Its lease is over."""
        for peer in self.table:
            if peer.actor == actor.side.actor:
                self.sessions.lose(peer, "its lease is over")
        self.end_burst()

    def leave(self, actor):
        """It says goodbye."""
        self.take(actor, wire.Bye(actor.side.session, 1))
        actor.is_dead = True

    def settle_down(self, moves=SimulatedActor.WORK):
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


LAGS = pytest.mark.parametrize("lag", [0, 1])


def at_work(num_actors, lag, num_joined=0, **settings):
    """All have joined, or so many, and work until nobody can go on, or for a while."""
    simulation = LockstepSimulation(num_actors, lag, **settings)
    for actor in simulation.add_actors()[: num_joined or num_actors]:
        actor.join()
    simulation.settle_down()
    return simulation


# -------------------- all are there: any order of events gives the same batches


def play(simulation, random, num_updates):
    """Make random moves of those that can be made, until there were so many updates."""
    moves = [getattr(actor, move) for actor in simulation.actors for move in SimulatedActor.MOVES]
    while len(simulation.batches) < num_updates:
        random.shuffle(moves)
        has_moved = [move() for move in [*moves[: random.randint(1, len(moves))], simulation.train]]
        assert any(has_moved) or any(move() for move in moves) or simulation.train(), "stuck"


@settings(deadline=None, max_examples=40)
@given(st.sampled_from([0, 1]), st.integers(1, 4), st.integers(0, 2**32))
def test_any_order_of_events_gives_the_same_batches(lag, num_actors, seed):
    simulation = LockstepSimulation(num_actors, lag)
    # Numbers go by arrival: here always the same, as the places are compared.
    for actor in simulation.add_actors():
        actor.join()
    play(simulation, Random(seed), 6)
    numbers = range(num_actors)
    versions = [max(0, batch - lag) for batch in range(6)]
    batches = [[(1 + r, b, Version(1, versions[b])) for r in numbers] for b in range(6)]
    assert simulation.batches[:6] == batches
    # Only the first batch cannot have a lag.
    assert simulation.lags[:6] == [[min(lag, b)] * num_actors for b in range(6)]
    episodes = [(float(r), b + 1) for b in range(6) for r in numbers]
    assert simulation.episodes[: len(episodes)] == episodes
    # A batch tells of its own, however few are counted by then.
    assert simulation.returns[:6] == [[float(r) for r in numbers]] * 6


def test_what_is_complete_at_the_end_but_not_trained_is_not_counted():
    simulation = LockstepSimulation(2, lag=1)
    for actor in simulation.add_actors():
        actor.join()
    while len(simulation.full) < 2:
        for actor in simulation.actors:
            for move in SimulatedActor.MOVES:
                getattr(actor, move)()
    assert len(simulation.episodes) == 2
    # The learner thread reaches its limit with the first, and says so before its version is out.
    simulation.admission.close()
    simulation.update += 1
    simulation.publish()
    assert len(simulation.episodes) == 2


# -------------------- places that stay empty


def test_a_refused_message_leaves_its_place_empty_and_cannot_spoil_the_update():
    learner = PureLearner(SCHEMA, columns=2 * WIDTH, num_actors=2)
    good, bad = (HandActor(learner, WIDTH).join() for _ in range(2))
    learner.end_burst()
    spoiled = planes_of(SCHEMA, WIDTH)
    spoiled.obs.fill(0xFF)
    bad.send(spoiled)
    good.send(episodes=[(0.0, 1)])
    (slot,) = learner.full
    assert slot.filled_B.tolist() == [True, True, False, False]
    # Empty columns go through the network with the rest.
    assert not slot.obs[WIDTH:].any()
    assert not slot.small[WIDTH:].any()
    assert learner.episodes == [(0.0, 1)]
    # Both go on with the batch after that, where another width leaves a place empty, too.
    learner.update += 1
    learner.publish()
    learner.settle(learner.full.pop())
    assert bad.say(bad.header(columns=WIDTH - 1, update=1)) == "wrong_size"
    good.send(update=1)
    assert [slot.batch for slot in learner.full] == [2]
    assert slot.filled_B.tolist() == [True, True, False, False]


# -------------------- who is waited for


def waits(simulation):
    report = merge(simulation.filler.report())
    return report["lockstep/num_done"], report["lockstep/waits_for"]


def test_whose_places_are_empty_is_reported():
    simulation = LockstepSimulation(6, lag=1)
    actors = simulation.add_actors()
    assert waits(simulation) == (
        0,
        "actor 0 (not joined), actor 1 (not joined), actor 2 (not joined) and 3 more",
    )
    for actor in actors[:5]:
        actor.join()
    assert waits(simulation) == (0, "actor 5 (not joined), actor 0, actor 1 and 3 more")
    actors[5].join()
    silent = actors[0]
    assert silent.number == 0
    simulation.actors = actors[1:]
    simulation.settle_down()
    assert waits(simulation) == (5, "actor 0")
    # Who is gone is waited for no more.
    simulation.leave(silent)
    assert "actor 0" not in str(waits(simulation))


# -------------------- versions


@LAGS
def test_each_message_has_one_version_and_another_leaves_its_place_empty(lag):
    lineage = Lineage(1).resumed(2, 40)
    learner = PureLearner(SCHEMA, columns=2 * WIDTH, num_actors=2, lag=lag, lineage=lineage)
    actors = [HandActor(learner, WIDTH).join() for _ in range(2)]
    learner.end_burst()
    for number in range(4):
        assert actors[0].granted == actors[0].seq + 1 + lag
        for actor in actors:
            actor.send(update=40 + max(0, number - lag))
        learner.update += 1
        learner.publish()
        learner.settle(learner.full.pop())
    wanted = 44 - lag
    peer = learner.table.peer_of(actors[0].session)
    updates = (wanted - 1, wanted, wanted + 1)
    verdicts = [learner.filler.judge(peer, Version(2, update)) for update in updates]
    assert verdicts == ["stale", None, "invalid"]
    actors[0].send(update=wanted)
    actors[1].send(update=wanted - 1)
    assert actors[1].verdicts == [[4, VERDICTS.index("stale")]]
    (slot,) = learner.full
    assert slot.filled_B.tolist() == [True, True, False, False]


def test_who_runs_something_else_does_not_fit_and_a_third_is_not_needed():
    learner = PureLearner(SCHEMA, num_actors=2)
    for columns, streams in ((1, 1), (WIDTH, 2)):
        other = HandActor(learner, columns).join(streams)
        assert "pace.mode lockstep wants one message of 2 columns" in other.rejects[0].text
    for _ in range(2):
        HandActor(learner, WIDTH).join()
    third = HandActor(learner, WIDTH).join()
    assert "already has its 2 actors" in third.rejects[0].text


# -------------------- who is lost, and who comes


@LAGS
def test_the_first_batch_waits_for_everybody_and_one_that_dies_before_is_replaced(lag):
    simulation = at_work(2, lag, num_joined=1)
    first, late = simulation.actors
    assert simulation.batches == []
    first.is_dead = True
    simulation.end_session(first)
    late.join()
    # It waits for a second one, though the dead one has sent something.
    assert simulation.settle_down() <= 1 + lag
    assert simulation.settle_down() == 0
    (other,) = simulation.add_actors(1)
    # A session that never says what it runs is nobody.
    (mute,) = simulation.add_actors(1)
    simulation.take(mute, mute.side.handshake(0.0).hello)
    assert simulation.settle_down() == 0
    other.join()
    assert {late.number, other.number} == {0, 1}
    assert simulation.settle_down() >= 12
    assert all(all(batch) for batch in simulation.batches)


@LAGS
@pytest.mark.parametrize("how", ["dies", "leaves"])
@pytest.mark.parametrize("num_trained", [0, 1])
def test_a_lost_one_is_waited_for_until_its_session_ends_and_may_come_back(lag, how, num_trained):
    simulation = at_work(3, lag)
    lost = simulation.actors[1]
    if how == "leaves":
        simulation.leave(lost)
    else:
        lost.is_dead = True
        assert simulation.settle_down() <= 1 + lag
        assert simulation.settle_down() == 0
        simulation.end_session(lost)
    for _ in range(num_trained):
        assert simulation.settle_down() >= 12
        assert [trajectory is None for trajectory in simulation.batches[-1]] == [False, True, False]
        assert simulation.lags[-1] == [lag, None, lag]
    (back,) = simulation.add_actors(1)
    assert back.join()
    assert back.number == lost.number
    before = len(simulation.batches)
    assert simulation.settle_down() >= 12
    again = [n for n, batch in enumerate(simulation.batches) if batch[1] and n >= before]
    assert again == list(range(again[0], len(simulation.batches)))
    assert [simulation.lags[number][1] for number in again[:3]] == [0, lag, lag]
    assert simulation.ledger.report()["trajectories/rejected"] == 0


def test_one_that_comes_and_goes_fills_no_log(caplog):
    simulation = at_work(2, 0)
    lost = simulation.actors[1]
    for _ in range(30):
        lost.is_dead = True
        simulation.end_session(lost)
        (lost,) = simulation.add_actors(1)
        assert lost.join()
    assert sum("going on without actors [1]" in told for told in caplog.messages) == 1


@LAGS
def test_before_all_have_been_there_a_loss_ends_nothing(lag):
    simulation = at_work(3, lag, 2, stops_at_loss=True)
    lost = simulation.actors[1]
    lost.is_dead = True
    simulation.settle_down()
    simulation.end_session(lost)
    assert (simulation.num_losses, simulation.batches) == (0, [])
    for actor in simulation.add_actors(2):
        assert actor.join()
    assert simulation.settle_down() >= 12
    assert all(simulation.batches[1])


@LAGS
def test_a_loss_that_ends_the_run_ends_it_as_it_is(lag, caplog):
    simulation = at_work(3, lag, stops_at_loss=True)
    lost = simulation.actors[1]
    lost.is_dead = True
    simulation.settle_down()
    num_batches = len(simulation.batches)
    simulation.end_session(lost)
    # The others were all that was left to wait for; their batch is given up all the same.
    assert (simulation.num_losses, simulation.full) == (1, [])
    assert caplog.messages[-1] == "lockstep: the session of actors [1] has ended (pace.on_loss)"
    assert (len(simulation.batches), simulation.ledger.in_slots) == (num_batches, 0)
    report = simulation.ledger.report()
    assert report["dropped/shutdown"] == report["trajectories/dropped"] > 0


# -------------------- and all of it in any order


def mishap(simulation, actor, what):
    if what in ("dies", "is replaced"):
        actor.is_dead = True
    if what in ("is over", "is replaced"):
        simulation.end_session(actor)
    if what == "is replaced":
        simulation.add_actors(1)
    if what == "is lost" and actor.side.is_joined:
        actor.lose()
    if what in ("breaks", "is mended"):
        actor.is_broken = what == "breaks"


MISHAPS = ("dies", "is over", "is replaced", "is lost", "breaks", "is mended", "is mended")


@settings(deadline=None, max_examples=50)
@given(st.sampled_from([0, 1]), st.integers(1, 4), st.integers(0, 2**32))
def test_whatever_happens_nobody_waits_for_ever(lag, num_actors, seed):
    """Actors come, die, lose their session, send what is refused and come back, in any order;
    then it is quiet, and whoever is left trains."""
    random = Random(seed)
    simulation = LockstepSimulation(num_actors, lag, first_update=random.choice([0, 7]))
    simulation.add_actors()
    for _ in range(random.randint(20, 250)):
        actor = random.choice(simulation.actors)
        if random.random() < 0.1:
            mishap(simulation, actor, random.choice(MISHAPS))
        elif random.random() < 0.2:
            simulation.train()
        else:
            getattr(actor, random.choice(SimulatedActor.MOVES))()
        simulation.check()
    for actor in simulation.actors:
        if actor.is_dead:
            simulation.end_session(actor)
    num_alive = sum(not actor.is_dead for actor in simulation.actors)
    if num_alive < num_actors:
        simulation.add_actors(num_actors - num_alive)
    simulation.settle_down(SimulatedActor.MOVES)
    assert simulation.settle_down(SimulatedActor.MOVES) >= 12, "stuck"
    for lags in simulation.lags:
        assert all(found is None or 0 <= found <= lag for found in lags)
    assert (
        len({c.number for c in simulation.actors if c.side.is_joined and not c.is_dead})
        == num_actors
    )
    last = simulation.batches[-1]
    assert simulation.lags[-1] == [lag if last[number] else None for number in range(num_actors)]


# -------------------- who is late


def cuts(learner, update):
    """Whom a cut is told, and the seq."""
    told = [wire.unpack(answer.frames[0]) for answer in learner.sessions.cut(update)]
    return [(grant.session, grant.cut) for grant in told]


def test_whoever_is_late_is_told_the_seq_to_cut_once_and_others_are_not():
    learner = PureLearner(SCHEMA, columns=3 * WIDTH, num_actors=3)
    early, late, later = actors = [HandActor(learner, WIDTH).join() for _ in range(3)]
    assert cuts(learner, 0) == []  # nobody has come to the weights port
    for actor in actors:
        actor.pull(wire.Heartbeat(actor.session, {}))
    assert [actor.grants[-1].cut for actor in actors] == [0, 0, 0]
    early.send()
    late.send()
    learner.end_burst()
    # It was told, with the answer to its heartbeat, and that is enough.
    assert cuts(learner, 0) == []
    later.send(num_cut=2)
    learner.end_burst()
    assert merge(learner.filler.report())["lockstep/rows_cut"] == 2 * WIDTH
    # The batch is complete: a word that others wait for it comes too late.
    assert cuts(learner, 0) == []
    learner.settle(learner.full.pop())
    learner.update += 1
    learner.publish()
    late.send(update=1)
    assert cuts(learner, 1) == [(early.session, 1), (later.session, 1)]
    assert cuts(learner, 1) == []
    # A goodbye is on its way.
    learner.sessions.is_closing = True
    assert cuts(learner, 1) == []


@settings(deadline=None, max_examples=40)
@given(st.sampled_from([0, 1]), st.integers(1, 4), st.integers(0, 2**32))
def test_a_cut_is_told_for_the_batch_that_is_waited_for_and_no_other(lag, num_actors, seed):
    simulation, num_told = LockstepSimulation(num_actors, lag), 0
    for actor in simulation.add_actors():
        actor.join()
    of_session = {actor.side.session: actor.side.outbox for actor in simulation.actors}
    train = simulation.train

    def cut_and_train():
        nonlocal num_told
        for session, cut in cuts(simulation, simulation.update):
            # As nobody is lost, the seqs of an actor are the numbers of batches.
            assert cut == simulation.update
            outbox = of_session[session]
            assert outbox.next_seq - outbox.num_unsent <= cut
            num_told += 1
        return train()

    simulation.train = cut_and_train
    play(simulation, Random(seed), 6)
    assert num_told > 0


def test_a_late_one_of_a_resumed_run_is_told_too_and_without_lockstep_nobody_is():
    lineage = Lineage(1).resumed(2, 40)
    learner = PureLearner(SCHEMA, columns=WIDTH, num_actors=1, lineage=lineage)
    actor = HandActor(learner, WIDTH).join()
    actor.pull(wire.Heartbeat(actor.session, {}))
    assert cuts(learner, 0) == []
    assert cuts(learner, 40) == [(actor.session, 0)]
    free = PureLearner(SCHEMA)
    actor = HandActor(free).join()
    actor.pull(wire.Heartbeat(actor.session, {}))
    assert cuts(free, 0) == []
