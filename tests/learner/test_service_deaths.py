"""Whatever dies in a service ends it at once, as ServiceError with the cause."""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from impala_async.config.learner import LearnerSection
from impala_async.errors import ConfigError, ServiceError
from impala_async.launch import local
from impala_async.learner import service, watchdog
from impala_async.learner.loader import HostLoader
from impala_async.learner.loop.server import ActorServer
from tests.learner.hand_actor import until
from tests.learner.service_run import SCHEMA, ServiceRun, service_run

AT_ONCE_S = 2.0


class Boom(Exception):
    pass


def boom(*_: object) -> None:
    raise Boom("it broke")


@pytest.fixture
def released():
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


def break_a_callback(run: ServiceRun) -> None:
    asyncio.get_running_loop().call_soon(boom)


def break_a_sink(run: ServiceRun) -> None:
    run.sink.error = Boom("it broke")


async def start_an_actor(run: ServiceRun) -> None:
    await run.start_actors(1)


def stop(run: ServiceRun) -> None:
    run.service.stop("terminated")


@pytest.mark.parametrize(
    ("broken", "act", "what"),
    [
        ("training.step.UpdateStep.run", start_an_actor, "the learner thread"),
        # It is not the fault of a peer, then.
        ("trajectory.ColumnChecks.find_fault", start_an_actor, "the event loop"),
        (None, break_a_callback, "the event loop"),
        (None, break_a_sink, "the reporter task"),
        # It is no trouble of the disk: it would never be saved again.
        ("learner.loop.saver.save_checkpoint", lambda run: None, "a save"),
        ("training.step.UpdateStep.capture", stop, "the learner thread"),
    ],
)
async def test_a_death_ends_the_run_at_once_with_its_cause(
    tmp_path, monkeypatch, broken, act, what
):
    died_at: list[float] = []

    def die(*_, **__):
        died_at.append(time.monotonic())
        boom()

    if broken is not None:
        monkeypatch.setattr(f"impala_async.{broken}", die)
    settings: dict[str, Any] = {"report_every_s": 0.02}
    async with service_run(tmp_path, learner=settings, checkpoint={"every_s": 0.05}) as run:
        await run.place()
        acting = act(run)
        if acting is not None:
            await acting
        death = await death_of(run)
        assert not died_at or time.monotonic() - died_at[0] < AT_ONCE_S
    assert str(death) == f"{what} died: Boom('it broke')"
    assert isinstance(death.__cause__, Boom)
    assert death.__cause__.__traceback__ is not None


def test_an_update_that_is_no_hang_is_waited_for_at_the_end():
    assert LearnerSection().stuck_end_s <= service.THREAD_END_S < watchdog.END_WITHIN_S
    assert watchdog.END_WITHIN_S + service.SAVE_WITHIN_S < local.LEARNER_END_S


async def test_a_thread_that_does_not_end(tmp_path, monkeypatch, released):
    monkeypatch.setattr(service, "THREAD_END_S", 0.1)
    is_stuck = threading.Event()

    def hang(*_, **__):
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


async def test_a_setting_that_turns_out_wrong_stays_a_config_error(tmp_path):
    """Only the first actor brings the spaces here, and with them the first look at the device."""
    async with service_run(tmp_path, schema=None, learner={"device": "cuda:99"}) as run:
        await run.start_actors(1)
        with pytest.raises(ConfigError, match=r"learner\.device"):
            await run.end()


@pytest.mark.parametrize("what", ["open", "announce"])
async def test_a_start_that_fails_leaves_nothing_open(tmp_path, monkeypatch, what):
    monkeypatch.setattr(service.LearnerService, f"_{what}", boom)
    closed: list[Any] = []
    close: Callable[[Any], None] = ActorServer.close
    monkeypatch.setattr(ActorServer, "close", lambda server: (closed.append(server), close(server)))
    async with service_run(tmp_path) as run:
        with pytest.raises(Boom):
            await run.end()
        assert len(closed) == 1
    assert SCHEMA.rows == 3
