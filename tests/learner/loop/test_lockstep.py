"""Lockstep without a clock: whatever the order of events, the same batches, and nobody stuck."""

from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from impala_async.errors import ProtocolError
from impala_async.learner.loop.lockstep import LockstepFiller
from impala_async.learner.slots import Arrival, Episodes, Slot, allocate_slots
from impala_async.metrics.report import merge
from impala_async.weights import Lineage, Version
from impala_async.wire.codec import EPISODE
from impala_async.wire.messages import VERDICTS
from tests.learner.columns import planes_of, room
from tests.learner.lockstep_simulation import SCHEMA, WIDTH, LockstepSimulation, SimulatedActor
from tests.learner.pure_learner import HandActor, PureLearner

LAGS = pytest.mark.parametrize("lag", [0, 1])


def at_work(num_ranks: int, lag: int, num_joined: int = 0, **settings: Any) -> LockstepSimulation:
    """All have joined, or so many, and work until nobody can go on, or for a while."""
    simulation = LockstepSimulation(num_ranks, lag, **settings)
    for actor in simulation.add_actors()[: num_joined or num_ranks]:
        actor.join()
    simulation.settle_down()
    return simulation


# -------------------- all are there: any order of events gives the same batches


def play(simulation: LockstepSimulation, random: Random, num_updates: int) -> None:
    """Whoever can move does so in a random order, until there were so many updates."""
    moves = [getattr(actor, move) for actor in simulation.actors for move in SimulatedActor.MOVES]
    while len(simulation.batches) < num_updates:
        random.shuffle(moves)
        has_moved = [move() for move in [*moves[: random.randint(1, len(moves))], simulation.train]]
        assert any(has_moved) or any(move() for move in moves) or simulation.train(), "stuck"


def story(lag: int, num_ranks: int, seed: int) -> tuple[object, ...]:
    simulation = LockstepSimulation(num_ranks, lag)
    actors = simulation.add_actors()
    # Ranks go by arrival: here always the same, as the places are compared.
    for actor in actors:
        actor.join()
    play(simulation, Random(seed), 6)
    first = actors[0].number
    batches = [[t and (t[0] - first, *t[1:]) for t in batch] for batch in simulation.batches[:6]]
    return batches, simulation.lags[:6], simulation.episodes[: 6 * num_ranks]


@settings(deadline=None, max_examples=40)
@given(st.sampled_from([0, 1]), st.integers(1, 4), st.integers(0, 2**32))
def test_any_order_of_events_gives_the_same_batches(lag, num_ranks, seed):
    batches, lags, episodes = story(lag, num_ranks, seed)
    ranks = range(num_ranks)
    versions = [max(0, batch - lag) for batch in range(6)]
    assert batches == [[(r, b, Version(1, versions[b])) for r in ranks] for b in range(6)]
    # Only the first batch cannot have a lag.
    assert lags == [[min(lag, b)] * num_ranks for b in range(6)]
    assert episodes == [(float(r), b + 1) for b in range(6) for r in ranks]


class Shelf:
    """A filler that everybody has joined, with nobody to give credit to."""

    def __init__(self, num_ranks: int = 2, lag: int = 0, num_slots: int = 3) -> None:
        self.slots = allocate_slots(SCHEMA, num_ranks * WIDTH, num_slots)
        self.submitted: list[Slot] = []
        self.episodes: list[float] = []
        self.filler = LockstepFiller(
            self._count, num_ranks=num_ranks, width=WIDTH, lag=lag, first_update=0, on_loss=None
        )
        self.filler.open(self.slots, self.submitted.append)

    def _count(self, episodes: Episodes) -> None:
        self.episodes += episodes["total"].tolist()

    def put(self, rank: int, number: int = 0) -> None:
        arrival = self.room(rank)
        planes = planes_of(SCHEMA, WIDTH, seed=100 * number + rank)
        arrival.obs[:], arrival.small[:] = planes.obs, planes.small
        episodes = np.array([(rank + 10 * number, 1)], EPISODE)
        self.filler.commit([arrival._replace(episodes=episodes)])

    def room(self, rank: int, columns: int = WIDTH) -> Arrival:
        arrival = room(self.filler, columns, rank)
        assert arrival is not None
        return arrival


