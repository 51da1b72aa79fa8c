"""Whole runs in this process: from the bind to the summary, whatever ends them in good order."""

import asyncio
import errno
import functools
import logging
import os
import signal
import threading
import time

import pytest
from safetensors.torch import load_file

from impala_async import output
from impala_async.config.learner import LearnerSection
from impala_async.errors import CheckpointError, ConfigError, Exit, ServiceError
from impala_async.launch import local
from impala_async.learner import build, learner_thread, service, watchdog
from impala_async.learner.loader import HostLoader
from impala_async.learner.loop.saver import Saver
from impala_async.learner.loop.server import ActorServer
from impala_async.learner.recorder import Recorder
from impala_async.learner.service import LearnerService
from impala_async.metrics.host import Memory
from impala_async.metrics.names import undeclared
from impala_async.models.flat import Snapshot
from impala_async.output import Wait
from impala_async.processes import GIVE_UP
from impala_async.runs.folder import UNSAVED, RunFolder
from impala_async.training.checkpoint import whole_checkpoints
from impala_async.wire.messages import BYE_REASONS, VERDICTS, Bye, ByeOk
from tests.learner.hand_actor import until
from tests.learner.server_harness import check_identities
from tests.learner.service_run import service_run

SUMMARY = {
    *("env_steps_trained", "updates", "wall_s", "env_steps_per_s", "mean_return_100"),
    *("lag_quantiles", "dropped", "bottleneck", "exit_reason", "num_actors"),
}


def check_end(run, reason):
    """Check all that an orderly end leaves behind; returns the last report."""
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
    checkpoint = next(whole_checkpoints(run.folder.checkpoints), None)
    assert checkpoint.version.update == last["updates"]
    assert not (run.folder.path / "service.json").exists()
    return last


def fill_disk(run):
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
        names = {"data_url", "weights_url", "is_encrypted", "http_url", "pid", "epoch"}
        assert place.keys() == names
        await run.start_actors(2)
        assert await run.end() == Exit.DONE
        assert [s.goodbyes for s in run.random_actors] == [["finished"], ["finished"]]
    last = check_end(run, "env_steps")
    assert last["env_steps_trained"] >= 2400
    assert last["trajectories/trained"] > 100
    assert last["trajectories/rejected"] == 0
    assert last["loss/total"] is not None
    assert last["learner_queue/size_count"] == last["updates"]
    assert len(run.reports) >= 2
    for report in run.reports:
        assert undeclared(report) == set()
        check_identities(report)
    times = [report["time_s"] for report in run.reports]
    assert times == sorted(times)
    assert (run.summary["num_actors"], run.summary["env_id"]) == (2, run.config.env.id)
    assert run.summary["wall_s"] > 0
    assert run.summary["lag_quantiles"] == sorted(run.summary["lag_quantiles"])
    assert run.folder.load_config() == run.config
    assert (tmp_path / "epoch").read_text() == "1"


async def test_a_slow_disk_has_one_checkpoint_at_a_time_and_actors_go_home_after_the_last(
    tmp_path, monkeypatch, caplog
):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(output, "Wait", lambda tell: Wait(tell, after_s=0.0))
    may_write, write, written = threading.Event(), Saver._write, []

    def write_late(saver, captured, *others):
        written.append(captured.progress.update)
        assert may_write.wait(20)
        write(saver, captured, *others)

    monkeypatch.setattr(Saver, "_write", write_late)
    sections = {"stop": {"env_steps": 3000}, "checkpoint": {"every_s": 0.01}}
    async with service_run(tmp_path, **sections) as run:
        late = await run.actor()
        await late.hello()
        await run.start_actors(2)
        await until(lambda: "ending: waiting for the last checkpoint" in caplog.text)
        assert not run.task.done()
        # A checkpoint that fell due while one was written is left out.
        assert len(written) == 1
        # Where the disk takes no checkpoint, the run goes on, and its actors are wanted.
        assert not any(random_actor.goodbyes for random_actor in [*run.random_actors])
        may_write.set()
        await late.hear(lambda: late.byes)
        assert [bye.reason for bye in late.byes] == [BYE_REASONS.index("finished")]
        await late.say(ByeOk(late.session))
        assert await run.end() == Exit.DONE
    assert written == [written[0], check_end(run, "env_steps")["updates"]]


