"""A recording into a server at real sockets, whose learner is the test: order, versions, speed."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from impala_async.actor import player as module
from impala_async.actor.player import Manner, Played, Player, describe
from impala_async.actor.playlist import Playlist
from impala_async.errors import MismatchError, RecordingError, UnreachableError
from impala_async.learner.slots import Slot
from impala_async.wire.recording import Record
from tests.actor.tapes import SCHEMA, message, planes, start, write
from tests.learner.columns import big_schema, same
from tests.learner.hand_actor import LAYOUT, until
from tests.learner.server_harness import ServerHarness

ONCE, EXACT = Manner(), Manner(is_exact=True)


@pytest.fixture(autouse=True)
def layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server knows no model."""
    made = SimpleNamespace(layout=SimpleNamespace(digest=LAYOUT))
    monkeypatch.setattr(module, "build_policy", lambda *_, **__: made)
    monkeypatch.setattr(module, "STILL_S", 0.05)


class Stage:
    """A server, and a player on a thread of its own."""

    def __init__(self, tmp_path: Path, **settings: Any) -> None:
        self.harness = ServerHarness(**settings)
        self._path = tmp_path / "recording"
        self._told: list[bool] = []
        self._playing: asyncio.Task[Played] | None = None

    def play(self, *records: Record, manner: Manner = ONCE, url: str = "") -> None:
        playlist = Playlist(write(self._path, *records))
        self.player = Player(
            url or self.harness.server.data_url,
            playlist,
            manner,
            should_stop=lambda: bool(self._told),
            connect_s=0.3 if url else 10.0,
        )
        self._playing = asyncio.create_task(asyncio.to_thread(self.player.run))

    async def end(self) -> Played:
        assert self._playing is not None
        return await asyncio.wait_for(self._playing, 10.0)

    async def full(self, num_slots: int = 1) -> list[Slot]:
        """Until so many batches wait for the learner."""
        await until(lambda: len(self.harness.full) >= num_slots, f"{num_slots} full slots")
        return [self.harness.slots[index] for index in self.harness.full]

    async def close(self) -> None:
        self._told.append(True)
        if self._playing is not None:
            await asyncio.wait([self._playing], timeout=10.0)
        self.harness.close()


@pytest.fixture
async def make_stage(tmp_path: Path) -> Any:
    stages: list[Stage] = []

    def make(**settings: Any) -> Stage:
        stages.append(Stage(tmp_path, **settings))
        return stages[-1]

    yield make
    for stage in stages:
        await stage.close()


Make = Callable[..., Stage]


@pytest.mark.parametrize("schema", [SCHEMA, big_schema()], ids=["inline", "three frames"])
async def test_what_was_recorded_arrives_as_it_was(make_stage: Make, schema: Any) -> None:
    stage = make_stage(schema=schema)
    widths = [1, 3, 2, 2]
    sent = [message(n, columns=c, schema=schema) for n, c in enumerate(widths)]
    sent[1] = message(1, columns=3, schema=schema, episodes=[(1.5, 2)])
    stage.play(start(schema=schema), *sent)
    played = await stage.end()
    assert (played.messages, played.columns, played.refused) == (4, 8, {})
    assert played.body_bytes == sum(len(recorded.body) for recorded in sent)
    assert not played.is_finished
    expected = [(planes(n, c, schema), i) for n, c in enumerate(widths) for i in range(c)]
    for _ in range(2):
        taken = stage.harness.train()
        for column in range(4):
            made, place = expected.pop(0)
            assert same(taken, column, made.columns, place)
    assert stage.harness.episodes == [(1.5, 2)]
    assert stage.harness.count("sessions/closed") == 1


async def test_by_default_the_newest_version_is_said(make_stage: Make) -> None:
    stage = make_stage()
    stage.harness.publish(7)
    stage.play(start(), *(message(n, update=n) for n in range(4)))
    await stage.end()
    (slot,) = await stage.full()
    assert slot.updates_B.tolist() == [7, 7, 7, 7]


async def test_weights_are_pulled_as_an_actor_pulls_them(make_stage: Make) -> None:
    stage = make_stage()
    stage.play(start(), *(message(n) for n in range(4)), manner=Manner(is_looped=True))
    for update in range(1, 5):
        await stage.full()
        stage.harness.publish(update)
        stage.harness.train()
    await until(lambda: int(stage.harness.count("weights/served")) >= 2, "pulls")


async def test_no_more_goes_than_there_is_credit_for(make_stage: Make) -> None:
    stage = make_stage(num_slots=2)
    stage.play(start(), *(message(n) for n in range(12)))
    await stage.full(2)
    await asyncio.sleep(0.05)
    assert stage.player.played.messages == 8
    stage.harness.train()
    assert (await stage.end()).messages == 12
    assert stage.harness.count("wire/bad") == 0


