"""CartPole at full speed for long: do the processes of a run grow?

Each second, for every process of the run: resident memory, open descriptors, threads. Minute two
of the training is compared with its last fifth, median with median. It has grown if that is 2 % of
memory or 8 MB more, whichever is larger, or one descriptor, or one thread; or if a process came or
went after the first minute. The exit code is then 1.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import NamedTuple

from bench.door import run
from bench.one_run import CONFIGS, ENDLESS, OneRun, one_run
from bench.paired import Figure, figure, new_parser, publish
from bench.processes import Held, held_by_each
from impala_async.files import write_whole

LOOK_EVERY_S = 1.0
TELL_EVERY_S = 60.0
# The base of a training: what comes before is start-up, and caches that fill.
BASE_S = (60.0, 120.0)
LAST_SHARE = 0.2
MIN_MINUTES = 3
RSS_SHARE, RSS_MB = 0.02, 8.0
MB = 1e6
# The time for a start on a busy machine.
SLACK_S = 120.0
ONE_OF = ("train", "learner")

NOTES = """
A run of `configs/cartpole.toml` that no goal ends, with a checkpoint each minute, as always. Each
of its processes is looked at every second. Growth is the median of the last fifth of the time less
the median of minute two; its range is that of the last fifth. Memory may grow by 2 % or 8 MB,
whichever is larger, descriptors and threads by none, and no process may come or go after the first
minute.
"""


class Times(NamedTuple):
    """The two stretches that are compared, in seconds of the training."""

    base: tuple[float, float]
    last: tuple[float, float]

    @staticmethod
    def of(whole_s: float) -> "Times":
        return Times(BASE_S, (whole_s * (1 - LAST_SHARE), whole_s))


@dataclass
class Series:
    """One process held so much, at which seconds of the training."""

    seconds: list[float] = field(default_factory=list)
    rss_mb: list[float] = field(default_factory=list)
    descriptors: list[float] = field(default_factory=list)
    threads: list[float] = field(default_factory=list)

    def add(self, second: float, held: Held) -> None:
        self.seconds.append(second)
        self.rss_mb.append(round(held.rss_bytes / MB, 2))
        self.descriptors.append(held.descriptors)
        self.threads.append(held.threads)


class Record:
    """The series of all processes by their names, and how many steps the run had trained."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.env_steps: list[float] = []
        self.processes: dict[str, Series] = {}
        self._names: dict[int, str] = {}

    def add(self, second: float, env_steps: int, held: dict[int, Held]) -> None:
        """All of one moment."""
        second = round(second, 1)
        self.seconds.append(second)
        self.env_steps.append(env_steps)
        for pid, each in sorted(held.items()):
            if pid not in self._names:
                self._names[pid] = self._new_name(each.kind)
                self.processes[self._names[pid]] = Series()
            self.processes[self._names[pid]].add(second, each)

    def _new_name(self, kind: str) -> str:
        number = 1 + sum(name.split()[0] == kind for name in self.processes)
        return kind if kind in ONE_OF and number == 1 else f"{kind} {number}"

    def write(self, path: Path) -> None:
        """A list per column, which is a third of the size of a line per moment."""
        content = {
            "seconds": self.seconds,
            "env_steps_trained": self.env_steps,
            "processes": {name: asdict(series) for name, series in self.processes.items()},
        }
        write_whole(path, f"{json.dumps(content, separators=(',', ':'))}\n".encode())

    def progress(self) -> str:
        """The present moment in a line."""
        held = ", ".join(
            f"{name} {series.rss_mb[-1]:.0f} MB {series.descriptors[-1]:g} descriptors "
            f"{series.threads[-1]:g} threads"
            for name, series in self.processes.items()
        )
        return f"second {self.seconds[-1]:.0f}, {self.env_steps[-1]:,.0f} env steps: {held}"


def main() -> int:
    """Watch a run for so long; 1 if it grew."""
    parser = new_parser("Soak", __doc__, rounds=None, has_cases=False)
    parser.add_argument("--minutes", type=float, default=30, metavar="N",
                        help="of training, at least 3 (30)")  # fmt: skip
    args = parser.parse_args()
    if args.minutes < MIN_MINUTES:
        parser.error("--minutes: to compare minute two with the last fifth wants at least 3")
    whole_s = args.minutes * 60
    with one_run(CONFIGS / "cartpole.toml", ENDLESS) as run:
        record = watch(run, whole_s)
    figures = judge(record, Times.of(whole_s))
    code = publish("Soak", figures, notes=NOTES, is_json=args.json, folder=args.write)
    if args.write is not None:
        record.write(args.write / "soak-series.json")
    return code


def watch(run: OneRun, whole_s: float) -> Record:
    """Look every second, from the first report of a training that has begun."""
    record = Record()
    told_s = -TELL_EVERY_S
    for _ in run.moments(LOOK_EVERY_S, limit_s=whole_s + SLACK_S):
        report = run.last_report()
        if report is None or report["learner/wall_s"] is None:
            continue
        second: float = report["learner/wall_s"]
        record.add(second, report["env_steps_trained"], held_by_each(run.pid))
        if second >= whole_s:
            return record
        if second >= told_s + TELL_EVERY_S:
            told_s = second
            print(record.progress(), file=sys.stderr, flush=True)
    raise RuntimeError("the run ended by itself")


def judge(record: Record, times: Times) -> list[Figure]:
    """Say what each process held, by how much it grew, and what is allowed."""
    figures, num_fleeting = [], 0
    for name, series in record.processes.items():
        if series.seconds[0] <= times.base[0] and series.seconds[-1] == record.seconds[-1]:
            figures += _growth(name, series, times)
        elif series.seconds[-1] >= times.base[0]:
            num_fleeting += 1
    came = figure("processes that came or went after minute one", [num_fleeting], at_most=0)
    before, after = (_steps_per_s(record, stretch) for stretch in times)
    speed = figure("trained env steps/s, last fifth over minute two", [after / before])
    return [*figures, came, speed]


def _growth(name: str, series: Series, times: Times) -> list[Figure]:
    rss_mb = _within(times.base, series.seconds, series.rss_mb)
    allowed_mb = max(RSS_MB, RSS_SHARE * median(rss_mb))
    columns = (
        ("RSS", series.rss_mb, "MB", round(allowed_mb, 1)),
        ("descriptors", series.descriptors, "", 0),
        ("threads", series.threads, "", 0),
    )
    figures = [figure(f"{name}: RSS in minute two", rss_mb, unit="MB")]
    for what, values, unit, at_most in columns:
        before = median(_within(times.base, series.seconds, values))
        growth = [each - before for each in _within(times.last, series.seconds, values)]
        figures.append(figure(f"{name}: growth, {what}", growth, unit=unit, at_most=at_most))
    return figures


def _within(
    stretch: tuple[float, float], seconds: Sequence[float], values: Sequence[float]
) -> list[float]:
    begin, end = stretch
    return [value for at, value in zip(seconds, values, strict=True) if begin <= at <= end]


def _steps_per_s(record: Record, stretch: tuple[float, float]) -> float:
    seconds = _within(stretch, record.seconds, record.seconds)
    steps = _within(stretch, record.seconds, record.env_steps)
    return (steps[-1] - steps[0]) / (seconds[-1] - seconds[0])


if __name__ == "__main__":
    run(main)
