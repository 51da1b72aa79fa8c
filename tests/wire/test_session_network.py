"""Whole networks under a fake clock: a learner without sockets, actors, and a wire that loses,
repeats, delays and reorders what is on it. No column is granted twice then, no trajectory comes in
twice, every one is accounted for, and in the end every one is settled.
"""

import itertools
import json
import random
from collections import Counter

import numpy as np
import pytest

from impala_async.errors import ProtocolError
from impala_async.weights import NO_VERSION, Lineage, Version
from impala_async.wire.messages import Data, Grant, Heartbeat, encode_data, pack, unpack
from impala_async.wire.peer import WINDOW
from impala_async.wire.session import reject
from tests.learner.columns import planes_of, small_schema
from tests.learner.hand_actor import MODEL
from tests.learner.pure_learner import PureLearner
from tests.wire.pure_actor import PureActor

MAX_LAG = 4
BATCH_COLUMNS, NUM_SLOTS = 6, 3
MAX_ACTORS = 4
MAX_MESSAGES = 200
SCHEMA = small_schema()
# Where a message goes, and where its answer: to the data port, or to that of the weights.
DATA, WEIGHTS = b"d", b"w"
FAULTS = {"nonfinite": np.nan, "invalid": 1.0, "": -1.0}


class Actor:
    """An actor whose trajectories are (version, fault)."""

    def __init__(self, network, name, columns, streams):
        self.network, self.name, self.columns = network, name, columns
        self.num_buffers, self.planes = streams * (WINDOW + 1), planes_of(SCHEMA, columns)
        self.actor = PureActor(
            *(name, SCHEMA, MODEL.digest, columns),
            streams=streams,
            say=lambda frames: network.say(DATA + name, frames),
            encode=self.encode,
            now=network.now,
        )
        self.side, self.version, self.beat_at = self.actor.side, NO_VERSION, 0.0

    def produce(self, fault=""):
        """Unroll a trajectory, if there is a buffer for it and there are weights."""
        if self.version != NO_VERSION and len(self.side.outbox) < self.num_buffers:
            self.side.put((self.version, fault))

    def encode(self, seq, item):
        (version, fault), planes = item, self.planes
        planes.columns.log_probs_CT[:] = FAULTS[fault]
        data = Data(self.side.session, seq, *version, SCHEMA.rows, self.columns, 0, 0, None)
        return encode_data(data, planes.obs, planes.small, ())

    def tick(self):
        """Send all that is due by now: a hello, a heartbeat, a second try, what has credit."""
        now, side = self.network.now, self.side
        heard = side.last_heard if side.is_joined else side.told_at
        if side.has_session and now - heard > side.welcome.lease_s:
            self.actor.come_back(now)
        if side.has_session and now >= self.beat_at:
            self.beat_at = now + side.welcome.heartbeat_s
            self.network.say(WEIGHTS + self.name, [pack(Heartbeat(side.session, {}))])
        self.actor.tick(now)

    def hear(self, port, message):
        if port == DATA or not isinstance(message, Grant):
            heard = self.actor.hear(message, self.network.now)
        else:
            heard = self.side.take_grant(message) if self.side.has_session else None
        if isinstance(heard, Grant):
            self.version = max(self.version, self.side.named)
            self.tick()


