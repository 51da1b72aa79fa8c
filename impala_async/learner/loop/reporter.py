"""A metric out: every interval one report, merged from its owners and handed to the sinks.

Runs on: event loop
"""

import asyncio
import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import psutil

from impala_async.learner.slots import Episodes
from impala_async.metrics.merge import merge_ranks
from impala_async.metrics.names import Value, numbers
from impala_async.metrics.report import RETURN_EPISODES, RunTimes, agents_in, assemble, judge
from impala_async.metrics.sinks import Sink
from impala_async.metrics.window import WindowStat
from impala_async.processes import give_back_freed_memory

logger = logging.getLogger(__name__)

LOOP_PROBE_S = 0.1
REPLY_WAIT_S = 0.5
FLOOD_IS_FREED_S = 10.0
GONE = ("wire/cut", "sessions/expired", "sessions/closed")
# An actor leaves a connection or two without a word, too: so many at least are a flood.
MANY_LEFT = 50
# Columns that were refused before these last reports do not limit a run any more.
JUDGED_REPORTS = 10


class EpisodeStats:
    def __init__(self) -> None:
        self.count = 0
        self._returns: deque[float] = deque(maxlen=RETURN_EPISODES)
        # Episodes of the interval, and the sums of their returns and lengths. A list would fill the
        # memory where one says that each step ends an episode.
        self._interval = (0, 0.0, 0)

    def take(self, episodes: Episodes) -> None:
        self.count += len(episodes)
        totals = episodes["total"].tolist()
        self._returns.extend(totals)
        number, total, steps = self._interval
        steps += sum(episodes["length"].tolist())
        self._interval = number + len(totals), total + math.fsum(totals), steps

    @property
    def returns(self) -> list[float]:
        """Those of the last hundred episodes."""
        return list(self._returns)

    @property
    def mean_return(self) -> float | None:
        """Over the last hundred episodes; None before there are so many."""
        return self._mean_so_far() if len(self._returns) == RETURN_EPISODES else None

    def _mean_so_far(self) -> float | None:
        # Asked with every message: numpy would take ten times as long.
        return math.fsum(self._returns) / len(self._returns) if self._returns else None

    def report(self) -> dict[str, object]:
        """The present values; the interval's sums start anew."""
        number, total, steps = self._interval
        means = (total / number, steps / number) if number else (None, None)
        self._interval = (0, 0.0, 0)
        return {
            "mean_return": self._mean_so_far(),
            "mean_return_100": self.mean_return,
            "episodes/count": self.count,
            "episodes/return_mean": means[0],
            "episodes/length_mean": means[1],
        }

    def save(self) -> dict[str, object]:
        return {"count": self.count, "returns": list(self._returns)}

    def restore(self, count: int, returns: Iterable[float]) -> None:
        self.count = count
        self._returns.extend(returns)


@dataclass(eq=False, kw_only=True)
class Reporter:
    """Writes reports; owns the clock of the run and the rate of the interval.

    It asks the learner thread for a frozen reading, waits a moment for it, and takes the last one
    if the thread is busy or starved: a report is never late because learning is.
    """

    every_s: float
    sinks: Sequence[Sink]
    parts: Sequence[Callable[[], dict[str, object]]]
    env_steps: Callable[[], int]
    frames_per_step: int
    ask: Callable[[], None]
    """Ask the learner thread for a reading."""
    others: Callable[[], Sequence[Mapping[str, Value]]] = tuple
    """The newest reports of the other ranks, at rank 0."""
    earlier_s: float = 0.0
    earlier_updates: int = 0
    earlier_counts: Mapping[str, Value] = field(default_factory=dict)
    lr_is_0_at: int | None = None
    """The env step; told when it is reached. Where it is already, that is told at the start."""
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        now, env_steps = self.clock(), self.env_steps()
        self._started_at = now - self.earlier_s
        self._times = RunTimes(self.earlier_updates)
        self.answered = asyncio.Event()
        """The learner thread has frozen a reading."""
        self._rate_from = (now, env_steps)
        self._before = deque([self.earlier_counts], maxlen=JUDGED_REPORTS)
        # With other ranks: those of all.
        self._merged = deque[Mapping[str, Value]](maxlen=JUDGED_REPORTS)
        self._first_counts: Mapping[str, Value] | None = None
        if self.lr_is_0_at is not None and env_steps >= self.lr_is_0_at:
            self.lr_is_0_at = None
        self._process = psutil.Process()
        self._num_gone = 0.0
        self._gone_at = -math.inf
        # How late the loop runs a timer: what everybody on it has to wait.
        self._lag = WindowStat("lag_ms", n=100)

    def run_s(self, at: float) -> float:
        """Seconds of this run, earlier starts included, at a moment of the monotonic clock."""
        return at - self._started_at

    async def watch_lag(self) -> None:
        while True:
            due = time.monotonic() + LOOP_PROBE_S
            await asyncio.sleep(LOOP_PROBE_S)
            self._lag.push(max(0.0, time.monotonic() - due) * 1000)

    async def report_regularly(self) -> None:
        due = time.monotonic()
        while True:
            # From due time to due time: waiting for an answer must not stretch the interval.
            due = max(due + self.every_s, time.monotonic())
            await asyncio.sleep(due - time.monotonic())
            self.answered.clear()
            self.ask()
            # Not wait_for: Python 3.11's swallows a cancellation that meets the answer, for good.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REPLY_WAIT_S):
                    await self.answered.wait()
            self.report()

    def report(self) -> dict[str, Value]:
        now, env_steps = self.clock(), self.env_steps()
        since, steps_then = self._rate_from
        self._rate_from = (now, env_steps)
        if self.lr_is_0_at is not None and env_steps >= self.lr_is_0_at:
            logger.warning(
                "algorithm/lr is 0 since env step %s: nothing is learned any more "
                "(algorithm.schedule_env_steps)",
                f"{self.lr_is_0_at:,}",
            )
            self.lr_is_0_at = None
        steps_per_s = (env_steps - steps_then) / max(now - since, 1e-9)
        rss_bytes = None
        # No run need end where there is no descriptor left to look it up.
        with contextlib.suppress(OSError):
            rss_bytes = self._process.memory_info().rss
        own: dict[str, object] = {
            "time_s": round(self.run_s(now), 3),
            "env_steps_trained": env_steps,
            "env_steps_per_s": steps_per_s,
            "host/rss_bytes": rss_bytes,
            "loop/lag_ms_mean": self._lag.mean,
            "loop/lag_ms_max": self._lag.max,
        }
        report = assemble(own, *(part() for part in self.parts), before=self._before[0])
        self._before.append(report)
        # Who is gone may leave a hundred megabytes behind, which ZeroMQ frees a while later.
        counts = numbers(report)
        num_gone = sum(counts.get(name, 0) for name in GONE)
        num_gone += counts.get("wire/left", 0) // MANY_LEFT
        if num_gone != self._num_gone:
            self._num_gone, self._gone_at = num_gone, now
        if others := self.others():
            report = merge_ranks([report, *others], next(iter(self._merged), None))
            self._merged.append(report)
            self._first_counts = self._first_counts or report
        report["frames_per_s"] = steps_per_s * self.frames_per_step / agents_in(report)
        self._times.add(report)
        if now - self._gone_at < FLOOD_IS_FREED_S:
            give_back_freed_memory()
        for sink in self.sinks:
            sink.write(report)
        return report

    def verdict(self, report: dict[str, Value]) -> str:
        return judge(self._times.over(report), self._first_counts or self.earlier_counts)
