"""The watchdog: what hangs is shown, and what will not end is ended."""

import asyncio
import faulthandler
from pathlib import Path

import pytest

from impala_async.errors import EXIT_BUG
from impala_async.learner import watchdog
from impala_async.learner.watchdog import Watchdog


async def test_an_end_that_is_stuck_shows_its_stacks_and_is_ended(tmp_path: Path) -> None:
    left: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    with (tmp_path / "stacks").open("w+") as output:
        dog = Watchdog(
            asyncio.get_running_loop(), end_within_s=0.01, leave=left.set_result, output=output
        )
        dog.end_begins()
        assert await asyncio.wait_for(left, 5) == EXIT_BUG
        dog.close()
    assert "_insist" in (tmp_path / "stacks").read_text()


async def test_an_end_in_time_is_left_alone() -> None:
    codes: list[int] = []
    dog = Watchdog(asyncio.get_running_loop(), end_within_s=0.01, leave=codes.append)
    dog.end_begins()
    dog.close()
    await asyncio.sleep(0.05)
    assert codes == []


async def test_the_second_cause_of_an_end_gives_no_more_time() -> None:
    left: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    with Path("/dev/null").open("w") as nowhere:
        dog = Watchdog(
            asyncio.get_running_loop(), end_within_s=0.01, leave=left.set_result, output=nowhere
        )
        dog.end_begins()
        deadline = dog._deadline
        dog.end_begins()
        assert dog._deadline is deadline
        assert await asyncio.wait_for(left, 5) == EXIT_BUG
        dog.close()


async def test_a_save_gets_its_own_time() -> None:
    codes: list[int] = []
    dog = Watchdog(asyncio.get_running_loop(), end_within_s=0.05, leave=codes.append)
    dog.end_begins()
    dog.save_begins(60.0)
    await asyncio.sleep(0.1)
    assert codes == []
    dog.close()


async def test_a_save_that_never_ends_is_ended() -> None:
    left: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    with Path("/dev/null").open("w") as nowhere:
        dog = Watchdog(asyncio.get_running_loop(), leave=left.set_result, output=nowhere)
        dog.end_begins()
        dog.save_begins(0.01)
        assert await asyncio.wait_for(left, 5) == EXIT_BUG
        dog.close()


def test_a_loop_that_stands_still_shows_its_stacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "STUCK_AFTER_S", 0.05)
    loop = asyncio.new_event_loop()
    path = tmp_path / "stacks"
    with path.open("w+") as output:
        dog = Watchdog(loop, output=output)
        dog.loop_runs()
        waited = 0
        while not path.stat().st_size and waited < 10**9:
            waited += 1  # busy, as a loop is that does not come back
        dog.close()
    loop.close()
    faulthandler.cancel_dump_traceback_later()
    assert "test_a_loop_that_stands_still" in path.read_text()
