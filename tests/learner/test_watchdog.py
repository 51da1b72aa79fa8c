"""A thread that is silent for too long is shown and ended, and so is an end that takes too long;
one that waits, builds or was suspended is not.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from impala_async.config.learner import LearnerSection
from impala_async.errors import EXIT_BUG
from impala_async.learner.lock_watch import LockWatch
from impala_async.learner.watchdog import BUILD_PATIENCE, END_WITHIN_S, SAY_WITHIN_S, Watchdog
from tests.learner.hand_actor import until

SECTION = LearnerSection(stuck_dump_s=30, stuck_end_s=60)


class Watched:
    """A watchdog whose time the test makes, and whose loop never comes to anything."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.codes: list[int] = []
        self.output = path.open("w")
        self.dog = Watchdog(
            lambda seconds, callback: None, SECTION, leave=self.codes.append, output=self.output
        )
        self.loop, self.learner = self.dog.loop, self.dog.learner

    def wait(self, seconds: int) -> None:
        for _ in range(seconds):
            self.dog.tick(1.0)

    @property
    def outcome(self) -> tuple[int, list[int]]:
        """How often stacks were shown, each of which has this test's own, and exit codes."""
        return self.path.read_text().count(" in tick"), self.codes


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    made = Watched(tmp_path / "stacks")
    yield made
    made.output.close()


def test_silence_is_shown_once_and_then_ended(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    watched.loop.beat()
    # The first look only notes the beat.
    for seconds, outcome in ((30, (0, [])), (1, (1, [])), (29, (1, [])), (1, (1, [EXIT_BUG]))):
        watched.wait(seconds)
        assert watched.outcome == outcome
    assert caplog.messages == [
        "the event loop has not moved for 30 s: the stacks of all threads (learner.stuck_dump_s)",
        "the event loop has not moved for 60 s: this process ends (learner.stuck_end_s)",
    ]


def test_it_is_shown_before_it_is_ended_though_both_come_due_at_once(watched: Watched) -> None:
    watched.loop.beat()
    watched.wait(29)
    watched.dog._end_s = watched.dog._dump_s = 29
    watched.wait(1)
    assert watched.outcome == (1, [EXIT_BUG])


def test_the_one_that_moves_does_not_hide_the_other(watched: Watched) -> None:
    watched.loop.beat()
    for _ in range(70):
        watched.learner.beat()
        watched.wait(1)
    assert watched.codes[0] == EXIT_BUG


def test_who_rests_or_has_not_begun_may_be_silent(watched: Watched) -> None:
    watched.learner.beat()
    watched.wait(20)
    watched.learner.rest()
    watched.wait(500)
    assert watched.outcome == (0, [])


def test_a_build_may_take_longer_and_what_follows_it_a_part_of_that(watched: Watched) -> None:
    watched.learner.beat(BUILD_PATIENCE)
    watched.wait(251)
    assert watched.outcome == (0, [])
    watched.learner.beat()
    watched.wait(750)
    assert watched.codes == []
    watched.wait(1)
    assert watched.codes == [EXIT_BUG]


def test_a_process_that_was_suspended_is_not_ended(watched: Watched) -> None:
    watched.loop.beat()
    watched.dog.end_begins()
    watched.wait(25)
    watched.dog.tick(7200.0)
    watched.wait(4)
    assert watched.outcome == (0, [])


def test_what_cannot_be_said_does_not_hold_up_the_end(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("impala_async.learner.watchdog.SAY_WITHIN_S", 0.01)
    released = threading.Event()
    critical = "impala_async.learner.watchdog.logger.critical"
    monkeypatch.setattr(critical, lambda *_: released.wait(30))
    watched.loop.beat()
    watched.wait(61)
    assert watched.codes == [EXIT_BUG]
    released.set()
    for voice in threading.enumerate():
        if voice.name == "last words":
            voice.join(10)


def test_an_end_that_is_stuck_shows_its_stacks_and_is_ended(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    watched.dog.end_begins()
    watched.wait(29)
    # A second cause of the end gives no more time.
    watched.dog.end_begins()
    assert watched.outcome == (0, [])
    watched.wait(1)
    assert watched.outcome == (1, [EXIT_BUG])
    assert caplog.messages == [
        f"not ended within {END_WITHIN_S:g} s: the stacks of all threads",
    ]


def test_a_save_gets_its_own_time_and_is_ended_when_that_is_over(watched: Watched) -> None:
    watched.dog.end_begins()
    watched.wait(20)
    watched.dog.save_begins(600.0)
    watched.wait(599)
    assert watched.outcome == (0, [])
    watched.wait(1)
    assert watched.outcome == (1, [EXIT_BUG])


def test_it_watches_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("impala_async.learner.watchdog.TICK_S", 0.01)
    monkeypatch.setattr("impala_async.learner.watchdog.END_WITHIN_S", 0.05)
    left = threading.Event()
    with (tmp_path / "stacks").open("w") as output:
        dog = Watchdog(lambda *_: None, SECTION, leave=lambda code: left.set(), output=output)
        dog.start()
        dog.end_begins()
        assert left.wait(10)
        dog.close()
    assert "test_it_watches_by_itself" in (tmp_path / "stacks").read_text()


def test_what_takes_long_to_say_is_no_suspension(monkeypatch):
    now, seen, is_over = [0.0], [], threading.Event()
    monkeypatch.setattr("impala_async.learner.watchdog.TICK_S", 0.01)
    monkeypatch.setattr(
        "impala_async.learner.watchdog.time", SimpleNamespace(monotonic=lambda: now[0])
    )
    dog = Watchdog(lambda *_: None, SECTION)

    def tick(elapsed_s):
        seen.append(elapsed_s)
        now[0] += SAY_WITHIN_S
        if len(seen) == 2:
            is_over.set()

    monkeypatch.setattr(dog, "tick", tick)
    dog.start()
    assert is_over.wait(10)
    dog.close()
    assert seen[:2] == [0.0, 0.0]


async def test_the_loop_shows_that_it_runs_and_a_build_may_take_longer() -> None:
    dog = Watchdog(asyncio.get_running_loop().call_later, SECTION)
    dog.start()
    dog.build_begins()
    assert (dog.loop.num_beats, dog.loop.patience) == (2, BUILD_PATIENCE)
    await until(lambda: dog.loop.num_beats >= 3, "a beat")
    assert dog.loop.patience == 1
    dog.close()


class FakeLockWatch:
    def __init__(self) -> None:
        self.patience: Callable[[], int] = lambda: 1
        self.told: list[int] = []

    def beat(self) -> None:
        self.told.append(self.patience())


def test_who_watches_the_lock_is_told_of_a_build_before_it_begins() -> None:
    lock_watch = FakeLockWatch()
    dog = Watchdog(lambda *_: None, SECTION, cast(LockWatch, lock_watch))
    dog.build_begins()
    assert lock_watch.told == [BUILD_PATIENCE]
    dog.learner.beat(BUILD_PATIENCE)
    dog.learner.beat(BUILD_PATIENCE)
    # While one of them builds, the other may beat.
    dog.loop.beat()
    assert lock_watch.told == [BUILD_PATIENCE] * 2
    assert lock_watch.patience() == BUILD_PATIENCE
    dog.learner.rest()
    assert lock_watch.patience() == 1
