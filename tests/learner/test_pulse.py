"""Who is silent for too long is shown and ended; who waits, builds or was suspended is not."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from impala_async.errors import EXIT_BUG
from impala_async.learner.pulse import BUILD_PATIENCE, Pulse, PulseWatch


class Kennel:
    """A watch over two pulses, whose time the test makes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.one, self.other = Pulse("one"), Pulse("other")
        self.codes: list[int] = []
        self.output = path.open("w")
        self.watch = PulseWatch(
            (self.one, self.other),
            dump_s=30,
            end_s=60,
            leave=self.codes.append,
            output=self.output,
        )

    def wait(self, seconds: int) -> "Kennel":
        for _ in range(seconds):
            self.watch.tick(1.0)
        return self

    @property
    def num_dumps(self) -> int:
        """Of stacks, each of which has this test's own."""
        return self.path.read_text().count(" in tick")


@pytest.fixture
def kennel(tmp_path: Path) -> Iterator[Kennel]:
    made = Kennel(tmp_path / "stacks")
    yield made
    made.output.close()


def test_silence_is_shown_once_and_then_ended(
    kennel: Kennel, caplog: pytest.LogCaptureFixture
) -> None:
    kennel.one.beat()
    # The first look only notes the beat.
    kennel.wait(30)
    assert (kennel.num_dumps, kennel.codes) == (0, [])
    kennel.wait(1)
    assert kennel.num_dumps == 1
    kennel.wait(29)
    assert (kennel.num_dumps, kennel.codes) == (1, [])
    kennel.wait(1)
    assert (kennel.num_dumps, kennel.codes) == (1, [EXIT_BUG])
    assert caplog.messages == [
        "one has not moved for 30 s: the stacks of all threads (learner.stuck_dump_s)",
        "one has not moved for 60 s: this process ends (learner.stuck_end_s)",
    ]


def test_it_is_shown_before_it_is_ended_though_both_come_due_at_once(kennel: Kennel) -> None:
    kennel.one.beat()
    kennel.wait(29)
    kennel.watch._end_s = 29
    kennel.watch._dump_s = 29
    kennel.wait(1)
    assert (kennel.num_dumps, kennel.codes) == (1, [EXIT_BUG])


def test_the_one_that_moves_does_not_hide_the_other(kennel: Kennel) -> None:
    kennel.one.beat()
    for _ in range(70):
        kennel.other.beat()
        kennel.wait(1)
    assert kennel.codes[0] == EXIT_BUG


def test_who_rests_or_has_not_begun_may_be_silent(kennel: Kennel) -> None:
    kennel.one.beat()
    kennel.wait(20)
    kennel.one.rest()
    kennel.wait(500)
    assert (kennel.num_dumps, kennel.codes) == (0, [])


def test_a_build_may_take_longer_and_what_follows_it_a_part_of_that(kennel: Kennel) -> None:
    kennel.one.beat(BUILD_PATIENCE)
    kennel.wait(251)
    assert (kennel.num_dumps, kennel.codes) == (0, [])
    kennel.one.beat()
    kennel.wait(750)
    assert kennel.codes == []
    kennel.wait(1)
    assert kennel.codes == [EXIT_BUG]


def test_a_process_that_was_suspended_is_not_ended(kennel: Kennel) -> None:
    kennel.one.beat()
    kennel.wait(25)
    kennel.watch.tick(7200.0)
    kennel.wait(29)
    assert (kennel.num_dumps, kennel.codes) == (0, [])


def test_what_cannot_be_said_does_not_hold_up_the_end(
    kennel: Kennel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("impala_async.learner.pulse.SAY_WITHIN_S", 0.01)
    released = threading.Event()
    monkeypatch.setattr("impala_async.learner.pulse.logger.critical", lambda *_: released.wait(30))
    kennel.one.beat()
    kennel.wait(61)
    assert kennel.codes == [EXIT_BUG]
    released.set()
    for voice in threading.enumerate():
        if voice.name == "last words":
            voice.join(10)


def test_it_watches_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("impala_async.learner.pulse.TICK_S", 0.01)
    left, pulse = threading.Event(), Pulse("it")
    pulse.beat()
    with (tmp_path / "stacks").open("w") as output:
        watch = PulseWatch(
            [pulse], dump_s=0.05, end_s=0.1, leave=lambda code: left.set(), output=output
        )
        watch.start()
        assert left.wait(10)
        watch.close()
    assert "test_it_watches_by_itself" in (tmp_path / "stacks").read_text()
