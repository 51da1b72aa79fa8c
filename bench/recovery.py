"""Seconds until training goes on after a process has died or stands still.

A learner of two ranks is started by torchrun, which starts both again, and its actors by `actors`,
which starts each again. Faults come one after the other, while it trains.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from bench.door import run
from bench.one_run import CONFIGS, END_S, ENDLESS, end_with_parent, last_report_in
from bench.paired import figure, new_parser, publish

NUM_ACTORS = 4
LIMIT_S = 180.0
POLL_S = 0.05
SETTINGS = (
    *(*ENDLESS, "learner.report_every_s=0.2", "learner.stuck_end_s=10", "checkpoint.every_s=2"),
    *("learner.batch_columns=32", "actor.num_envs=8"),
    *("bind.data=tcp://127.0.0.1:*", "bind.weights=tcp://127.0.0.1:*"),
)
FAULTS = {"a rank is killed": signal.SIGKILL, "a rank stands still": signal.SIGSTOP}
LIMITS_S = {"a rank is killed": 15.0, "a rank stands still": 60.0}
NOTES = """
CartPole with two ranks and four actors, all on the cores of one machine. A rank is back when an
update is made that is newer than the checkpoint with which both were started again. It is taken for
lost after 0.4 of `learner.stuck_end_s`, which is 10 s here, and torchrun gives one that stands
still 30 s to end. An actor that is killed has worked longest of all, and is back when
the one in its place is welcomed. The benchmark fails where
an actor ends with a rank. SIGTERM goes to one rank, and is over when both have ended, with code 0.
"""


def main() -> int:
    parser = new_parser("Recovery", __doc__, rounds=10)
    args = parser.parse_args()
    figures = []
    for name, number in FAULTS.items():
        if args.only.lower() in name.lower():
            with fleet(args.rounds) as ours:
                taken = ours.turns(name, args.rounds, partial(ours.lose_rank, number))
            figures.append(figure(name, taken, unit="s", at_most=LIMITS_S[name]))
    if args.only.lower() in (name := "an actor is killed"):
        with fleet(0) as ours:
            taken = ours.turns(name, args.rounds, ours.lose_actor)
        figures.append(figure(name, taken, unit="s", at_most=5.0))
    if args.only.lower() in (name := "SIGTERM to one rank").lower():
        taken = []
        for turn in range(args.rounds):
            with fleet(0) as ours:
                taken += ours.turns(f"{name}, {turn + 1}", 1, ours.end_by)
        figures.append(figure(name, taken, unit="s", at_most=10.0))
    return publish("Recovery", figures, notes=NOTES, is_json=args.json, folder=args.write)


@contextmanager
def fleet(num_restarts: int) -> Iterator["Fleet"]:
    """Launch it; behind the block none of its processes is there any more."""
    with tempfile.TemporaryDirectory(prefix="impala-async-bench-") as folder:
        ours = Fleet(Path(folder), num_restarts)
        try:
            ours.start_actors()
            yield ours
        finally:
            ours.end()


class Fleet:
    """torchrun with the learners, `actors` with the actors, and what they write."""

    def __init__(self, folder: Path, num_restarts: int) -> None:
        self._folder, self._run = folder, folder / "run"
        self._metrics = self._run / "metrics.jsonl"
        self._running: list[subprocess.Popen[bytes]] = []
        flags = [part for setting in SETTINGS for part in ("--set", setting)]
        self.learners = self._start(
            *("torch.distributed.run", "--standalone", "--nproc-per-node=2"),
            *(f"--max-restarts={num_restarts}", "-m", "impala_async.learner"),
            *("--config", str(CONFIGS / "cartpole.toml"), "--resume", "auto", *flags),
            *("--run-dir", str(self._run)),
        )

    def start_actors(self) -> None:
        self.wait_for("the addresses", lambda: self._service(0) is not None)
        self._fleet = self._start(
            *("impala_async", "actors", "--num", str(NUM_ACTORS), "--learner", str(self._run))
        )
        self.wait_for("all actors", lambda: self._last("num_actors") == NUM_ACTORS)

    def turns(self, name: str, rounds: int, lose: Callable[[int], float]) -> list[float]:
        taken = []
        for turn in range(rounds):
            before = self._last("updates")
            self.wait_for("training", partial(self._is_past, before + 100))
            taken.append(lose(turn))
            print(f"{name}: {turn + 1} of {rounds}: {taken[-1]:.1f} s", file=sys.stderr)
        return taken

    def lose_rank(self, what: signal.Signals, turn: int) -> float:
        service, actors = self._service(turn % 2), self._actors()
        assert service is not None
        began = time.monotonic()
        os.kill(service["pid"], what)
        epoch = service["epoch"] + 1
        self.wait_for("a new start", lambda: self._last("weights/version_epoch") == epoch)
        first = next(r for r in self._reports() if r["weights/version_epoch"] == epoch)
        self.wait_for("an update", partial(self._is_past, first["updates"]))
        took_s = time.monotonic() - began
        if self._actors() != actors:
            raise RuntimeError("an actor has ended with a rank")
        return took_s

    def lose_actor(self, turn: int) -> float:
        opened, began = self._last("sessions/opened"), time.monotonic()
        # The one that has worked longest: a newcomer would wait a second for its next start.
        self._oldest_actor().send_signal(signal.SIGKILL)
        self.wait_for("an actor", lambda: self._last("sessions/opened") > opened)
        return time.monotonic() - began

    def end_by(self, turn: int) -> float:
        service, began = self._service(turn % 2), time.monotonic()
        assert service is not None
        os.kill(service["pid"], signal.SIGTERM)
        if code := self.learners.wait(LIMIT_S):
            raise RuntimeError(f"torchrun ended with code {code}: {self._said()}")
        return time.monotonic() - began

    def wait_for(self, what: str, holds: Callable[[], bool]) -> None:
        until = time.monotonic() + LIMIT_S
        while not holds():
            if time.monotonic() > until:
                raise RuntimeError(f"no {what} within {LIMIT_S:.0f} s: {self._said()}")
            time.sleep(POLL_S)

    def end(self) -> None:
        for process in self._running:
            if process.poll() is None:
                family = psutil.Process(process.pid).children(recursive=True)
                process.terminate()
                for each in psutil.wait_procs([*family, psutil.Process(process.pid)], END_S)[1]:
                    each.kill()
                process.wait()

    def _start(self, module: str, *flags: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        # Else a restart of torchrun often finds no port.
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        with (self._folder / "log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *flags],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                preexec_fn=end_with_parent,
            )
        self._running.append(process)
        return process

    def _actors(self) -> set[int]:
        return {child.pid for child in psutil.Process(self._fleet.pid).children()}

    def _oldest_actor(self) -> psutil.Process:
        return min(psutil.Process(self._fleet.pid).children(), key=psutil.Process.create_time)

    def _service(self, number: int) -> dict[str, Any] | None:
        folder = self._run / "ranks" / str(number) if number else self._run
        try:
            service: dict[str, Any] = json.loads((folder / "service.json").read_text())
        except FileNotFoundError:
            return None
        return service

    def _reports(self) -> Sequence[dict[str, Any]]:
        # The last one may be in the making.
        return [json.loads(line) for line in self._metrics.read_text().split("\n")[:-1]]

    def _last(self, name: str) -> float:
        report = last_report_in(self._metrics)
        value: float = report[name] if report else 0.0
        return value

    def _is_past(self, updates: float) -> bool:
        return self._last("updates") > updates

    def _said(self) -> str:
        return (self._folder / "log").read_text(errors="replace")[-2000:]


if __name__ == "__main__":
    run(main)
