"""Whole networks under a fake clock: whatever the wire does, no column is granted twice, no
trajectory comes in twice, every one is accounted for, and in the end every one is settled."""

import random
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from impala_async.wire.messages import Data, Grant, Hello, Spec, Welcome
from tests.wire.fakes import ALL_COLUMNS, BATCH_COLUMNS, FakeActor
from tests.wire.network import Network

MAX_ACTORS = 4
MAX_MESSAGES = 200

any_index = st.integers(0, 10_000)
shapes = st.tuples(st.integers(1, BATCH_COLUMNS), st.integers(1, 2))


class NetworkMachine(RuleBasedStateMachine):
    """Everything that can happen, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.network = Network()

    def actor(self, index: int) -> FakeActor:
        actors = list(self.network.actors.values())
        return actors[index % len(actors)]

    def has_actors(self) -> bool:
        return bool(self.network.actors)

    def has_messages(self) -> bool:
        return bool(self.network.messages)

    @initialize(shapes=st.lists(shapes, min_size=1, max_size=3))
    def actors_come(self, shapes: list[tuple[int, int]]) -> None:
        for shape in shapes:
            self.network.add_actor(*shape)

    @precondition(has_actors)
    @rule(index=any_index, fault=st.sampled_from([0, 0, 0, 1, 2]), times=st.integers(1, 3))
    def produce(self, index: int, fault: int, times: int) -> None:
        for _ in range(times):
            self.actor(index).produce(fault)
        self.actor(index).tick()

    @rule(seconds=st.sampled_from([0.3, 1.0, 2.5, 5.0, 30.0]), is_learner_awake=st.booleans())
    def time_passes(self, seconds: float, is_learner_awake: bool) -> None:
        self.network.now += seconds
        if is_learner_awake:
            self.network.learner.reap()
        for actor in self.network.actors.values():
            actor.tick()

    @precondition(has_messages)
    @rule(times=st.integers(1, 20))
    def deliver_in_order(self, times: int) -> None:
        for _ in range(min(times, len(self.network.messages))):
            self.network.deliver()

    @precondition(has_messages)
    @rule(index=any_index)
    def deliver_out_of_order(self, index: int) -> None:
        self.network.deliver(index % len(self.network.messages))

    @precondition(has_messages)
    @rule(index=any_index)
    def lose(self, index: int) -> None:
        self.network.messages.pop(index % len(self.network.messages))

    @precondition(lambda self: 0 < len(self.network.messages) < MAX_MESSAGES)
    @rule(index=any_index)
    def repeat(self, index: int) -> None:
        messages = self.network.messages
        messages.append(messages[index % len(messages)])

    @rule(columns=st.integers(1, ALL_COLUMNS))
    def release(self, columns: int) -> None:
        self.network.learner.release(columns)

    @rule(updates=st.integers(1, 3))
    def train(self, updates: int) -> None:
        self.network.learner.train(updates)

    @rule()
    def save(self) -> None:
        self.network.checkpoint = self.network.learner.save()

    @rule(is_orderly=st.booleans())
    def restart(self, is_orderly: bool) -> None:
        if is_orderly:
            self.network.learner.say_bye()
            self.save()
        self.network.restart()

    @precondition(has_actors)
    @rule(index=any_index)
    def hello_again(self, index: int) -> None:
        self.actor(index).come_back()

    @precondition(has_actors)
    @rule(index=any_index, is_orderly=st.booleans())
    def lose_an_actor(self, index: int, is_orderly: bool) -> None:
        actor = self.actor(index)
        if is_orderly:
            actor.leave()
        del self.network.actors[actor.name]

    @precondition(lambda self: len(self.network.actors) < MAX_ACTORS)
    @rule(shape=shapes)
    def an_actor_comes(self, shape: tuple[int, int]) -> None:
        self.network.add_actor(*shape)

    @rule()
    def the_wire_works_for_a_while(self) -> None:
        self.network.settle_everything()

    @invariant()
    def accounts_agree(self) -> None:
        self.network.check()

    def teardown(self) -> None:
        self.network.settle_everything()


def test_any_network() -> None:
    run_state_machine_as_test(
        NetworkMachine,
        settings=settings(
            max_examples=150,
            stateful_step_count=60,
            deadline=None,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )


def random_step(network: Network, rng: random.Random) -> None:
    """One of the machine's rules, by its weight in a network that is bad but works."""
    machine = NetworkMachine.__new__(NetworkMachine)
    machine.network = network
    actors, messages = network.actors, network.messages
    index = rng.randrange(10_000)
    steps: list[tuple[int, bool, Callable[[], None]]] = [
        (30, bool(actors), lambda: machine.produce(index, rng.choice([0, 0, 0, 1, 2]), 1)),
        (20, True, lambda: machine.time_passes(rng.choice([0.2, 0.5, 1.0]), True)),
        (1, True, lambda: machine.time_passes(rng.choice([5.0, 20.0]), rng.random() < 0.5)),
        (30, bool(messages), lambda: machine.deliver_in_order(5)),
        (60, bool(messages), lambda: machine.deliver_out_of_order(index)),
        (6, bool(messages), lambda: machine.lose(index)),
        (6, 0 < len(messages) < MAX_MESSAGES, lambda: machine.repeat(index)),
        (10, True, lambda: machine.release(rng.randint(1, ALL_COLUMNS))),
        (4, True, lambda: machine.train(1)),
        (2, True, machine.save),
        (1, True, lambda: machine.restart(rng.random() < 0.3)),
        (1, bool(actors), lambda: machine.hello_again(index)),
        (1, bool(actors), lambda: machine.lose_an_actor(index, rng.random() < 0.5)),
        (4, len(actors) < MAX_ACTORS, lambda: machine.an_actor_comes((1 + index % 6, 1))),
    ]
    possible = [(weight, step) for weight, is_possible, step in steps if is_possible]
    rng.choices([step for _, step in possible], [weight for weight, _ in possible])[0]()


@pytest.mark.parametrize("seed", range(8))
def test_a_long_life_on_a_bad_wire(seed: int) -> None:
    rng, network = random.Random(seed), Network()
    num_admitted = num_rejected = 0
    for step in range(5000):
        learner = network.learner
        random_step(network, rng)
        network.check()
        if step % 150 == 149:
            network.settle_everything()
        if network.learner is not learner:
            num_admitted += learner.num_admitted
            num_rejected += learner.rejected.total()
    # It was bad, but not so bad that nothing was tested.
    assert num_admitted > 200
    assert num_rejected > 200


@pytest.mark.parametrize("lost", [Data, Grant])
def test_what_is_lost_is_made_good_within_the_session(lost: type) -> None:
    network = Network()
    actor = network.add_actor(columns=2, streams=1)
    for _ in range(20):
        network.work()
    assert actor.side.is_joined
    session = actor.side.session
    assert network.work(lost) > 0
    assert len(actor.outbox) > 0
    network.settle_everything()
    assert actor.side.session == session


@pytest.mark.parametrize("lost", [Hello, Welcome, Spec])
def test_a_greeting_that_is_lost_is_said_again(lost: type) -> None:
    network = Network()
    network.add_actor(columns=2, streams=1)
    num_lost = 0
    while num_lost < 2:
        num_lost += network.work(lost)
        assert network.now < 20.0
    assert network.learner.num_admitted == 0
    while network.learner.num_admitted == 0:
        network.work()
        assert network.now < 20.0