async def test_a_loop_goes_on_until_it_is_told(make_stage: Make) -> None:
    stage = make_stage()
    stage.play(start(), message(0), message(1), message(2), manner=Manner(is_looped=True))
    taken = []
    for _ in range(3):
        await stage.full()
        taken.append(stage.harness.train())
    order = [planes(n % 3) for n in range(12)]
    for i, made in enumerate(order):
        assert same(taken[i // 4], i % 4, made.columns)
    stage._told.append(True)
    assert (await stage.end()).messages >= 12
    assert stage.harness.count("sessions/closed") == 1


async def test_at_the_original_speed_a_message_waits_for_its_time(make_stage: Make) -> None:
    stage = make_stage()
    records = (start(), message(0, arrived_s=0.1), start(2, 1), message(1, arrived_s=0.1))
    began = time.monotonic()
    stage.play(*records, manner=Manner(is_original_speed=True))
    played = await stage.end()
    assert played.messages == 2
    assert time.monotonic() - began >= 0.2


# -------------------- exactly


async def test_exactly_a_message_waits_for_its_version_and_keeps_it(make_stage: Make) -> None:
    stage = make_stage()
    stage.play(start(), *(message(n, update=n // 4) for n in range(12)), manner=EXACT)
    for update in range(1, 4):
        (slot,) = await stage.full()
        # There is credit for the next one, but it was acted with weights that are not out yet.
        await asyncio.sleep(0.05)
        assert stage.player.played.messages == 4 * update
        assert slot.updates_B.tolist() == [update - 1] * 4
        stage.harness.publish(update)
        stage.harness.train()
    assert (await stage.end()).messages == 12


async def test_a_learner_that_never_gets_there_is_told(
    make_stage: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STUCK_S", 0.1)
    stage = make_stage()
    stage.play(start(), *(message(n) for n in range(4)), message(4, update=2), manner=EXACT)
    await stage.full()
    stage.harness.publish(1)
    stage.harness.train()
    with pytest.raises(MismatchError, match=r"stands at update 1, .* recorded one had made 2"):
        await stage.end()


async def test_exactly_the_epoch_is_the_learner_s_own(make_stage: Make) -> None:
    stage = make_stage()
    stage.play(start(3), *(message(n, epoch=3 - n % 2) for n in range(4)), manner=EXACT)
    assert (await stage.end()).refused == {}
    await stage.full()


async def test_exactly_only_the_first_take_is_played(make_stage: Make) -> None:
    stage = make_stage()
    stage.play(start(), message(0), start(2, 1), message(1), manner=EXACT)
    assert (await stage.end()).messages == 1


async def test_the_end_is_waited_for_as_long_as_versions_come(make_stage: Make) -> None:
    stage = make_stage()
    stage.play(start(), *(message(n) for n in range(4)), manner=EXACT)
    await stage.full()
    for update in range(1, 8):
        await asyncio.sleep(0.03)
        stage.harness.publish(update)
    played = await stage.end()
    assert stage.player._stand_in.newest.update == 7
    assert not played.is_finished


async def test_a_learner_that_is_finished_ends_it(make_stage: Make) -> None:
    stage = make_stage()
    stage.play(start(), *(message(n) for n in range(40)))
    await stage.full()
    await stage.harness.server.say_bye("finished", 5.0)
    assert (await stage.end()).is_finished


async def test_what_is_refused_is_told(make_stage: Make) -> None:
    stage = make_stage()
    bad = message(1)
    bad = bad._replace(body=b"\xff" * len(bad.body))
    stage.play(start(), message(0), bad, message(2))
    played = await stage.end()
    assert played.messages == 3
    assert played.refused in ({"invalid": 1}, {"nonfinite": 1})
    assert f"refused: 1 {next(iter(played.refused))}" in describe(played, 3)


async def test_exactly_a_learner_must_be_new(make_stage: Make) -> None:
    stage = make_stage()
    stage.harness.publish(9)
    stage.play(start(), message(0), manner=EXACT)
    with pytest.raises(MismatchError, match="the learner has made 9 updates: start it anew"):
        await stage.end()


async def test_what_is_stale_now_but_was_not_then_ends_an_exact_replay(make_stage: Make) -> None:
    stage = make_stage(num_slots=1, learner={"max_lag": 2, "batch_columns": 4})
    first = start(learner={"max_lag": 2, "batch_columns": 4})
    stage.play(first, *(message(n) for n in range(8)), manner=EXACT)
    await stage.full()
    stage.harness.publish(9)
    stage.harness.train()
    with pytest.raises(RecordingError, match="refused as stale what it had admitted"):
        await stage.end()


# -------------------- learners that it does not fit


async def test_a_learner_in_lockstep_is_not_for_recordings(make_stage: Make) -> None:
    stage = make_stage(
        pace={"mode": "lockstep"}, learner={"device": "cpu"}, train={"num_actors": 4}
    )
    stage.play(start(), message(0))
    with pytest.raises(MismatchError, match=r"^pace\.mode: the learner is in lockstep"):
        await stage.end()


async def test_another_environment_is_refused_by_the_learner(make_stage: Make) -> None:
    stage = make_stage(schema=big_schema())
    stage.play(start(), message(0))
    with pytest.raises(MismatchError, match="the environment differs"):
        await stage.end()


async def test_another_memory_is_told(make_stage: Make) -> None:
    stage = make_stage(model={"core": "gru", "core_size": 8})
    stage.play(start(), message(0))
    with pytest.raises(MismatchError, match=r"^model\.core: "):
        await stage.end()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"model": {"hidden_sizes": [9]}}, "--exact: model differs: .*8.* recorded, .*9"),
        ({"learner": {"batch_columns": 8}}, "learner.batch_columns differs: 4 recorded, 8"),
        ({"learner": {"max_lag": 7}}, "max_lag differs: 100 recorded, 7 at the learner"),
    ],
)
async def test_exactly_other_settings_are_told(
    make_stage: Make, settings: dict[str, Any], says: str
) -> None:
    stage = make_stage(**settings)
    stage.play(start(), message(0), manner=EXACT)
    with pytest.raises(MismatchError, match=says):
        await stage.end()


async def test_where_no_learner_is(make_stage: Make) -> None:
    stage = make_stage()
    stage.play(start(), message(0), url="tcp://127.0.0.1:1")
    with pytest.raises(UnreachableError, match="no learner answered"):
        await stage.end()


def test_one_line_says_how_it_went() -> None:
    played = Played(messages=20, columns=160, body_bytes=3_000_000, seconds=2.0)
    assert describe(played, 10) == (
        "played 20 messages, 2.0 times the recording, in 2.0 s: 80 trajectories/s, 1.5 MB/s"
    )
