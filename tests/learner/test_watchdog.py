"""The watchdog: what hangs is shown, and what will not end is ended."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import cast

from impala_async.config.learner import LearnerSection
from impala_async.errors import EXIT_BUG
from impala_async.learner.lock_watch import LockWatch
from impala_async.learner.pulse import BUILD_PATIENCE
from impala_async.learner.watchdog import Watchdog
from tests.learner.hand_actor import until

SECTION = LearnerSection()


async def test_an_end_that_is_stuck_shows_its_stacks_and_is_ended(tmp_path: Path) -> None:
    left: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    with (tmp_path / "stacks").open("w+") as output:
        dog = Watchdog(
            asyncio.get_running_loop(),
            SECTION,
            end_within_s=0.01,
            leave=left.set_result,
            output=output,
        )
        dog.end_begins()
        assert await asyncio.wait_for(left, 5) == EXIT_BUG
        dog.close()
    assert "_insist" in (tmp_path / "stacks").read_text()


async def test_an_end_in_time_is_left_alone() -> None:
    codes: list[int] = []
    dog = Watchdog(asyncio.get_running_loop(), SECTION, end_within_s=0.01, leave=codes.append)
    dog.end_begins()
    dog.close()
    await asyncio.sleep(0.05)
    assert codes == []


async def test_the_second_cause_of_an_end_gives_no_more_time() -> None:
    left: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    with Path("/dev/null").open("w") as nowhere:
        dog = Watchdog(
            asyncio.get_running_loop(),
            SECTION,
            end_within_s=0.01,
            leave=left.set_result,
            output=nowhere,
        )
        dog.end_begins()
        deadline = dog._deadline
        dog.end_begins()
        assert dog._deadline is deadline
        assert await asyncio.wait_for(left, 5) == EXIT_BUG
        dog.close()


async def test_a_save_gets_its_own_time() -> None:
    codes: list[int] = []
    dog = Watchdog(asyncio.get_running_loop(), SECTION, end_within_s=0.05, leave=codes.append)
    dog.end_begins()
    dog.save_begins(60.0)
    await asyncio.sleep(0.1)
    assert codes == []
    dog.close()


async def test_a_save_that_never_ends_is_ended() -> None:
    left: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    with Path("/dev/null").open("w") as nowhere:
        dog = Watchdog(asyncio.get_running_loop(), SECTION, leave=left.set_result, output=nowhere)
        dog.end_begins()
        dog.save_begins(0.01)
        assert await asyncio.wait_for(left, 5) == EXIT_BUG
        dog.close()


async def test_the_loop_shows_that_it_runs_and_a_build_may_take_longer() -> None:
    dog = Watchdog(asyncio.get_running_loop(), SECTION)
    pulse = dog._loop_pulse
    dog.start()
    dog.build_begins()
    assert (pulse.num_beats, pulse.patience) == (2, BUILD_PATIENCE)
    await until(lambda: pulse.num_beats >= 3, "a beat")
    assert pulse.patience == 1
    dog.close()
    assert dog._next_beat is not None
    assert dog._next_beat.cancelled()


class FakeLockWatch:
    def __init__(self) -> None:
        self.patience: Callable[[], int] = lambda: 1
        self.told: list[int] = []

    def beat(self) -> None:
        self.told.append(self.patience())


async def test_who_watches_the_lock_is_told_of_a_build_before_it_begins() -> None:
    lock_watch = FakeLockWatch()
    dog = Watchdog(asyncio.get_running_loop(), SECTION, cast(LockWatch, lock_watch))
    dog.build_begins()
    assert lock_watch.told == [BUILD_PATIENCE]
    dog.learner.beat(BUILD_PATIENCE)
    dog.learner.beat(BUILD_PATIENCE)
    # While one of them builds, the other may beat.
    dog._loop_pulse.beat()
    assert lock_watch.told == [BUILD_PATIENCE] * 2
    assert lock_watch.patience() == BUILD_PATIENCE
    dog.learner.rest()
    assert lock_watch.patience() == 1