async def test_spaces_that_nothing_can_be_built_for_are_an_error_of_the_config(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(build, "find_memory", lambda: Memory(2000, 1000))
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
            patch.setattr(build, "find_memory", lambda: Memory(2000, 1000))
            await greedy.spec()
            assert "GiB are free" in await greedy.refused("mismatch")
        await run.start_actors(2)
        assert await run.end() == Exit.DONE
    check_end(run, "env_steps")
    # It says so while it builds, for the second time now.
    told = [report for report in run.reports if report["learner/building"]]
    assert [report["updates"] for report in told] == [0, 0]
    assert told[-1]["bottleneck"].startswith("waiting: the learner builds")


@pytest.mark.parametrize("stop", [{"mean_return": 7.5}, {"wall_s": 0.2}, {"updates": 9}])
async def test_any_limit_ends_a_run(tmp_path, stop):
    async with service_run(tmp_path, stop=stop) as run:
        await run.start_actors(1, mean_return=7.5)
        assert await run.end() == Exit.DONE
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
        (signal.SIGTERM, "terminated", Exit.DONE),
        (signal.SIGHUP, "terminated", Exit.DONE),
        (signal.SIGINT, "interrupted", Exit.INTERRUPTED),
        (GIVE_UP, "actor_failed", Exit.DONE),
    ],
)
async def test_a_signal_ends_a_run_in_good_order(tmp_path, monkeypatch, number, reason, code):
    # The tests may run under nohup.
    monkeypatch.setattr(service, "REQUESTS", (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    monkeypatch.setattr(service.os, "_exit", lambda code: pytest.fail("it quit at once"))
    async with service_run(tmp_path) as run:
        await run.start_actors(2)
        await run.trained(3)
        os.kill(os.getpid(), number)
        await until(run.service._ended.done)
        os.kill(os.getpid(), number)  # its echo
        assert await run.end() == code
        assert all(s.goodbyes == ["restarting"] for s in run.random_actors)
    check_end(run, reason)


async def test_a_ctrl_c_while_a_run_ends_by_itself_loses_no_checkpoint(tmp_path, monkeypatch):
    quits, may_write, write = [], threading.Event(), Saver._write

    def write_late(saver, *given):
        assert may_write.wait(20)
        write(saver, *given)

    def quit_at_once(code):
        quits.append(code)
        may_write.set()

    monkeypatch.setattr(Saver, "_write", write_late)
    monkeypatch.setattr(service.os, "_exit", quit_at_once)
    monkeypatch.setattr(service, "without_echo", lambda hear: hear)
    async with service_run(tmp_path, stop={"env_steps": 300}) as run:
        await run.start_actors(2)
        await until(run.service._ended.done)
        run.service._on_interrupt()
        await asyncio.sleep(0)
        assert (quits, run.task.done()) == ([], False)
        run.service._on_interrupt()
        assert quits == [Exit.INTERRUPTED]
        assert await run.end() == Exit.DONE
    check_end(run, "env_steps")


async def test_where_the_last_checkpoint_is_not_written_actors_come_back(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Saver, "_write", fail)
    async with service_run(tmp_path, stop={"env_steps": 300}) as run:
        await run.start_actors(2)
        assert await run.end() == Exit.TRY_AGAIN
        assert all(actor.goodbyes == ["restarting"] for actor in run.random_actors)
    assert RunFolder(run.service._folder.path).read_json("summary.json")["exit_reason"] == UNSAVED


async def test_in_lockstep_a_lost_actor_may_end_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(service, "GOODBYE_S", 0.01)
    pace = {"mode": "lockstep", "on_loss": "stop"}
    sections = {"pace": pace, "learner": {"batch_columns": 2}, "train": {"num_actors": 2}}
    async with service_run(tmp_path, **sections) as run:
        lost, _ = [await (await run.actor()).join() for _ in range(2)]
        await lost.say(ByeOk(lost.session))
        assert await run.end() == Exit.TRY_AGAIN
    check_end(run, "actor_lost")


@pytest.mark.parametrize("mode", ["async", "lockstep"])
async def test_in_lockstep_what_is_full_at_the_end_is_trained(tmp_path, monkeypatch, mode):
    is_ending, get = threading.Event(), HostLoader.get

    def get_late(*given, **how):
        assert is_ending.wait(20)
        return get(*given, **how)

    monkeypatch.setattr(service, "GOODBYE_S", 0.01)
    monkeypatch.setattr(HostLoader, "get", get_late)
    sections = {"pace": {"mode": mode}, "learner": {"batch_columns": 1}, "train": {"num_actors": 1}}
    async with service_run(tmp_path, **sections) as run:
        await (await (await run.actor()).join()).send()
        run.service.stop("terminated")
        await asyncio.sleep(0.05)
        is_ending.set()
        assert await run.end() == Exit.DONE
    last = check_end(run, "terminated")
    is_trained = int(mode == "lockstep")
    assert (last["trajectories/trained"], last["dropped/shutdown"]) == (is_trained, 1 - is_trained)


async def test_a_disk_that_takes_no_checkpoint_does_not_end_training(tmp_path, caplog):
    async with service_run(tmp_path, checkpoint={"every_s": 0.05}) as run:
        fill_disk(run)
        await run.start_actors(1)
        await until(lambda: caplog.text.count("no other one can be read") >= 2, "two tries")
        before = run.number("updates")
        await run.trained(before + 20)
        run.folder.checkpoints.unlink()
        run.service.stop("terminated")
        assert await run.end() == Exit.DONE
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
        assert await run.end() == Exit.TRY_AGAIN
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
        assert await run.end() == Exit.TRY_AGAIN
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
        assert await run.end() == (Exit.TRY_AGAIN if is_empty else Exit.DONE)


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
    assert list(run.folder.checkpoints.iterdir()) == []


async def test_a_run_without_numbers_ends_with_what_it_had_learned(tmp_path, monkeypatch):
    monkeypatch.setattr(learner_thread, "MOST_SKIPPED_IN_A_ROW", 3)
    async with service_run(
        tmp_path, algorithm={"reward_scale": 1e30, "normalize_returns": False}
    ) as run:
        await run.start_actors(1)
        assert await run.end() == Exit.BUG
    assert run.summary["updates"] == 0
    check_end(run, "not_finite")
    assert next(whole_checkpoints(tmp_path / "checkpoints"), None).version == (1, 0)
    kept = load_file(tmp_path / "not-finite-1-0.safetensors")
    assert kept["is_failed_B"].all()


async def test_weights_that_are_not_finite_end_a_run_as_that_and_not_as_a_full_disk(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(Snapshot, "take", lambda snapshot, version: None)
    async with service_run(tmp_path) as run:
        fill_disk(run)
        assert await run.end() == Exit.BUG
    assert run.summary["exit_reason"] == "not_finite"


# -------------------- whatever dies ends it at once, as ServiceError with the cause

AT_ONCE_S = 2.0


class Boom(Exception):
    pass


def boom(*_):
    raise Boom("it broke")


async def death_of(run):
    """How it died, and that everything that it held is gone."""
    with pytest.raises(ServiceError) as raised:
        await run.end()
    assert not (run.folder.path / "service.json").exists()
    assert not (run.folder.path / "summary.json").exists()
    return raised.value


@pytest.mark.parametrize(
    ("broken", "act", "what"),
    [
        ("training.step.UpdateStep.run", lambda run: run.start_actors(1), "the learner thread"),
        # It is not the fault of a peer, then.
        ("trajectory.ColumnChecks.find_fault", lambda run: run.start_actors(1), "the event loop"),
        (None, lambda run: asyncio.get_running_loop().call_soon(boom), "the event loop"),
        (None, lambda run: setattr(run.sink, "error", Boom("it broke")), "the reporter task"),
        # It is no trouble of the disk: it would never be saved again.
        ("learner.loop.saver.save_checkpoint", lambda run: None, "a save"),
        (
            "training.step.UpdateStep.capture",
            lambda run: run.service.stop("terminated"),
            "the learner thread",
        ),
    ],
)
async def test_a_death_ends_the_run_at_once_with_its_cause(
    tmp_path, monkeypatch, broken, act, what
):
    died_at = []

    def die(*_, **__):
        died_at.append(time.monotonic())
        boom()

    if broken is not None:
        monkeypatch.setattr(f"impala_async.{broken}", die)
    settings = {"report_every_s": 0.02}
    async with service_run(tmp_path, learner=settings, checkpoint={"every_s": 0.05}) as run:
        await run.place()
        if asyncio.iscoroutine(acting := act(run)):
            await acting
        death = await death_of(run)
        assert not died_at or time.monotonic() - died_at[0] < AT_ONCE_S
    assert str(death) == f"{what} died: Boom('it broke')"
    assert isinstance(death.__cause__, Boom)
    assert death.__cause__.__traceback__ is not None


async def test_a_thread_that_does_not_end(tmp_path, monkeypatch):
    # An update that is no hang is waited for.
    assert LearnerSection().stuck_end_s <= service.THREAD_END_S < watchdog.END_WITHIN_S
    assert watchdog.END_WITHIN_S + service.SAVE_WITHIN_S < local.LEARNER_END_S
    monkeypatch.setattr(service, "THREAD_END_S", 0.1)
    is_stuck, may_end = threading.Event(), threading.Event()
    monkeypatch.setattr(HostLoader, "get", lambda *_, **__: is_stuck.set() or may_end.wait())
    async with service_run(tmp_path) as run:
        await until(is_stuck.is_set)
        run.service.stop("terminated")
        death = await death_of(run)
        may_end.set()
    assert str(death) == "still running after 0 s: the learner thread"


async def test_a_setting_that_turns_out_wrong_stays_a_config_error(tmp_path):
    """Here the first actor brings the spaces, and only then the device is looked at."""
    async with service_run(tmp_path, schema=None, learner={"device": "cuda:99"}) as run:
        await run.start_actors(1)
        with pytest.raises(ConfigError, match=r"learner\.device"):
            await run.end()


@pytest.mark.parametrize("what", ["open", "announce"])
async def test_a_start_that_fails_leaves_nothing_open(tmp_path, monkeypatch, what):
    monkeypatch.setattr(service.LearnerService, f"_{what}", boom)
    closed = []
    close = ActorServer.close
    monkeypatch.setattr(ActorServer, "close", lambda server: (closed.append(server), close(server)))
    async with service_run(tmp_path) as run:
        with pytest.raises(Boom):
            await run.end()
        assert len(closed) == 1


# -------------------- a run that goes on: counters, watermarks, lineage, and a new epoch


async def first_start(path, monkeypatch):
    """A start with one hand-made actor that sent five messages; ended in good order."""
    # Hand-made actors do not answer a goodbye.
    monkeypatch.setattr(service, "GOODBYE_S", 0.01)
    async with service_run(path) as run:
        await run.start_actors(2)
        await run.trained(20)
        actor = await run.actor()
        await actor.join()
        for _ in range(5):
            await actor.send()
        await actor.say(Bye(actor.session, BYE_REASONS.index("leaving")))
        await actor.hear(lambda: bool(actor.others))
        run.service.stop("terminated")
        assert await run.end() == Exit.DONE
    return run, actor


async def come_back(run, former):
    """The same actor at the next start, which remembers nothing of what it sent."""
    actor = await run.actor()
    actor.uuid = former.uuid
    await actor.hello(run_id=run.folder.run_id, epoch=1, lowest_unsettled=0)
    await actor.spec()
    await actor.hear(lambda: bool(actor.grants))
    return actor


async def test_numbers_go_on_where_they_were(tmp_path, monkeypatch):
    before, _ = await first_start(tmp_path, monkeypatch)
    num_before, last = len(before.reports), before.reports[-1]
    goal = last["env_steps_trained"] + 600
    async with service_run(tmp_path, is_resumed=True, stop={"env_steps": goal}) as run:
        place = await run.place()
        assert place["epoch"] == 2
        await run.start_actors(2)
        assert await run.end() == Exit.DONE
    reports = run.reports[num_before:]
    for name in ("updates", "env_steps_trained", "trajectories/received", "trajectories/trained",
                 "passes/done", "episodes/count", "time_s"):  # fmt: skip
        values = [last[name], *(report[name] for report in reports)]
        assert values == sorted(values), name
    final = reports[-1]
    assert final["env_steps_trained"] >= goal
    assert final["weights/version_epoch"] == 2
    check_identities(final)
    assert final["trajectories/in_slots"] == 0
    # The rates in the summary are of this start, from its first update.
    begun = run.service._reading.first_update[1]
    assert begun > last["env_steps_trained"]
    steps = final["env_steps_trained"] - begun
    assert run.summary["env_steps_per_s"] == pytest.approx(steps / run.summary["wall_s"], rel=0.01)


async def test_what_was_settled_or_made_by_an_abandoned_branch_is_not_taken_again(
    tmp_path, monkeypatch
):
    before, former = await first_start(tmp_path, monkeypatch)
    fork = before.reports[-1]["updates"]
    dead = VERDICTS.index("dead_branch")
    async with service_run(tmp_path, is_resumed=True) as run:
        actor = await come_back(run, former)
        assert actor.settled == 5
        duplicates = run.service._server.report()["rejected/duplicate"]
        for seq in range(5):
            await actor.send(seq=seq, epoch=1, update=0, is_waiting=False)
        await until(lambda: run.service._server.report()["rejected/duplicate"] == duplicates + 5)
        check_identities(run.service._server.report())
        # And it may go on from there.
        actor.seq = 5
        await actor.send(epoch=1, update=fork)
        assert (actor.settled, actor.verdicts) == (6, [])
        await actor.send(epoch=1, update=fork + 1)
        assert actor.verdicts == [[6, dead]]
        await run.start_actors(1)
        await run.trained(fork + 3)
        # It ends as by a crash: nothing is saved, and so it is a dead branch itself.
        run.task.cancel()
    async with service_run(tmp_path, is_resumed=True) as run:
        assert (await run.place())["epoch"] == 3
        actor = await come_back(run, former)
        actor.seq = 5
        await actor.send(epoch=2, update=fork + 1)
        assert actor.verdicts == [[5, dead]]
        await actor.send(epoch=1, update=fork)
        assert len(actor.verdicts) == 1
    assert (tmp_path / "epoch").read_text() == "3"


async def test_a_resume_that_fails_leaves_the_run_as_it_was(tmp_path, monkeypatch):
    before, _ = await first_start(tmp_path, monkeypatch)
    async with service_run(tmp_path, is_resumed=True, algorithm={"optimizer": "rmsprop"}) as run:
        with pytest.raises(CheckpointError, match="state of Adam does not fit RMSprop"):
            await run.end()
    assert RunFolder(tmp_path).load_config() == before.config
    async with service_run(tmp_path, is_resumed=True, algorithm={"lr": 0.25}) as run:
        await run.place()
        assert run.folder.load_config() == run.config != before.config
