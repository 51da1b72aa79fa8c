"""Trajectories into slots: what comes in whole, what is refused and why, and what is told."""

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from impala_async.learner.loop.endpoint import BAD_REASONS
from impala_async.trajectory import ColumnChecks
from impala_async.weights import Lineage, Version
from impala_async.wire import messages as wire
from tests.columns import Planes, find_fault
from tests.learner.columns import big_schema, planes_of, same, small_schema
from tests.learner.hand_actor import LAYOUT
from tests.learner.pure_learner import HandActor, PureLearner

SMALL, BIG = small_schema(), big_schema()


def train(learner):
    """Be done with the oldest full slot; what it held, by column."""
    slot = learner.full.pop(0)
    copy = Planes(learner.schema, len(slot.obs))
    copy.obs[:], copy.small[:] = slot.obs, slot.small
    learner.settle(slot)
    return lambda column: (copy.columns, column)


def refused(actor):
    """Seqs, and why."""
    return [(seq, wire.VERDICTS[code]) for seq, code in actor.verdicts]


# -------------------- what is sound


@pytest.mark.parametrize("form", ["inline", "frames", "compressed"])
@pytest.mark.parametrize("columns", [1, 2, 3, 4])
def test_columns_and_episodes_arrive_as_they_were_sent(form, columns):
    """Those of three do not fit into slots of four, and are split over two."""
    schema = SMALL if form == "inline" else BIG
    learner = PureLearner(schema)
    actor = HandActor(learner, columns).join()
    sent, episodes, taken = [], [], []
    for number in range(12 // columns):
        planes = planes_of(schema, columns, seed=number)
        if form == "compressed":
            # Noise would only grow.
            planes.columns.obs["pixels"][...] = number
        ended = [(1.5 * number, 2), (-3.0, 1)][: number % 3]
        header = actor.header(codec=wire.ZSTD if form == "compressed" else wire.PLAIN)
        how = {"is_compressed": form == "compressed"}
        actor.say(*wire.encode_data(header, planes.obs, planes.small, ended, **how))
        actor.seq += 1
        learner.end_burst()
        sent += [(planes.columns, column) for column in range(columns)]
        episodes += ended
        while learner.full:
            column = train(learner)
            taken += [column(place) for place in range(4)]
    assert all(same(*there, *here) for there, here in zip(taken, sent, strict=True))
    assert learner.episodes == episodes
    report = learner.report()
    assert (report["trajectories/trained"], report["trajectories/rejected"]) == (12, 0)
    assert actor.rejects == []


# -------------------- what is not


def spoiled(planes, leaf, value):
    """The same columns with a fault in the last one."""
    columns = planes.columns
    array = {
        "obs": columns.obs.get("speed"),
        "action": columns.actions.get("leg"),
        "reward": columns.rewards_CT,
        "log_prob": columns.log_probs_CT,
        "mask": columns.mask_CT.view(np.uint8),
    }[leaf]
    array[-1, -1] = value
    return planes


FAULTS = [
    ("obs", np.nan, "nonfinite"),
    ("reward", 1e38, "nonfinite"),
    ("action", 4, "invalid"),
    ("log_prob", 2e-6, "invalid"),
    ("mask", 2, "invalid"),
]
BAD_EPISODES = [
    ([(np.nan, 3)], "nonfinite"),
    ([(-1e38, 3)], "nonfinite"),
    ([(1.0, 2), (-np.inf, 1)], "nonfinite"),
    ([(1.0, 0)], "invalid"),
    ([(1.0, -5)], "invalid"),
]


def test_a_bad_value_refuses_its_message_and_leaves_the_others():
    learner = PureLearner(BIG, columns=8)
    bad, good = HandActor(learner, 2).join(), HandActor(learner, 2).join()
    wanted = []
    for leaf, value, reason in FAULTS:
        bad.send(spoiled(planes_of(BIG, 2, seed=9), leaf, value))
        wanted.append((len(wanted), reason))
        assert refused(bad) == wanted, (leaf, value)
    for episodes, reason in BAD_EPISODES:
        bad.send(episodes=episodes)
        wanted.append((len(wanted), reason))
        assert refused(bad) == wanted, episodes
    sent = [good.send() for _ in range(3)]
    masked = planes_of(BIG, 2)
    masked.columns.mask_CT[0, 1] = False
    # Nobody looks at what a masked row holds.
    masked.columns.rewards_CT[0, 1] = np.nan
    masked.columns.log_probs_CT[0, 1] = np.inf
    sent.append(bad.send(masked))
    column = train(learner)
    for place in range(6):
        assert same(*column(place), sent[place // 2].columns, place % 2)
    report = learner.report()
    assert report["rejected/nonfinite"] + report["rejected/invalid"] == 2 * len(wanted)
    assert report["trajectories/received"] == 2 * len(wanted) + 8
    assert (refused(good), learner.episodes) == ([], [])


def broken(actor):
    """The frames of messages of one column, not as they should be, by the reason."""
    planes = planes_of(actor.schema, 1)
    header, obs, small = wire.encode_data(actor.header(), planes.obs, planes.small, [])
    squeezed = wire.pack(actor.header(codec=wire.ZSTD))
    inline = actor.header(body=bytes(64))
    return {
        "wrong_size": [
            [header, obs[:-1], small],
            [header, bytes(obs) + b"x", small],
            [header, b"", small],
            [header, obs, small[:-8]],
            [header, obs, bytes(small) + b"x"],
            [header, small, obs],
            [squeezed, obs, small],
            [squeezed, wire.compress(obs[:-1]), small],
            [squeezed, wire.compress(memoryview(bytes(obs) + b"x")), small],
            [squeezed, bytes(obs) + b"x", small],
            [squeezed, wire.compress(obs), small[:-8]],
            [wire.pack(inline)],
            [wire.pack(inline._replace(codec=wire.ZSTD))],
            [wire.pack(actor.header(rows=actor.schema.rows + 1)), obs, small],
            [wire.pack(actor.header(rows=1)), obs, small],
            [wire.pack(actor.header(num_cut=actor.schema.rows)), obs, small],
            # Rows cannot end more episodes than they are; and one end is missing.
            [
                wire.pack(actor.header(num_episodes=4)),
                obs,
                bytes(small) + bytes(4 * wire.EPISODE.itemsize),
            ],
            [wire.pack(actor.header(num_episodes=1)), obs, small],
        ],
        "wrong_frame_count": [
            [header],
            [header, obs],
            [squeezed, wire.compress(obs)],
            [header, obs, small, b""],
        ],
    }


def test_a_body_of_the_wrong_form_is_refused_and_written_over(caplog):
    learner = PureLearner(BIG, columns=8)
    bad, good = HandActor(learner).join(), HandActor(learner, 3).join()
    num_bad = 0
    for reason, messages in broken(bad).items():
        for number in range(len(messages)):
            # Each has the seq that is next.
            assert bad.say(*broken(bad)[reason][number]) == reason, (reason, number)
            bad.seq += 1
            num_bad += 1
            learner.end_burst()
    assert refused(bad) == [(seq, "invalid") for seq in range(num_bad)]
    report = learner.report()
    assert (report["rejected/invalid"], report["trajectories/admitted"]) == (num_bad, 0)
    assert len([line for line in caplog.messages if "is refused" in line]) == 1
    sent = [good.send(), good.send(), bad.send(), bad.send()]
    columns = [(planes.columns, i) for planes in sent for i in range(len(planes.obs))]
    taken = train(learner)
    assert all(same(*taken(place), *each) for place, each in enumerate(columns))
    assert refused(good) == []
    actor = HandActor(PureLearner(SMALL)).join()
    _, _, (frame,) = actor.data_of(None, [])
    assert actor.say(frame, b"an inline body has none") == "wrong_frame_count"


# -------------------- what the header says


def test_a_duplicate_and_a_stranger_count_for_no_more_than_a_batch():
    learner = PureLearner(SMALL)
    stranger = HandActor(learner)
    assert stranger.say(stranger.header(session=b"?" * 16, columns=4096)) == "unknown_session"
    report = learner.report()
    assert report["rejected/unknown_session"] == 4 == report["trajectories/received"]
    actor = HandActor(learner, 2).join()
    actor.send()
    num_grants = len(actor.grants)
    # One of a width that it has not, which counts as no more than a batch.
    actor.say(actor.header(seq=0, columns=4096))
    learner.end_burst()
    assert len(actor.grants) == num_grants + 1
    report = learner.report()
    assert (report["rejected/duplicate"], report["trajectories/in_slots"]) == (4, 2)
    # It was settled once, and no word of this one.
    assert (actor.settled, actor.verdicts) == (1, [])


def test_versions_are_judged_and_the_judgement_is_told(caplog):
    learner = PureLearner(SMALL, lineage=Lineage(1, {1: 0}).resumed(2, 100))
    learner.update = 140
    learner.publish()
    actor = HandActor(learner).join()
    versions = {Version(1, 101): "dead_branch", Version(2, 89): "stale", Version(3, 100): "invalid"}
    for version in (*versions, Version(1, 100), Version(2, 90)):
        actor.send(epoch=version.epoch, update=version.update)
    assert refused(actor) == list(enumerate(versions.values()))
    assert learner.report()["trajectories/admitted"] == 2
    assert len(caplog.messages) == 3
    for line, verdict in zip(caplog.messages, versions.values(), strict=True):
        assert line.startswith("actor 0: a message of 1 columns is refused: it was acted with")
        assert line.endswith(f"({verdict}, 1 columns so far from all actors)")
    # It is told now and then.
    caplog.clear()
    for now in (0.0, 1.0, 9.9, 10.0):
        learner.now = now
        actor.send(spoiled(planes_of(SMALL, 1), "reward", np.nan))
    told = [line.partition("nonfinite, ")[2] for line in caplog.messages]
    assert told == ["1 columns so far from all actors)", "4 columns so far from all actors)"]


def test_before_slots_and_a_version_nothing_is_granted_and_after_the_close_nothing_counts():
    learner = PureLearner(SMALL, is_open=False)
    actor = HandActor(learner, 2).join()
    _, _, (frame,) = actor.data_of(None, [], epoch=1)
    assert actor.say(frame) == "not_allowed_now"
    learner.open()
    learner.end_burst()
    assert actor.granted == 0
    learner.publish()
    assert actor.granted == 1
    actor.seq = 0
    actor.send()
    learner.admission.close()
    granted = actor.granted
    assert learner.report()["dropped/shutdown"] == 2
    actor.send()
    report = learner.report()
    assert (report["trajectories/received"], report["trajectories/in_slots"]) == (2, 0)
    assert actor.granted == granted


def test_what_an_actor_says_is_heard_after_what_it_sent():
    learner = PureLearner(SMALL)
    actor = HandActor(learner, 2).join()
    _, _, (frame,) = actor.data_of(None, [])
    actor.say(frame)
    assert learner.report()["trajectories/received"] == 0
    actor.say(wire.Hello(**actor.hello_of()._asdict() | {"run_id": learner.table.run_id}))
    assert learner.report()["trajectories/admitted"] == 2
    (peer,) = learner.table
    assert (peer.granted, peer.watermark.below) == (1, 1)


# -------------------- credit


def send_all(actor):
    """Send everything that may go without waiting for more credit; how many columns."""
    num_sent = 0
    while actor.granted > actor.seq:
        actor.send()
        num_sent += actor.columns
    return num_sent


def test_what_is_granted_fits_into_what_is_free_and_is_one_batch_ahead():
    learner = PureLearner(SMALL)
    actors = [HandActor(learner, columns).join() for columns in (1, 2, 3, 1)]
    num_sent, num_before = 0, -1
    while num_sent > num_before:
        report = learner.report()
        granted, free = report["credit/granted_columns"], report["credit/free_columns"]
        assert granted <= min(free, learner.columns)
        assert free == 3 * 4 - num_sent
        num_before, num_sent = num_sent, num_sent + sum(map(send_all, actors))
    # Nothing more fits: what is left is narrower than whoever has waited longest.
    assert learner.report()["trajectories/in_slots"] == num_sent >= 10
    assert len(learner.full) == num_sent // 4
    assert [actor.rejects for actor in actors] == [[]] * 4
    # With a slot that is released there is credit again.
    learner.settle(learner.full.pop(0))
    assert sum(map(send_all, actors)) > 0


def test_who_gets_no_credit_is_told_later_what_became_of_its_message():
    """Each word to an actor takes the learner thread from its work."""
    learner = PureLearner(SMALL, columns=1, num_slots=1)
    actor = HandActor(learner).join()
    for seq in range(3):
        num_words = len(actor.grants)
        _, _, (frame,) = actor.data_of(None, [])
        actor.say(frame)
        assert learner.admission.deal(0.0) == []
        assert learner.admission.to_acknowledge
        learner.settle(learner.full.pop())
        assert len(actor.grants) == num_words + 1
        assert (actor.granted, actor.settled) == (seq + 2, seq + 1)
        assert not learner.admission.to_acknowledge
    _, _, (frame,) = actor.data_of(None, [])
    actor.say(frame)
    assert learner.admission.deal(0.0) == []
    (answer,) = learner.admission.acknowledge(0.0)
    assert answer.route == actor.route


# -------------------- a recorder


class FakeRecorder:
    def __init__(self):
        self.is_behind = False
        self.taken = []

    def take(self, arrival):
        data, episodes = arrival.data, arrival.episodes
        tail = b"" if episodes is None else episodes.tobytes()
        planes = arrival.obs.tobytes() + arrival.small.tobytes() + tail
        self.taken.append((arrival.peer.number, data.seq, data.columns, planes))


@pytest.mark.parametrize("schema", [SMALL, BIG], ids=["inline", "frames"])
def test_what_is_admitted_is_recorded_as_it_was_sent(schema):
    recorder = FakeRecorder()
    learner = PureLearner(schema, recorder=recorder)
    wide, narrow = HandActor(learner, 3).join(), HandActor(learner, 1).join()
    wanted = []
    # The second one of three columns is split over two slots.
    for actor, seq in ((wide, 0), (narrow, 0), (wide, 1)):
        planes = planes_of(schema, actor.columns, seed=len(wanted))
        actor.send(planes, episodes=[(1.5, 2)])
        tail = np.array([(1.5, 2)], wire.EPISODE).tobytes()
        sent = planes.obs.tobytes() + planes.small.tobytes() + tail
        wanted.append((0 if actor is wide else 1, seq, actor.columns, sent))
    narrow.send(spoiled(planes_of(schema, 1), "reward", np.inf))
    assert learner.report()["rejected/nonfinite"] == 1
    assert recorder.taken == wanted


def test_no_credit_is_given_while_the_recorder_is_behind():
    recorder = FakeRecorder()
    recorder.is_behind = True
    learner = PureLearner(SMALL, recorder=recorder)
    actor = HandActor(learner).join()
    assert (len(actor.grants), actor.granted) == (1, 0)
    recorder.is_behind = False
    learner.end_burst()
    assert actor.granted == 1
    # A message that was granted before is taken all the same.
    recorder.is_behind = True
    actor.send()
    assert len(recorder.taken) == 1


# -------------------- what comes in one burst fares as if each had come alone

B = 8
WIDTHS = (1, 2, 3)
KINDS = ("good", "good", "good", "nan", "no choice", "endless episode", "short", "again", "stale",
         "from nowhere", "without credit")  # fmt: skip


class Bay(PureLearner):
    """Three actors, and a learner that is done at once."""

    def __init__(self, *, goal=float("inf")):
        self.batches = []
        self.refused = []
        self.taken = []
        self.num_sent = 0
        self.is_behind = False
        self.goal = goal
        lineage = Lineage(0, {}).resumed(1, 5)
        super().__init__(SMALL, columns=B, max_lag=3, recorder=self, lineage=lineage)
        self.actors = [HandActor(self, width) for width in WIDTHS]
        for number, actor in enumerate(self.actors):
            actor.uuid = bytes([number]) * 16
            actor.hello()
            actor.spec(streams=2)
        self.peers = list(self.table)
        for peer in self.peers:
            peer.usual_s = 0.0
        self.end_burst()

    def take(self, arrival):
        planes = arrival.obs.tobytes() + arrival.small.tobytes()
        self.taken.append((arrival.peer.number, arrival.data.seq, planes))

    def count(self, episodes):
        super().count(episodes)
        if episodes["total"].max() >= self.goal:
            self.admission.close()

    def end_burst(self):
        self.admission.decide(self.now)
        while self.full:
            slot = self.full.pop(0)
            planes = (slot.obs.tobytes(), slot.small.tobytes())
            self.batches.append((*planes, slot.updates_B.tolist()))
            self.settle(slot, is_dealing=False)
        self._say(self.admission.deal(self.now))

    def send(self, number, kind="good"):
        actor, granted = self.actors[number], self.peers[number].granted
        self.num_sent += 1
        planes = planes_of(SMALL, actor.columns, seed=self.num_sent)
        planes.columns.mask_CT[-1, : self.num_sent % 3] = False
        if kind == "nan":
            planes.columns.rewards_CT[-1, -1] = np.nan
        if kind == "no choice":
            planes.columns.actions[""][0, -1] = 99
        total = float("inf" if kind == "endless episode" else self.num_sent)
        episodes = [(total, 3)] * (self.num_sent % 2)
        update = {"stale": 1, "from nowhere": 6}.get(kind, 5 - self.num_sent % 3)
        seq = {"again": max(0, actor.seq - 1), "without credit": granted}.get(kind, actor.seq)
        if seq == actor.seq < granted:
            actor.seq += 1
        header = actor.header(seq=seq, epoch=1, update=update)
        (frame,) = wire.encode_data(header, planes.obs, planes.small, episodes)
        message = wire.unpack(frame)
        body = message.body[:-1] if kind == "short" else message.body
        if reason := actor.say(message._replace(body=body)):
            self.refused.append(reason)

    def all_that_came_of_it(self):
        grants = [[g._replace(verdicts=[]) for g in actor.grants] for actor in self.actors]
        # In a burst a message that is refused by its header has its verdict before others.
        told = grants, [sorted(actor.verdicts) for actor in self.actors], self.refused
        return told, self.episodes, self.batches, self.taken, self.ledger.report()


def play(bursts, *, alone=False):
    bay = Bay()
    for burst in bursts:
        for step in burst:
            bay.send(*step)
            if alone:
                bay.admission.decide(0.0)
        bay.end_burst()
    return bay


STEPS = st.tuples(st.integers(0, 2), st.sampled_from(KINDS))


@given(st.lists(st.lists(STEPS, max_size=9), min_size=1, max_size=8))
def test_a_burst_comes_to_the_same_as_its_messages_alone(bursts):
    together, alone = play(bursts), play(bursts, alone=True)
    assert together.all_that_came_of_it() == alone.all_that_came_of_it()


def test_what_is_sound_is_checked_once_a_burst(monkeypatch):
    checked = []
    find_fault = ColumnChecks.find_fault

    def note(checks, obs, small):
        checked.append(len(small))
        return find_fault(checks, obs, small)

    monkeypatch.setattr(ColumnChecks, "find_fault", note)
    bay = play([[(0, "good"), (1, "good"), (2, "good")]])
    assert checked == [1 + 2 + 3]
    assert bay.ledger.report()["trajectories/admitted"] == 6


def test_a_goal_that_is_reached_in_a_burst_closes_the_doors_behind_it():
    for burst, num_admitted in (
        # Both are admitted before the goal is counted, and then the batch is not full.
        ([2, 1], 7),
        # The last one fills the batch: it has gone out when the doors are closed.
        ([2, 1, 0], 8),
        # The last one does not fit behind the others: when they are decided, it is too late for it.
        ([2, 1, 1], 7),
    ):
        bay = play([[(0, "good")] * 2])
        # The return of the episode in the first message of the burst.
        bay.goal = 3.0
        for number in burst:
            bay.send(number, "good")
        bay.end_burst()
        report = bay.ledger.report()
        assert report["trajectories/admitted"] == num_admitted == report["trajectories/received"]
        assert report["trajectories/in_slots"] == 0, burst
        assert len(bay.batches) == num_admitted // B, burst
        assert report["dropped/shutdown"] == num_admitted % B, burst
        # As the service does once more when it winds down.
        bay.admission.close()
        assert bay.ledger.report() == report, burst


@pytest.mark.parametrize("how", ["there is room", "it gives way", "it cannot be called back"])
def test_a_late_message_is_taken_comes_again_or_begins_anew(how):
    """The third is slow, and no room is kept for it."""
    bay = Bay()
    *first, late = bay.peers
    late.usual_s = 5.0
    late.lapse()
    late.gives_way = how == "it gives way"
    if how != "there is room":
        # All that is free is the others'.
        for peer in first:
            peer.streams = 100
        bay.table.deal(3 * B, now=0.0)
    bay.send(2)
    bay.end_burst()
    report, is_lost = bay.report(), how == "it cannot be called back"
    names = "trajectories/admitted", "rejected/unknown_session", "credit/turned_away"
    assert [report[name] for name in names] == [
        WIDTHS[2] * is_so for is_so in (how == "there is room", is_lost, late.gives_way)
    ]
    # The others have room for all that they were granted.
    for number in (0, 1) * 7:
        bay.send(number)
        bay.end_burst()
    assert bay.refused == ["unknown_session"] * is_lost
    assert (bay.table.peer_of(late.session) is None) == is_lost
    assert late.watermark.is_settled(0) == (how == "there is room")
    if late.gives_way:
        assert (late.called_back, late.has_call_room) == (0, True)
        bay.actors[2].seq = 0
        bay.send(2)
        bay.end_burst()
        assert bay.refused == []
        assert late.watermark.is_settled(0)


# -------------------- thousands of mutated messages, while a well-behaved actor works


def mutated(rng, frames):
    """One frame is left out, cut, changed, longer, or has another before it."""
    at, noise = rng.randrange(len(frames)), rng.randbytes(rng.choice((0, 3, 300, 13_000)))
    frame = bytes(frames[at])
    cut = rng.randrange(len(frame) + 1)
    changed = frame[:cut] + rng.randbytes(1) + frame[cut + 1 :]
    ways = ([], [frame[:cut]], [changed], [frame + noise], [noise, frame])
    return [*map(bytes, frames[:at]), *rng.choice(ways), *map(bytes, frames[at + 1 :])] or [b""]


def test_thousands_of_bad_messages():
    learner, rng = PureLearner(big_schema(rows=2)), random.Random(1)
    good, bad = HandActor(learner, 2).join(), HandActor(learner, 1).join()
    planes, reasons = planes_of(bad.schema, 1, seed=99), Counter()
    sent, taken = [], {}
    for number in range(4000):
        session = bad.session if rng.random() < 0.8 else rng.randbytes(16)
        header = bad.header(
            session=session,
            seq=rng.choice((bad.settled, bad.settled, rng.randrange(2**62))),
            epoch=rng.choice((1, 1, 1, 0, 2, 2**31)),
            columns=rng.choice((1, 1, 1, 2, 4096)),
        )
        spec = wire.Spec(session, bad.schema.digest, LAYOUT, rng.randint(1, 9), rng.randint(1, 3))
        frames = wire.encode_data(header, planes.obs, planes.small, [])
        others = (
            [wire.pack(spec), bad.schema.to_json()],
            [wire.pack(wire.ByeOk(session))],
            [wire.pack(wire.Get(session, 1, 1))],
        )
        frames = rng.choice((*others, *[frames] * 5))
        reasons[bad.say(*(mutated(rng, frames) if rng.random() < 0.8 else frames))] += 1
        if number % 10 == 0:
            columns = good.send(planes_of(good.schema, 2, seed=number), [(1.0, 3)]).columns
            sent += [(columns, column) for column in range(2)]
        if learner.table.peer_of(bad.session) is None:
            bad.join()
        while learner.full:
            assert find_fault(learner.schema, learner.full[0].columns) is None
            column = train(learner)
            for columns, place in map(column, range(4)):
                taken[columns.rewards_CT[place].tobytes()] = columns, place
    assert reasons.keys() == {"", *BAD_REASONS} - {"oversized_header"}
    assert reasons.total() - reasons[""] > 2000
    # The good one never noticed. Only the filling slot may still hold some of the newest.
    assert (good.rejects, good.verdicts, len(learner.episodes)) == ([], [], 400)
    found = [taken.get(columns.rewards_CT[place].tobytes()) for columns, place in sent[:-3]]
    assert all(same(*there, *here) for there, here in zip(found, sent[:-3], strict=True))
