"""Reports: rates of an interval, means of episodes, and never late because learning is."""

import asyncio
import errno
import itertools
import statistics
import time
import tracemalloc

import numpy as np
import pytest

from impala_async.learner.loop import reporter
from impala_async.learner.loop.reporter import EpisodeStats, Reporter
from impala_async.metrics.report import BATCH_WAIT_MS, UPDATE_MS
from impala_async.wire.messages import EPISODE
from tests.learner.hand_actor import until


def episodes(*pairs):
    return np.array(list(pairs), EPISODE)


def test_the_mean_return_needs_a_hundred_episodes_and_an_interval_has_its_own_means():
    stats = EpisodeStats()
    nothing = {"episodes/return_mean": None, "episodes/length_mean": None}
    means = {"mean_return": None, "mean_return_100": None}
    assert stats.report() == {**means, "episodes/count": 0, **nothing}
    stats.take(episodes((1.0, 10), (4.0, 20)))
    stats.take(episodes((-2.0, 60)))
    report = stats.report()
    assert (report["episodes/return_mean"], report["episodes/length_mean"]) == (1.0, 30.0)
    assert stats.report() == {**means, "mean_return": 1.0, "episodes/count": 3, **nothing}
    stats.take(episodes(*[(1.0, 5)] * 96))
    assert (stats.mean_return, stats.count) == (None, 99)
    stats.take(episodes((101.0, 5)))
    assert stats.mean_return == 2.0
    stats.take(episodes(*[(float(n), 5) for n in range(100)]))
    assert (stats.mean_return, stats.count) == (49.5, 200)
    resumed = EpisodeStats()
    resumed.restore(**stats.save())  # the form in which a checkpoint has it
    resumed.take(episodes((100.0, 1)))
    assert (resumed.count, resumed.mean_return) == (201, 50.5)


def test_an_interval_of_many_episodes_takes_no_memory():
    stats, many = EpisodeStats(), episodes(*[(1e15, 1)] * 1000)
    tracemalloc.start()
    for _ in range(50):
        stats.take(many)
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grown < 100_000
    assert np.isclose(stats.report()["episodes/return_mean"], 1e15)


class Sink:
    def __init__(self):
        self.lines, self.times = [], []

    def write(self, report):
        self.lines.append(report)
        self.times.append(time.monotonic())


class ReporterHarness:
    """A reporter on a clock of its own."""

    def __init__(self, **settings):
        self.now, self.env_steps, self.num_asked = 50.0, 1000, 0
        self.sinks = [Sink(), Sink()]
        self.reporter = Reporter(
            **{
                "every_s": 2.0,
                "sinks": self.sinks,
                "parts": [lambda: {"updates": 7}, lambda: {"num_actors": 0}],
                "env_steps": lambda: self.env_steps,
                "frames_per_step": 1,
                "ask": self._ask,
                "clock": lambda: self.now,
                **settings,
            }
        )

    def _ask(self):
        self.num_asked += 1

    def after(self, seconds, env_steps):
        self.now += seconds
        self.env_steps += env_steps
        return self.reporter.report()


def test_a_rate_is_that_of_the_interval():
    harness = ReporterHarness(earlier_s=10.0, frames_per_step=4)
    first = harness.after(2.0, 500)
    assert (first["time_s"], first["env_steps_trained"]) == (12.0, 1500)
    assert (first["env_steps_per_s"], first["frames_per_s"]) == (250.0, 1000.0)
    second = harness.after(4.0, 400)
    assert (second["time_s"], second["env_steps_per_s"]) == (16.0, 100.0)
    assert harness.after(4.0, 0)["env_steps_per_s"] == 0.0
    assert harness.reporter.run_s(harness.now) == 20.0
    # Two reports at one moment divide by nothing.
    assert harness.after(0.0, 0)["env_steps_per_s"] == 0.0


@pytest.mark.parametrize(("agents", "frames"), [(None, 1000.0), (2.5, 400.0), (0.0, 1000.0)])
def test_frames_are_steps_of_an_environment_whoever_acts(agents, frames):
    parts = [lambda: {"actor/agents_per_step": agents}]
    report = ReporterHarness(frames_per_step=4, parts=parts).after(2.0, 500)
    assert (report["env_steps_per_s"], report["frames_per_s"]) == (250.0, frames)


def test_that_a_rate_is_0_from_now_on_is_told_once(caplog):
    harness = ReporterHarness(lr_is_0_at=1500)
    harness.after(2.0, 499)
    assert caplog.messages == []
    for _ in range(3):
        harness.after(2.0, 1)
    (told,) = caplog.messages
    assert told.startswith("algorithm/lr is 0 since env step 1,500: nothing is learned any more")
    # A schedule that was over before has been told of at the start.
    ReporterHarness(lr_is_0_at=1000).after(2.0, 500)
    assert len(caplog.messages) == 1


