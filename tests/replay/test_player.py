"""A recording into a front at real sockets, whose learner is the test: order and versions."""

import asyncio
from types import SimpleNamespace

import pytest

from impala_async.errors import MismatchError, RecordingError
from impala_async.replay import player as module
from impala_async.replay.index import RecordingIndex
from impala_async.replay.player import Player
from tests.learner.columns import big_schema, same
from tests.learner.hand_actor import MODEL, until
from tests.learner.server_harness import ServerHarness
from tests.replay.recordings import SCHEMA, message, planes, start, write


@pytest.fixture(autouse=True)
def layout(monkeypatch):
    """The learner knows no model."""
    made = SimpleNamespace(layout=MODEL, coarse_layout=MODEL)
    monkeypatch.setattr(module, "build_policy", lambda *_, **__: made)
    monkeypatch.setattr(module, "STILL_S", 0.05)


class Replay:
    """A player on a thread of its own, and the front that it plays to."""

    def __init__(self, tmp_path, **settings):
        self.harness = ServerHarness(**settings)
        self._path = tmp_path / "recording"
        self.told = []
        self._playing = None

    def play(self, *records, is_exact=False, is_looped=False):
        index = RecordingIndex(write(self._path, *records))
        self.player = Player(
            self.harness.server.data_url,
            index,
            is_exact=is_exact,
            is_looped=is_looped,
            should_stop=lambda: bool(self.told),
            connect_s=10.0,
        )
        self._playing = asyncio.create_task(asyncio.to_thread(self.player.run))

    async def end(self):
        await asyncio.wait_for(self._playing, 10.0)
        return self.player

    async def full(self, num_slots=1):
        """Wait until so many batches are there for the learner."""
        await until(lambda: len(self.harness.full) >= num_slots, f"{num_slots} full slots")
        return [self.harness.slots[index] for index in self.harness.full]

    async def close(self):
        self.told.append(True)
        if self._playing is not None:
            await asyncio.wait([self._playing], timeout=10.0)
        self.harness.close()


@pytest.fixture
async def make_replay(tmp_path):
    replays = []

    def make(**settings):
        replays.append(Replay(tmp_path, **settings))
        return replays[-1]

    yield make
    for replay in replays:
        await replay.close()


@pytest.mark.parametrize("schema", [SCHEMA, big_schema()], ids=["inline", "three frames"])
async def test_what_was_recorded_arrives_as_it_was(make_replay, schema):
    replay = make_replay(schema=schema)
    widths = [1, 3, 2, 2]
    sent = [message(n, columns=c, schema=schema) for n, c in enumerate(widths)]
    sent[1] = message(1, columns=3, schema=schema, episodes=[(1.5, 2)])
    replay.play(start(schema=schema), *sent)
    played = await replay.end()
    assert (played.num_messages, played.num_columns, played.refused) == (4, 8, {})
    assert played.num_body_bytes == sum(len(recorded.body) for recorded in sent)
    assert not played.is_finished
    expected = [(planes(n, c, schema), i) for n, c in enumerate(widths) for i in range(c)]
    for _ in range(2):
        taken = replay.harness.train()
        for column in range(4):
            made, place = expected.pop(0)
            assert same(taken, column, made.columns, place)
    assert replay.harness.episodes == [(1.5, 2)]
    assert replay.harness.count("sessions/closed") == 1


async def test_it_joins_as_an_actor_does_and_waits_for_the_first_version(make_replay):
    replay = make_replay(is_open=False)
    replay.play(start(), *(message(n, columns=1 + n % 2) for n in range(2)), is_looped=True)
    await until(lambda: len(replay.harness.schemas) == 1, "the schema")
    await asyncio.sleep(0.05)
    assert replay.player.num_messages == 0
    replay.harness.open()
    replay.harness.publish(0)
    await replay.full()
    (peer,) = replay.harness.server.table
    assert (peer.columns, peer.streams) == (2, 1)


async def test_its_lease_lives_and_where_the_learner_ends_it_it_comes_again(make_replay):
    replay = make_replay(learner={"lease_s": 1})
    replay.play(start(), message(0), is_looped=True)
    await replay.full(3)
    # There is no credit left, so it says nothing else.
    (peer,) = replay.harness.server.table
    before = peer.last_heard
    await until(lambda: peer.last_heard > before, "a heartbeat")
    assert peer.weights_route
    replay.harness.server.table.end(peer)
    await until(lambda: [each.columns for each in replay.harness.server.table] == [1], "again")