class Network:
    """One learner at a time, the actors, the clock, and all that is under way between them."""

    def __init__(self):
        self.now, self.epoch = 0.0, 0
        # From whom or to whom, whether up, and the frames.
        self.messages = []
        self.numbers, self.sessions = itertools.count(1), itertools.count(1)
        self.actors = {}
        # The version from which each epoch grew.
        self.parents = {}
        # The version, the watermarks, the lineage, and what is admitted by then.
        self.checkpoint = None, "{}", Lineage(0), ()
        self.counts = Counter()
        self.restart()

    def restart(self):
        """A learner dies, and another one continues from the last checkpoint, if there is one."""
        self.epoch += 1
        version, watermarks, lineage, admitted = self.checkpoint
        self.parents[self.epoch], self.admitted = version, set(admitted)
        lineage = lineage.resumed(self.epoch, version.update if version else 0)
        sizes = {"columns": BATCH_COLUMNS, "num_slots": NUM_SLOTS}
        self.learner = PureLearner(SCHEMA, **sizes, lineage=lineage, max_lag=MAX_LAG)
        table = self.table = self.learner.table
        # As they are random: a message to a learner that is gone must not fit another session.
        table.new_id = lambda: b"session" + next(self.sessions).to_bytes(9, "big")
        table.restore_watermarks(json.loads(watermarks), self.now)
        self.reserve, self.settle = table.reserve, table.settle
        table.reserve, table.settle = self.check_reserve, self.check_settle
        for name in self.actors:
            self.listen(name)

    def save(self):
        marks, lineage = json.dumps(self.table.watermarks()), self.learner.lineage
        self.checkpoint = self.version, marks, lineage, frozenset(self.admitted)

    @property
    def version(self):
        return Version(self.epoch, self.learner.update)

    def check_reserve(self, peer, data, newest):
        """Do as the table, and check its verdict on a version by a walk back to it."""
        verdict, version = self.reserve(peer, data, newest), Version(data.epoch, data.update)
        epoch, update = self.version
        while epoch != version.epoch and self.parents.get(epoch) is not None:
            epoch, update = self.parents[epoch]
        is_ancestor = epoch == version.epoch and version.update <= update
        lag = newest.update - version.update
        assert verdict is not None or (is_ancestor and 0 <= lag <= MAX_LAG)
        assert verdict != "dead_branch" or not is_ancestor
        return verdict

    def check_settle(self, peer, seq, verdict):
        if verdict is None:
            assert (peer.actor, seq) not in self.admitted, "it came in twice"
            self.admitted.add((peer.actor, seq))
        self.counts["admitted" if verdict is None else "rejected"] += 1
        self.settle(peer, seq, verdict)

    def say(self, route, frames, *, is_up=True):
        self.messages.append((route, is_up, [bytes(frame) for frame in frames]))
        return True

    def listen(self, name):
        for route in (DATA + name, WEIGHTS + name):
            say = lambda frames, route=route: self.say(route, frames, is_up=False)  # noqa: E731
            self.learner.listeners[route] = say

    def add_actor(self, columns, streams):
        name = next(self.numbers).to_bytes(16, "big")
        actor = self.actors[name] = Actor(self, name, columns, streams)
        self.listen(name)
        actor.actor.tick(self.now)
        return actor

    def deliver(self, index=0):
        """One message arrives; the wire may hold older ones."""
        route, is_up, frames = self.messages.pop(index)
        message, learner = unpack(frames[0]), self.learner
        if not is_up:
            if route[1:] in self.actors:
                self.actors[route[1:]].hear(route[:1], message)
            return
        learner.now = self.now
        try:
            hear = learner.hear if route[:1] == DATA else learner.hear_pull
            hear(route, message, *frames[1:])
        except ProtocolError as error:
            code = "hello_again" if error.reason == "unknown_session" else "bad_message"
            self.say(route, [pack(reject(code, error.reason, 0.0))], is_up=False)
        learner.end_burst()

    def reap(self):
        self.learner.now = self.now
        self.learner.sessions.expire(self.now)
        self.table.take_back(self.now)
        self.learner.end_burst()

    def release(self, num_batches):
        for _ in range(min(num_batches, len(self.learner.full))):
            self.learner.settle(self.learner.full.pop(0))

    def settle_everything(self, patience_s=150.0):
        """The wire works again, time passes, everybody works: what was produced gets settled."""
        produced = {actor: actor.side.outbox.next_seq for actor in self.actors.values()}
        give_up_at = self.now + patience_s
        while any(actor.side.outbox.lowest_unsettled < seq for actor, seq in produced.items()):
            assert self.now < give_up_at, "somebody waits for ever"
            self.work()

    def work(self, lost=None):
        """Half a second in which all messages arrive, but for those of one kind; how many were."""
        self.now += 0.5
        self.reap()
        self.release(NUM_SLOTS)
        for actor in self.actors.values():
            # Credit that is never used is never free: whoever lives goes on.
            actor.produce()
            actor.tick()
        num_lost = 0
        while self.messages:
            if lost is not None and isinstance(unpack(self.messages[0][2][0]), lost):
                self.messages.pop(0)
                num_lost += 1
            else:
                self.deliver()
        self.check()
        return num_lost

    def check(self):
        """Check what holds at any moment."""
        assert self.table.outstanding_columns <= self.learner.filler.free_columns
        for peer in self.table:
            assert peer.outstanding_messages <= WINDOW * peer.streams
            assert peer.granted >= peer.watermark.below
            assert len(peer.watermark.above) <= 4 * WINDOW * peer.streams
        for outbox in (actor.side.outbox for actor in self.actors.values()):
            assert outbox.next_seq - outbox.lowest_unsettled == len(outbox)


