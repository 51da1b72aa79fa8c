"""Whole runs in this process: from the bind to the summary, whatever ends them in good order."""

import asyncio
import functools
import logging
import os
import signal
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file

from impala_async import output
from impala_async.errors import EXIT_BUG, EXIT_DONE, EXIT_INTERRUPTED, EXIT_TRY_AGAIN, ConfigError
from impala_async.learner import build, learner_thread, service
from impala_async.learner.loop.saver import Saver
from impala_async.learner.recorder import Recorder
from impala_async.learner.service import LearnerService
from impala_async.metrics.names import undeclared
from impala_async.models.flat import Snapshot
from impala_async.output import Wait
from impala_async.processes import GIVE_UP
from impala_async.training.checkpoint import newest_checkpoint
from impala_async.wire.messages import ByeOk
from tests.learner.hand_actor import until
from tests.learner.server_harness import check_identities
from tests.learner.service_run import ServiceRun, service_run

SUMMARY = {
    *("env_steps_trained", "updates", "wall_s", "env_steps_per_s", "mean_return_100"),
    *("lag_quantiles", "dropped", "bottleneck", "exit_reason", "num_actors"),
}
REPORT = {
    *("time_s", "env_steps_trained", "updates", "env_steps_per_s", "mean_return_100"),
    *(f"trajectories/{n}" for n in ("received", "admitted", "rejected", "trained", "dropped")),
    *("num_actors", "trajectories/in_slots", "passes/done", "passes/partial"),
    *(f"rejected/{n}" for n in ("duplicate", "invalid", "nonfinite", "unknown_session", "stale")),
    *("rejected/dead_branch", "dropped/stale", "dropped/nonfinite_update", "dropped/shutdown"),
    *("lag/mean", "lag/max", "lag/quantiles", "loop/lag_ms_mean", "loop/lag_ms_max"),
    *(f"learner_queue/size_{n}" for n in ("count", "mean", "std", "quantiles")),
    *(f"timing_breakdown/learner_{n}_time_ms" for n in ("grad", "load", "load_wait", "dequeue")),
}


def check_end(run: ServiceRun, reason: str) -> dict[str, Any]:
    """What every orderly end leaves behind; the last report."""
    last = run.reports[-1]
    summary = run.summary
    assert summary["exit_reason"] == reason
    # The last words are of the run, not of its end.
    assert "none is connected" not in summary["bottleneck"] or not run.random_actors
    assert summary.keys() >= SUMMARY
    assert summary["wall_s"] == pytest.approx(last["learner/wall_s"] or 0.0, abs=1e-3)
    check_identities(last)
    assert last["trajectories/in_slots"] == 0
    passes = run.config.learner.num_passes * last["trajectories/trained"] + last["passes/partial"]
    assert last["passes/done"] + last["passes/init_short"] == passes
    for name in ("updates", "env_steps_trained"):
        assert summary[name] == last[name]
    checkpoint = newest_checkpoint(run.folder.checkpoints)
    assert checkpoint is not None
    assert checkpoint.version.update == last["updates"]
    assert not (run.folder.path / "service.json").exists()
    return last


def fill_disk(run: ServiceRun) -> None:
    """No checkpoint can be written from now on."""
    run.folder.checkpoints.rmdir()
    run.folder.checkpoints.write_text("in the way")


@pytest.mark.parametrize(
    "learner", [{}, {"num_passes": 3, "minibatch_buffer_size": 2, "init_num_passes": 1}]
)
async def test_a_run_to_its_goal(tmp_path, learner):
    learner = {**learner, "report_every_s": 0.05}
    async with service_run(tmp_path, stop={"env_steps": 2400}, learner=learner) as run:
        place = await run.place()
        assert (place["pid"], place["epoch"]) == (os.getpid(), 1)
        assert place.keys() == {"data_url", "weights_url", "http_url", "pid", "epoch"}
        await run.start_actors(2)
        assert await run.end() == EXIT_DONE
        assert [s.goodbyes for s in run.random_actors] == [["finished"], ["finished"]]
    last = check_end(run, "env_steps")
    assert last["env_steps_trained"] >= 2400
    assert last["trajectories/trained"] > 100
    assert last["trajectories/rejected"] == 0
    assert last["loss/total"] is not None
    assert last["learner_queue/size_count"] == last["updates"]
    assert len(run.reports) >= 2
    for report in run.reports:
        assert report.keys() >= REPORT
        assert undeclared(report) == set()
        check_identities(report)
    times = [report["time_s"] for report in run.reports]
    assert times == sorted(times)
    assert (run.summary["num_actors"], run.summary["env_id"]) == (2, run.config.env.id)
    assert run.summary["wall_s"] > 0
    assert run.summary["lag_quantiles"] == sorted(run.summary["lag_quantiles"])
    assert run.folder.load_config() == run.config
    assert (tmp_path / "epoch").read_text() == "1"


