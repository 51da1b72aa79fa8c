"""Whole networks under a fake clock: whatever the wire does, no column is granted twice, no
trajectory comes in twice, every one is accounted for, and in the end every one is settled."""

import random

import pytest

from impala_async.wire.messages import Data, Grant, Hello, Spec, Welcome
from tests.wire.network import ALL_COLUMNS, BATCH_COLUMNS, Network

MAX_ACTORS = 4
MAX_MESSAGES = 200


# How often, on a wire that is bad but works.
STEPS = {
    "produce": 30,
    "pass_time": 20,
    "pause": 1,
    "deliver_in_order": 30,
    "deliver_out_of_order": 60,
    "lose": 6,
    "repeat": 6,
    "release": 10,
    "train": 4,
    "save": 2,
    "restart": 1,
    "hello_again": 1,
    "lose_an_actor": 1,
    "add_an_actor": 4,
}


class BadWire:
    """A network in which anything happens, in any order."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.network = Network()
        self.add_an_actor()

    def step(self):
        (name,) = self.rng.choices([*STEPS], [*STEPS.values()])
        getattr(self, name)()

    def actor(self):
        actors = [*self.network.actors.values()]
        return self.rng.choice(actors) if actors else None

    def produce(self):
        if actor := self.actor():
            for _ in range(self.rng.randint(1, 3)):
                actor.produce(self.rng.choice([0, 0, 0, 1, 2]))
            actor.tick()

    def pass_time(self, seconds=(0.2, 0.5, 1.0)):
        self.network.now += self.rng.choice(seconds)
        if len(seconds) > 2 or self.rng.random() < 0.5:
            self.network.learner.reap()
        for actor in self.network.actors.values():
            actor.tick()

    def pause(self):
        self.pass_time((5.0, 20.0))

    def deliver_in_order(self):
        for _ in range(min(self.rng.randint(1, 20), len(self.network.messages))):
            self.network.deliver()

    def deliver_out_of_order(self):
        if messages := self.network.messages:
            self.network.deliver(self.rng.randrange(len(messages)))

    def lose(self):
        if messages := self.network.messages:
            messages.pop(self.rng.randrange(len(messages)))

    def repeat(self):
        if 0 < len(self.network.messages) < MAX_MESSAGES:
            self.network.messages.append(self.rng.choice(self.network.messages))

    def release(self):
        self.network.learner.release(self.rng.randint(1, ALL_COLUMNS))

    def train(self):
        self.network.learner.train(self.rng.randint(1, 3))

    def save(self):
        self.network.checkpoint = self.network.learner.save()

    def restart(self):
        if self.rng.random() < 0.3:
            self.network.learner.say_bye()
            self.save()
        self.network.restart()

    def hello_again(self):
        if actor := self.actor():
            actor.actor.come_back(self.network.now)

    def lose_an_actor(self):
        if actor := self.actor():
            if self.rng.random() < 0.5:
                actor.leave()
            del self.network.actors[actor.name]

    def add_an_actor(self):
        if len(self.network.actors) < MAX_ACTORS:
            columns, streams = self.rng.randint(1, BATCH_COLUMNS), self.rng.randint(1, 2)
            self.network.add_actor(columns, streams)


@pytest.mark.parametrize("seed", range(12))
def test_a_long_life_on_a_bad_wire(seed):
    wire = BadWire(seed)
    network = wire.network
    num_admitted = num_rejected = 0
    for step in range(5000):
        learner = network.learner
        wire.step()
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
def test_what_is_lost_is_made_good_within_the_session(lost):
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
def test_a_greeting_that_is_lost_is_said_again(lost):
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