class BadWire(Network):
    """Anything happens, in any order, each so often: it is bad, but works."""

    def __init__(self, seed):
        super().__init__()
        self.rng = random.Random(seed)
        self.new_actor()

    def step(self):
        steps = {
            **{self.unroll: 30, self.pass_time: 20, self.pause: 1, self.deliver_in_order: 30},
            **{self.deliver_any: 60, self.lose: 6, self.repeat: 6, self.train: 4, self.save: 2},
            **{self.release_some: 10, self.end_learner: 1, self.hello_again: 1},
            **{self.lose_actor: 1, self.new_actor: 4},
        }
        self.rng.choices([*steps], [*steps.values()])[0]()

    def some(self, of):
        """One of these, or none if there is none."""
        return [self.rng.choice([*of])] if of else []

    def unroll(self):
        for actor in self.some(self.actors.values()):
            for _ in range(self.rng.randint(1, 3)):
                actor.produce(self.rng.choice(["", "", "", *FAULTS]))
            actor.tick()

    def pass_time(self, seconds=(0.2, 0.5, 1.0)):
        self.now += self.rng.choice(seconds)
        if len(seconds) > 2 or self.rng.random() < 0.5:
            self.reap()
        for actor in self.actors.values():
            actor.tick()

    def pause(self):
        self.pass_time((5.0, 20.0))

    def deliver_in_order(self):
        for _ in range(min(self.rng.randint(1, 20), len(self.messages))):
            self.deliver()

    def deliver_any(self):
        for index in self.some(range(len(self.messages))):
            self.deliver(index)

    def lose(self):
        for index in self.some(range(len(self.messages))):
            self.messages.pop(index)

    def repeat(self):
        if len(self.messages) < MAX_MESSAGES:
            self.messages += self.some(self.messages)

    def release_some(self):
        self.release(self.rng.randint(1, NUM_SLOTS))

    def train(self):
        self.learner.update += self.rng.randint(1, 3)
        self.learner.publish()

    def end_learner(self):
        if self.rng.random() < 0.3:
            self.learner._say(self.learner.sessions.say_bye("restarting"))
            self.save()
        self.restart()

    def hello_again(self):
        for actor in self.some(self.actors.values()):
            actor.actor.come_back(self.now)

    def lose_actor(self):
        for actor in self.some(self.actors.values()):
            if self.rng.random() < 0.5 and (bye := actor.side.bye()):
                self.say(DATA + actor.name, [pack(bye)])
            del self.actors[actor.name]

    def new_actor(self):
        if len(self.actors) < MAX_ACTORS:
            self.add_actor(self.rng.randint(1, BATCH_COLUMNS), self.rng.randint(1, 2))


@pytest.mark.parametrize("seed", range(6))
def test_a_long_life_on_a_bad_wire(seed):
    network = BadWire(seed)
    for number in range(3000):
        network.step()
        network.check()
        if number % 150 == 149:
            network.settle_everything()
    ledger = network.learner.ledger.report()
    of = {name: ledger[f"trajectories/{name}"] for name in ("received", "admitted", "rejected")}
    assert of["received"] == of["admitted"] + of["rejected"]
    # It was bad, but not so bad that nothing was tested.
    assert min(network.counts[what] for what in ("admitted", "rejected")) > 200


@pytest.mark.parametrize("lost", [Data, Grant])
def test_what_is_lost_is_made_good_within_the_session(lost):
    network = Network()
    actor = network.add_actor(columns=2, streams=1)
    for _ in range(20):
        network.work()
    assert actor.side.is_joined
    session = actor.side.session
    assert network.work(lost) > 0
    assert len(actor.side.outbox) > 0
    network.settle_everything()
    assert actor.side.session == session