def test_a_report_is_merged_and_reaches_every_sink(monkeypatch):
    harness = ReporterHarness()
    report = harness.after(2.0, 10)
    assert report["updates"] == 7
    assert str(report["bottleneck"]).startswith("actors: the learner has nobody")
    assert isinstance(report["host/rss_bytes"], int)

    def fail(process):
        raise OSError(errno.EMFILE, "Too many open files", "/proc/7/statm")

    # It comes though the memory cannot be looked up.
    monkeypatch.setattr(reporter.psutil.Process, "memory_info", fail)
    last = harness.after(2.0, 10)
    assert (last["host/rss_bytes"], last["updates"]) == (None, 7)
    assert [sink.lines for sink in harness.sinks] == [[report, last]] * 2


def test_what_earlier_starts_refused_is_no_verdict_and_what_is_mended_is_forgotten():
    counts = {"trajectories/received": 900, "trajectories/rejected": 900}
    times = {UPDATE_MS: 1.0, BATCH_WAIT_MS: 9.0, "num_actors": 1}
    harness = ReporterHarness(
        parts=[lambda: times, lambda: dict(counts)], earlier_counts=dict(counts)
    )
    assert harness.after(2.0, 9)["bottleneck"].startswith("waiting: ")
    counts |= {"trajectories/received": 910, "trajectories/rejected": 910}
    assert harness.after(2.0, 9)["bottleneck"].startswith("rejections: 100 % ")
    for _ in range(reporter.JUDGED_REPORTS):
        report = harness.after(2.0, 9)
    assert report["bottleneck"].startswith("waiting: ")


@pytest.mark.parametrize(
    ("name", "number"), [("wire/cut", 1), ("sessions/expired", 1), ("wire/left", 50)]
)
def test_what_a_flood_leaves_is_given_back_for_a_while(monkeypatch, name, number):
    num_gone, num_given = 0, itertools.count()
    monkeypatch.setattr(reporter, "give_back_freed_memory", lambda: next(num_given))
    harness = ReporterHarness(parts=[lambda: {name: num_gone}])
    harness.after(2.0, 0)
    num_gone = number - 1
    harness.after(2.0, 0)
    assert next(num_given) == 0
    num_gone = number
    harness.after(2.0, 0)
    harness.after(9.0, 0)
    harness.after(9.0, 0)
    assert next(num_given) == 3  # twice, and the look before


async def report_for(harness, num_reports, answers):
    """Run the task until so many reports are there; the times between them."""
    task, num_answered = asyncio.create_task(harness.reporter.report_regularly()), 0

    def is_done():
        nonlocal num_answered
        if answers() and harness.num_asked > num_answered:
            num_answered = harness.num_asked
            harness.reporter.answered.set()
        return len(harness.sinks[0].lines) >= num_reports

    await until(is_done, "the reports")
    task.cancel()
    times = harness.sinks[0].times
    return [b - a for a, b in itertools.pairwise(times)]


async def test_it_asks_for_a_reading_and_a_busy_thread_does_not_hold_it_up(monkeypatch):
    """Without an answer a report comes a little later, and the next one no later still."""
    monkeypatch.setattr(reporter, "REPLY_WAIT_S", 1e6)
    await report_for(ReporterHarness(every_s=0.02), 3, lambda: True)
    monkeypatch.setattr(reporter, "REPLY_WAIT_S", 0.05)
    intervals = await report_for(ReporterHarness(every_s=0.1), 5, lambda: False)
    # A busy machine delays one and shortens the next.
    assert statistics.median(intervals) < 0.14
    # The learner thread's last words come just as the run ends: the task must end with it.
    monkeypatch.setattr(reporter, "REPLY_WAIT_S", 1e6)
    harness = ReporterHarness(every_s=0.0)
    task = asyncio.create_task(harness.reporter.report_regularly())
    await until(lambda: harness.num_asked > 0, "it asks")
    harness.reporter.answered.set()
    task.cancel()
    await asyncio.wait([task], timeout=2.0)
    assert task.cancelled()


def test_the_verdict_is_on_the_whole_start():
    readings = iter([(110, 90.0, 10.0), (120, 90.0, 10.0), (121, 1.0, 99.0)])

    def part():
        updates, update_ms, wait_ms = next(readings)
        return {"updates": updates, UPDATE_MS: update_ms, BATCH_WAIT_MS: wait_ms, "num_actors": 1}

    harness = ReporterHarness(parts=[part], earlier_updates=100)
    last = [harness.after(2.0, 10) for _ in range(3)][-1]
    assert str(last["bottleneck"]).startswith("waiting: ")
    assert harness.reporter.verdict(last).startswith("learner: ")


async def test_the_loop_tells_how_late_it_is():
    harness = ReporterHarness()
    watching = asyncio.create_task(harness.reporter.watch_lag())

    def largest():
        ms = harness.after(1.0, 0)["loop/lag_ms_max"]
        return ms if isinstance(ms, float) else -1.0

    await until(lambda: largest() >= 0.0, "a first probe")
    time.sleep(reporter.LOOP_PROBE_S + 0.05)
    await until(lambda: largest() >= 50.0, "a stall in the window")
    watching.cancel()