def test_observations_are_received_in_place_and_of_one_width():
    shelf = Shelf()
    for _ in range(2):
        # To ask takes nothing: the same place again.
        assert np.shares_memory(shelf.room(1).obs, shelf.slots[0].obs[WIDTH:])
    for columns in (1, 3):
        with pytest.raises(ProtocolError, match=f"{columns} columns, in lockstep an actor has 2"):
            shelf.room(0, columns)


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
    shelf = Shelf()
    shelf.put(0)
    arrival = shelf.room(1)
    arrival.obs.reshape(-1).view(np.float32)[:] = np.nan
    arrival.small.fill(0xFF)
    shelf.filler.skip(arrival.peer)
    (slot,) = shelf.submitted
    assert slot.filled_B.tolist() == [True, True, False, False]
    # Empty columns go through the network with the rest.
    assert not slot.obs[WIDTH:].any()
    assert not slot.small[WIDTH:].any()
    assert shelf.episodes == [0]
    # Both go on with the batch after that.
    shelf.filler.release(0)
    shelf.put(1, 1)
    shelf.put(0, 1)
    assert [slot.batch for slot in shelf.submitted] == [1, 2]
    assert shelf.submitted[1].filled_B.all()


# -------------------- who is waited for


def waits(simulation: LockstepSimulation) -> tuple[object, object]:
    report = simulation.filler.report()
    merge(report)
    return report["lockstep/num_done"], report["lockstep/waits_for"]


@LAGS
def test_whose_places_are_empty_is_reported(lag):
    simulation = LockstepSimulation(6, lag)
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
    assert silent.rank == 0
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
    learner = PureLearner(SCHEMA, columns=2 * WIDTH, num_ranks=2, lag=lag, lineage=lineage)
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
    assert peer is not None
    updates = (wanted - 1, wanted, wanted + 1)
    verdicts = [learner.filler.judge(peer, Version(2, update)) for update in updates]
    assert verdicts == ["stale", None, "invalid"]
    actors[0].send(update=wanted)
    actors[1].send(update=wanted - 1)
    assert actors[1].verdicts == [[4, VERDICTS.index("stale")]]
    (slot,) = learner.full
    assert slot.filled_B.tolist() == [True, True, False, False]


def test_who_runs_something_else_does_not_fit_and_a_third_is_not_needed():
    learner = PureLearner(SCHEMA, num_ranks=2)
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
    first.die()
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
    assert {late.rank, other.rank} == {0, 1}
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
        lost.die()
        assert simulation.settle_down() <= 1 + lag
        assert simulation.settle_down() == 0
        simulation.end_session(lost)
    for _ in range(num_trained):
        assert simulation.settle_down() >= 12
        assert [trajectory is None for trajectory in simulation.batches[-1]] == [False, True, False]
        assert simulation.lags[-1] == [lag, None, lag]
    (back,) = simulation.add_actors(1)
    assert back.join()
    assert back.rank == lost.rank
    before = len(simulation.batches)
    assert simulation.settle_down() >= 12
    again = [n for n, batch in enumerate(simulation.batches) if batch[1] and n >= before]
    assert again == list(range(again[0], len(simulation.batches)))
    assert [simulation.lags[number][1] for number in again[:3]] == [0, lag, lag]
    assert simulation.ledger.report()["trajectories/rejected"] == 0


@LAGS
@pytest.mark.parametrize("num_joined", [3, 2])
def test_a_loss_that_ends_the_run_ends_it_as_it_is(lag, num_joined, caplog):
    simulation = at_work(3, lag, num_joined, stops_at_loss=True)
    lost = simulation.actors[1]
    lost.die()
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


def mishap(simulation: LockstepSimulation, actor: SimulatedActor, what: str) -> None:
    if what in ("dies", "is replaced"):
        actor.die()
    if what in ("is over", "is replaced"):
        simulation.end_session(actor)
    if what == "is replaced":
        simulation.add_actors(1)
    if what == "is lost" and actor.side.is_joined:
        actor.lose()
    if what in ("breaks", "is mended"):
        actor.reason_to_refuse = "bad" if what == "breaks" else ""


MISHAPS = ("dies", "is over", "is replaced", "is lost", "breaks", "is mended", "is mended")


@settings(deadline=None, max_examples=50)
@given(st.sampled_from([0, 1]), st.integers(1, 4), st.integers(0, 2**32))
def test_whatever_happens_nobody_waits_for_ever(lag, num_ranks, seed):
    """Actors come, die, lose their session, send what is refused and come back, in any order;
    then it is quiet, and whoever is left trains."""
    random = Random(seed)
    simulation = LockstepSimulation(num_ranks, lag, first_update=random.choice([0, 7]))
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
    if num_alive < num_ranks:
        simulation.add_actors(num_ranks - num_alive)
    simulation.settle_down(SimulatedActor.MOVES)
    assert simulation.settle_down(SimulatedActor.MOVES) >= 12, "stuck"
    for lags in simulation.lags:
        assert all(found is None or 0 <= found <= lag for found in lags)
    assert (
        len({c.rank for c in simulation.actors if c.side.is_joined and not c.is_dead}) == num_ranks
    )
    last = simulation.batches[-1]
    assert simulation.lags[-1] == [lag if last[rank] else None for rank in range(num_ranks)]