async def test_a_loop_goes_on_with_the_newest_versions_until_it_is_told(make_replay):
    replay = make_replay()
    replay.harness.publish(7)
    replay.play(start(), *(message(n, update=n) for n in range(3)), is_looped=True)
    taken = []
    for update in (8, 9, 10, 11):
        (slot, *_) = await replay.full()
        assert taken or slot.updates_B.tolist() == [7, 7, 7, 7]
        taken.append(replay.harness.train())
        replay.harness.publish(update)
    for i in range(16):
        assert same(taken[i // 4], i % 4, planes(i % 3).columns)
    # Weights are pulled as an actor pulls them.
    await until(lambda: int(replay.harness.count("weights/served")) >= 2, "pulls")
    replay.told.append(True)
    assert (await replay.end()).num_messages >= 16
    assert replay.harness.count("sessions/closed") == 1


async def test_exactly_a_message_waits_for_its_version_and_keeps_it(make_replay):
    replay = make_replay()
    replay.play(start(), *(message(n, update=n // 4) for n in range(12)), is_exact=True)
    for update in range(1, 4):
        (slot,) = await replay.full()
        # There is credit for the next one, but it was acted with weights that are not out yet.
        await asyncio.sleep(0.05)
        assert replay.player.num_messages == 4 * update
        assert slot.updates_B.tolist() == [update - 1] * 4
        replay.harness.publish(update)
        replay.harness.train()
    assert (await replay.end()).num_messages == 12


async def test_a_learner_that_never_gets_there_is_told(make_replay, monkeypatch):
    monkeypatch.setattr(module, "STUCK_S", 0.1)
    replay = make_replay()
    replay.play(start(), *(message(n) for n in range(4)), message(4, update=2), is_exact=True)
    await replay.full()
    replay.harness.publish(1)
    replay.harness.train()
    with pytest.raises(MismatchError, match=r"stands at update 1, .* recorded one had made 2"):
        await replay.end()


async def test_exactly_the_epoch_is_the_learner_s_own(make_replay):
    replay = make_replay()
    replay.play(start(3), *(message(n, epoch=3 - n % 2) for n in range(4)), is_exact=True)
    assert (await replay.end()).refused == {}
    await replay.full()


async def test_the_end_is_waited_for_as_long_as_versions_come(make_replay, monkeypatch):
    # A busy machine may sleep for longer than it was told to.
    monkeypatch.setattr(module, "STILL_S", 0.3)
    replay = make_replay()
    replay.play(start(), *(message(n) for n in range(4)), is_exact=True)
    await replay.full()
    for update in range(1, 8):
        await asyncio.sleep(0.03)
        replay.harness.publish(update)
    played = await replay.end()
    assert played.newest.update == 7
    assert not played.is_finished


async def test_a_learner_that_is_finished_is_answered_and_ends_it(make_replay):
    replay = make_replay()
    replay.play(start(), *(message(n) for n in range(40)))
    await replay.full()
    await asyncio.wait_for(replay.harness.server.say_bye("finished", 20.0), 5.0)
    assert (await replay.end()).is_finished


async def test_what_is_refused_is_told(make_replay):
    replay = make_replay()
    bad = message(1)
    bad = bad._replace(body=b"\xff" * len(bad.body))
    replay.play(start(), message(0), bad, message(2))
    played = await replay.end()
    assert played.num_messages == 3
    refused = played.refused
    assert refused in ({"invalid": 1}, {"nonfinite": 1})
    played.seconds = 0.5
    assert played.describe().startswith("played 3 messages, 1.0 times the recording, in 0.5 s: 6 ")
    assert played.describe().endswith(f" MB/s; refused: 1 {next(iter(refused))}")


async def test_what_is_stale_now_but_was_not_then_ends_an_exact_replay(make_replay):
    replay = make_replay(num_slots=1, learner={"max_lag": 2, "batch_columns": 4})
    first = start(learner={"max_lag": 2, "batch_columns": 4})
    replay.play(first, *(message(n) for n in range(8)), is_exact=True)
    await replay.full()
    replay.harness.publish(9)
    replay.harness.train()
    with pytest.raises(RecordingError, match="refused as stale what it had admitted"):
        await replay.end()