async def test_actors_are_sent_home_before_a_slow_disk_has_the_last_checkpoint(
    tmp_path, monkeypatch, caplog
):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(output, "Wait", lambda tell: Wait(tell, after_s=0.0))
    has_gone, write = threading.Event(), Saver._write

    def write_late(*arguments):
        assert has_gone.wait(20)
        write(*arguments)

    monkeypatch.setattr(Saver, "_write", write_late)
    async with service_run(tmp_path, stop={"env_steps": 300}) as run:
        await run.start_actors(2)
        await until(lambda: all(random_actor.goodbyes for random_actor in run.random_actors))
        assert not run.task.done()
        await until(lambda: "ending: waiting for " in caplog.text)
        has_gone.set()
        assert await run.end() == EXIT_DONE
    check_end(run, "env_steps")


async def test_spaces_that_nothing_can_be_built_for_are_an_error_of_the_config(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(build.psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    async with service_run(tmp_path) as run:
        with pytest.raises(ConfigError, match=r"^cannot train on .* GiB are free"):
            await run.end()


async def test_the_first_actor_that_does_not_want_too_much_memory_brings_the_spaces(
    tmp_path, monkeypatch
):
    async with service_run(tmp_path, schema=None, stop={"env_steps": 300}) as run:
        greedy = await run.actor()
        await greedy.hello()
        with monkeypatch.context() as patch:
            patch.setattr(build.psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
            await greedy.spec()
            assert "GiB are free" in await greedy.refused("mismatch")
        await run.start_actors(2)
        assert await run.end() == EXIT_DONE
    check_end(run, "env_steps")
    # It says so while it builds, for the second time now.
    told = [report for report in run.reports if report["learner/building"]]
    assert [report["updates"] for report in told] == [0, 0]
    assert told[-1]["bottleneck"].startswith("waiting: the learner builds")


async def test_without_an_actor_there_are_reports_and_a_summary_too(tmp_path):
    settings = {"report_every_s": 0.05, "lease_s": 1.0}
    async with service_run(tmp_path, learner=settings) as run:
        await run.place()
        await until(
            lambda: bool(run.sink.lines) and run.number("learner/starved_since_s") is not None,
            "starvation in a report",
        )
        assert run.number("bottleneck").startswith("actors: the learner has had no batch")
        run.service.stop("terminated")
        assert await run.end() == EXIT_DONE
    last = check_end(run, "terminated")
    assert last.keys() >= REPORT
    assert last["learner/starved_total_s"] >= 0.5
    assert run.summary["lag_quantiles"] == []


@pytest.mark.parametrize("stop", [{"mean_return": 7.5}, {"wall_s": 0.2}, {"updates": 9}])
async def test_any_limit_ends_a_run(tmp_path, stop):
    async with service_run(tmp_path, stop=stop) as run:
        await run.start_actors(1, mean_return=7.5)
        assert await run.end() == EXIT_DONE
        assert run.random_actors[0].goodbyes == ["finished"]
    (reason,) = stop
    last = check_end(run, reason)
    if reason == "mean_return":
        assert last["episodes/count"] >= 100
        assert run.summary["mean_return_100"] == 7.5
    else:
        assert run.summary[reason] >= stop[reason]


@pytest.mark.parametrize(
    ("number", "reason", "code"),
    [
        (signal.SIGTERM, "terminated", EXIT_DONE),
        (signal.SIGHUP, "terminated", EXIT_DONE),
        (signal.SIGINT, "interrupted", EXIT_INTERRUPTED),
        (GIVE_UP, "actor_failed", EXIT_DONE),
    ],
)
async def test_a_signal_ends_a_run_in_good_order(tmp_path, monkeypatch, number, reason, code):
    # The tests may run under nohup.
    monkeypatch.setattr(service, "REQUESTS", (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    async with service_run(tmp_path) as run:
        await run.start_actors(2)
        await run.trained(3)
        os.kill(os.getpid(), number)
        assert await run.end() == code
        assert all(s.goodbyes == ["restarting"] for s in run.random_actors)
    check_end(run, reason)


async def test_in_lockstep_a_lost_actor_may_end_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(service, "GOODBYE_S", 0.01)
    pace = {"mode": "lockstep", "on_loss": "stop"}
    sections = {"pace": pace, "learner": {"batch_columns": 2}, "train": {"num_actors": 2}}
    async with service_run(tmp_path, **sections) as run:
        lost, _ = [await (await run.actor()).join() for _ in range(2)]
        await lost.say(ByeOk(lost.session))
        assert await run.end() == EXIT_TRY_AGAIN
    check_end(run, "actor_lost")


class SlowToStop(LearnerService):
    """Its loop stands still, once a stop is known, until the learner thread has ended."""

    def stop(self, reason: str) -> None:
        super().stop(reason)
        for thread in threading.enumerate():
            if thread.name == "learner":
                thread.join()


async def test_the_last_state_is_saved_however_slow_the_loop_is(tmp_path):
    async with service_run(tmp_path, stop={"env_steps": 300}, make=SlowToStop) as run:
        await run.start_actors(1)
        assert await run.end() == EXIT_DONE
    check_end(run, "env_steps")


async def test_a_disk_that_takes_no_checkpoint_does_not_end_training(tmp_path, caplog):
    async with service_run(tmp_path, checkpoint={"every_s": 0.05}) as run:
        fill_disk(run)
        await run.start_actors(1)
        await until(lambda: caplog.text.count("no other one is found") >= 2, "two tries")
        before = run.number("updates")
        await run.trained(before + 20)
        run.folder.checkpoints.unlink()
        run.service.stop("terminated")
        assert await run.end() == EXIT_DONE
    # The disk has room again: the last one is there.
    check_end(run, "terminated")


@pytest.mark.parametrize("stop", [{"env_steps": 100}, {}], ids=["at its goal", "terminated"])
async def test_an_end_whose_checkpoint_is_not_written_is_no_success(tmp_path, caplog, stop):
    async with service_run(tmp_path, stop=stop) as run:
        fill_disk(run)
        await run.start_actors(1)
        if not stop:
            await run.trained(1)
            run.service.stop("terminated")
        assert await run.end() == EXIT_TRY_AGAIN
    assert run.summary["exit_reason"] == "checkpoint_not_written"
    assert f"cannot write checkpoint {run.folder.checkpoints}" in caplog.text


@pytest.mark.parametrize("is_seen_first", [True, False], ids=["in mid-run", "at its end"])
async def test_a_run_that_loses_its_folder_ends_without_success(
    tmp_path, monkeypatch, caplog, *, is_seen_first
):
    monkeypatch.setattr(service, "REAP_EVERY_S", 0.02 if is_seen_first else 1.0)
    async with service_run(tmp_path / "run") as run:
        await run.start_actors(1)
        await run.trained(1)
        run.folder.path.rename(tmp_path / "moved")
        if not is_seen_first:
            run.service.stop("terminated")
        assert await run.end() == EXIT_TRY_AGAIN
    assert not run.folder.path.exists()
    assert caplog.text.count("run: it is gone, or another one lies there") == 1
    assert (tmp_path / "moved" / "config.json").exists()


@pytest.mark.parametrize("is_empty", [True, False])
async def test_a_recording_of_nothing_is_no_success(tmp_path, *, is_empty):
    recorder = Recorder(tmp_path / "recording", b"run")
    make = functools.partial(LearnerService, recorder=recorder)
    async with service_run(tmp_path / "run", make=make) as run:
        await run.place()
        recorder.is_empty = is_empty
        run.service.stop("terminated")
        assert await run.end() == (EXIT_TRY_AGAIN if is_empty else EXIT_DONE)


async def test_a_learner_that_nobody_can_be_told_of_ends_without_a_save(tmp_path):
    (tmp_path / "service.json").mkdir()
    async with service_run(tmp_path) as run:
        with pytest.raises(ConfigError, match="--run-dir: cannot write to"):
            await run.end()
        # The last words of its thread come when all is closed.
        for thread in threading.enumerate():
            if thread.name == "learner":
                thread.join()
        for _ in range(3):
            await asyncio.sleep(0)
        assert run.service._saver._writing is None
    assert list(run.folder.checkpoints.iterdir()) == []


async def test_a_session_ends_with_its_lease_however_short(tmp_path):
    settings = {"lease_s": 1.0, "report_every_s": 0.05}
    async with service_run(tmp_path, learner=settings) as run:
        actor = await run.actor()
        await actor.join()
        await until(lambda: bool(run.sink.lines) and run.number("num_actors") == 1)
        # Nothing is heard of it any more, though its connection stays.
        await until(lambda: run.number("num_actors") == 0, "the end of the lease")
        assert run.number("sessions/expired") == 1
        assert run.number("credit/granted_columns") == 0


async def test_a_run_without_numbers_ends_with_what_it_had_learned(tmp_path, monkeypatch):
    monkeypatch.setattr(learner_thread, "MOST_SKIPPED_IN_A_ROW", 3)
    async with service_run(tmp_path, algorithm={"reward_scale": 1e30}) as run:
        await run.start_actors(1)
        assert await run.end() == EXIT_BUG
    assert run.summary["updates"] == 0
    check_end(run, "not_finite")
    found = newest_checkpoint(tmp_path / "checkpoints")
    assert found is not None
    assert found.version == (1, 0)
    kept = load_file(tmp_path / "not-finite-1-0.safetensors")
    assert kept["is_failed_B"].all()


async def test_weights_that_are_not_finite_end_a_run_as_that_and_not_as_a_full_disk(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(Snapshot, "take", lambda snapshot, version: None)
    async with service_run(tmp_path) as run:
        fill_disk(run)
        assert await run.end() == EXIT_BUG
    assert run.summary["exit_reason"] == "not_finite"
