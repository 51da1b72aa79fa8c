"""Whatever dies in a service ends it at once, as ServiceError with the cause."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from impala_async.errors import ConfigError, ServiceError
from impala_async.learner import service
from impala_async.learner.loop.server import ActorServer
from impala_async.learner.threads.loader import HostLoader
from impala_async.training.step import UpdateStep
from tests.learner.hand_actor import until
from tests.learner.service_run import SCHEMA, ServiceRun, service_run

AT_ONCE_S = 2.0


class Boom(Exception):
    pass


def boom(*_: object) -> None:
    raise Boom("it broke")


@pytest.fixture
def released() -> Iterator[threading.Event]:
    """Set at the end of the test, for threads that were made to hang."""
    event = threading.Event()
    yield event
    event.set()


async def death_of(run: ServiceRun) -> ServiceError:
    """How it died, and that everything that it held is gone."""
    with pytest.raises(ServiceError) as raised:
        await run.end()
    assert not (run.folder.path / "service.json").exists()
    assert not (run.folder.path / "summary.json").exists()
    return raised.value


async def test_a_learner_thread_that_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    died_at: list[float] = []

    def die(*_: object, **__: object) -> None:
        died_at.append(time.monotonic())
        raise Boom("out of memory")

    monkeypatch.setattr(UpdateStep, "run", die)
    async with service_run(tmp_path) as run:
        await run.start_actors(1)
        death = await death_of(run)
        assert time.monotonic() - died_at[0] < AT_ONCE_S
    assert str(death) == "the learner thread died: Boom('out of memory')"
    assert isinstance(death.__cause__, Boom)
    assert death.__cause__.__traceback__ is not None


async def test_a_callback_of_the_loop_that_raises(tmp_path: Path) -> None:
    async with service_run(tmp_path) as run:
        await run.place()
        asyncio.get_running_loop().call_soon(boom)
        death = await death_of(run)
    assert str(death).startswith("the event loop died")
    assert isinstance(death.__cause__, Boom)


async def test_a_handler_of_messages_that_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the fault of a peer, then: a bug of ours."""
    monkeypatch.setattr("impala_async.trajectory.ColumnChecks.find_fault", boom)
    async with service_run(tmp_path) as run:
        await run.start_actors(1)
        death = await death_of(run)
    assert isinstance(death.__cause__, Boom)


async def test_a_task_that_dies(tmp_path: Path) -> None:
    async with service_run(tmp_path, learner={"report_every_s": 0.02}) as run:
        await run.place()
        run.sink.error = Boom("a sink of ours")
        death = await death_of(run)
    assert str(death).startswith("the reporter task died")
    assert isinstance(death.__cause__, Boom)


async def test_a_save_that_dies_of_a_bug(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no trouble of the disk is not survived: it would never be saved again."""
    monkeypatch.setattr("impala_async.learner.loop.saver.save_checkpoint", boom)
    async with service_run(tmp_path, checkpoint={"every_s": 0.05}) as run:
        await run.place()
        death = await death_of(run)
    assert isinstance(death.__cause__, Boom)


async def test_a_thread_that_dies_while_the_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(UpdateStep, "capture", boom)
    async with service_run(tmp_path) as run:
        await run.place()
        run.service.stop("terminated")
        death = await death_of(run)
    assert str(death).startswith("the learner thread died")
    assert isinstance(death.__cause__, Boom)


async def test_a_thread_that_does_not_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, released: threading.Event
) -> None:
    monkeypatch.setattr(service, "THREAD_END_S", 0.1)
    is_stuck = threading.Event()

    def hang(*_: object, **__: object) -> None:
        is_stuck.set()
        released.wait()

    monkeypatch.setattr(HostLoader, "get", hang)
    async with service_run(tmp_path) as run:
        await run.place()
        await until(is_stuck.is_set)
        run.service.stop("terminated")
        death = await death_of(run)
    assert "still running after" in str(death)
    assert "learner" in str(death)


async def test_a_setting_that_turns_out_wrong_stays_a_config_error(tmp_path: Path) -> None:
    """Only the first actor brings the spaces here, and with them the first look at the device."""
    async with service_run(tmp_path, schema=None, learner={"device": "cuda:99"}) as run:
        await run.start_actors(1)
        with pytest.raises(ConfigError, match=r"learner\.device"):
            await run.end()


@pytest.mark.parametrize("what", ["open", "announce"])
async def test_a_start_that_fails_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(service.LearnerService, f"_{what}", boom)
    closed: list[Any] = []
    close: Callable[[Any], None] = ActorServer.close
    monkeypatch.setattr(ActorServer, "close", lambda server: (closed.append(server), close(server)))
    async with service_run(tmp_path) as run:
        with pytest.raises(Boom):
            await run.end()
        assert len(closed) == 1
    assert SCHEMA.rows == 3
