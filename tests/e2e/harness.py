"""Real processes for the end-to-end tests: started by their doors, watched through their files."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import psutil

from tests.e2e.zygote import Forked

ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
POLL_S = 0.02
Report = dict[str, Any]
Found = TypeVar("Found")


def wait_until(what: str, look: Callable[[], Found | None], within_s: float = 20.0) -> Found:
    """Look again and again; what was found, or a failure that says what was missing."""
    give_up_at = time.monotonic() + within_s
    while True:
        found = look()
        if found:
            return found
        if time.monotonic() > give_up_at:
            raise AssertionError(f"not within {within_s:.0f} s: {what}")
        time.sleep(POLL_S)


class Door:
    """One process behind a door, and what it printed.

    The zygote forks it, unless an interpreter of its own `is_started`.
    """

    def __init__(
        self, log: Path, door: str, *flags: str, is_started: bool = False, **environment: str
    ) -> None:
        self.log_path = log
        make = subprocess.Popen if is_started else Forked
        with log.open("ab") as file:
            self.process = make(
                [sys.executable, "-m", f"impala_async.{door}", *flags],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**os.environ, **ONE_THREAD, **environment},
            )

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def wait_exit(self, within_s: float = 30.0) -> int:
        try:
            return self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {within_s} s:\n{self.log}") from None

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        """Whatever state it is in."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()


class Site:
    """A run folder and the processes that a test started around it; all end with the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        self._doors: list[Door] = []

    def open(self, door: str, *flags: str, is_started: bool = False, **environment: str) -> Door:
        log = self.folder / f"{door}-{len(self._doors)}.log"
        opened = Door(log, door, *flags, is_started=is_started, **environment)
        self._doors.append(opened)
        return opened

    def learner(
        self,
        *settings: str,
        resume: bool = False,
        config: str | None = None,
        record: str | None = None,
        **environment: str,
    ) -> Door:
        """A learner at free ports that reports often."""
        flags = ["--run-dir", str(self.run_dir)]
        if record:
            flags += ["--record", record]
        if resume:
            flags.append("--resume")
        elif config:
            flags += ["--config", config]
        changes = ["learner.report_every_s=0.2"]
        if not resume:
            changes += ["bind.data=tcp://127.0.0.1:*", "bind.weights=tcp://127.0.0.1:*"]
        for setting in (*changes, *settings):
            flags += ["--set", setting]
        door = self.open("learner", *flags, **environment)
        wait_until(f"the learner serves:\n{door.log}", lambda: self.serves(door))
        return door

    @property
    def same_ports(self) -> list[str]:
        """Settings by which the next learner is found where the last one was."""
        return [f"bind.{name}={self.service[f'{name}_url']}" for name in ("data", "weights")]

    def serves(self, learner: Door) -> bool:
        if learner.process.poll() is not None:
            raise AssertionError(f"the learner ended:\n{learner.log}")
        service = self.read("service.json")
        return bool(service) and service["pid"] == learner.process.pid

    def actor(self, *flags: str, **environment: str) -> Door:
        return self.open("actor", "--learner", self.service["data_url"], *flags, **environment)

    @property
    def service(self) -> dict[str, Any]:
        service = self.read("service.json")
        assert service, "no learner serves"
        return service

    def read(self, name: str) -> dict[str, Any] | None:
        path = self.run_dir / name
        return json.loads(path.read_text()) if path.exists() else None

    def reports(self) -> list[Report]:
        path = self.run_dir / "metrics.jsonl"
        if not path.exists():
            return []
        whole = path.read_text().rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines()]

    def wait_report(
        self, what: str, holds: Callable[[Report], bool], within_s: float = 20.0
    ) -> Report:
        """The first new report of which something holds."""
        num_before = len(self.reports())

        def look() -> Report | None:
            return next((r for r in self.reports()[num_before:] if holds(r)), None)

        try:
            return wait_until(what, look, within_s)
        except AssertionError as error:
            logs = "\n".join(f"--- {door.log_path.name}\n{door.log}" for door in self._doors)
            raise AssertionError(f"{error}\n{self.reports()[-1:]}\n{logs}") from None

    def close(self) -> None:
        for door in self._doors:
            door.end()


@contextmanager
def site(folder: Path) -> Iterator[Site]:
    opened = Site(folder)
    try:
        yield opened
    finally:
        opened.close()


def cpu_share(process: subprocess.Popen[bytes], over_s: float) -> float:
    """Share of one core that a process uses, its threads included."""
    watched = psutil.Process(process.pid)
    before, started = sum(watched.cpu_times()[:2]), time.monotonic()
    time.sleep(over_s)
    return (sum(watched.cpu_times()[:2]) - before) / (time.monotonic() - started)


def identities_hold(report: Report) -> bool:
    """The accounts of CONTRACTS, whatever moment the report is from."""
    t = {
        name: report[f"trajectories/{name}"]
        for name in ("received", "admitted", "rejected", "trained", "dropped", "in_slots")
    }
    assert t["received"] == t["admitted"] + t["rejected"], report
    assert t["admitted"] == t["trained"] + t["dropped"] + t["in_slots"], report
    return True
