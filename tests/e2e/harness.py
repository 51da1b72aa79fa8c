"""Real processes for the end-to-end tests: started by their doors, watched through their files."""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil

from tests.e2e.zygote import Forked
from tests.learner.server_harness import check_identities

CARTPOLE = "configs/cartpole.toml"
ENDLESS = ("stop.mean_return=none", "stop.env_steps=none")
QUICK_LEASE = ("learner.lease_s=2",)
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
POLL_S = 0.02
# Names in the summary, and in the last report, that no clock can change where data has an order.
COUNTED = ("env_steps_trained", "updates", "lag_quantiles")
LEARNED = ("loss/total", "loss/policy", "loss/value", "grad/norm", "policy/entropy", "lag/mean")


def wait_until(what, look, within_s=20.0):
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

    def __init__(self, log, door, *flags, is_started=False, **environment):
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
    def log(self):
        return self.log_path.read_text(errors="replace")

    def wait_exit(self, within_s=30.0):
        try:
            return self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {within_s} s:\n{self.log}") from None

    def tell(self, number):
        self.process.send_signal(number)

    def ends(self, number=signal.SIGTERM, code=0, within_s=15.0):
        """Ask it to end, and see that it ends in good order."""
        self.tell(number)
        assert self.wait_exit(within_s) == code, self.log

    def kill(self):
        """End it, whatever state it is in."""
        self.process.kill()
        self.process.wait()


class Site:
    """A run folder and the processes that a test started around it; all end with the test."""

    def __init__(self, folder):
        self.folder = folder
        self.run_dir = folder / "run"
        self._doors = []
        self._reports = []
        self._num_read = 0

    def open(self, door, *flags, is_started=False, **environment):
        log = self.folder / f"{door}-{len(self._doors)}.log"
        opened = Door(log, door, *flags, is_started=is_started, **environment)
        self._doors.append(opened)
        return opened

    def train(self, *settings, config=None, **how):
        flags = ["--config", config] if config else []
        return self.open("train", "--run-dir", str(self.run_dir), *flags, *given(settings), **how)

    def trained(self, *settings, **how):
        """The summary of a training that ended well and refused nothing."""
        door = self.train(*settings, **how)
        assert door.wait_exit(90) == 0, door.log
        assert all(identities_hold(report) for report in self.reports())
        assert self.summary["rejected"] == 0
        return self.summary

    def learner(self, *settings, resume=False, config=None, record=None, **environment):
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
        door = self.open("learner", *flags, *given((*changes, *settings)), **environment)
        wait_until(f"the learner serves:\n{door.log}", lambda: self._serves(door))
        return door

    @property
    def same_ports(self):
        """Settings by which the next learner is found where the last one was."""
        return [f"bind.{name}={self.service[f'{name}_url']}" for name in ("data", "weights")]

    def _serves(self, learner):
        if learner.process.poll() is not None:
            raise AssertionError(f"the learner ended:\n{learner.log}")
        service = self._read("service.json")
        return bool(service) and service["pid"] == learner.process.pid

    def actor(self, *flags, **environment):
        return self.open("actor", "--learner", self.service["data_url"], *flags, **environment)

    @property
    def service(self):
        service = self._read("service.json")
        assert service, "no learner serves"
        return service

    @property
    def summary(self):
        summary = self._read("summary.json")
        assert summary, "no run has ended"
        return summary

    def _read(self, name):
        path = self.run_dir / name
        return json.loads(path.read_text()) if path.exists() else None

    def checkpoints(self):
        """The oldest first."""
        found = (self.run_dir / "checkpoints").glob("ckpt-*")
        return sorted(found, key=lambda path: [int(part) for part in path.name.split("-")[1:]])

    def reports(self):
        """All whole ones so far."""
        path = self.run_dir / "metrics.jsonl"
        if path.exists():
            with path.open("rb") as file:
                file.seek(self._num_read)
                *lines, begun = file.read().split(b"\n")
                self._num_read = file.tell() - len(begun)
            self._reports += map(json.loads, lines)
        return self._reports

    def wait_report(self, what, holds, within_s=40.0):
        """The first new report of which something holds."""
        num_before = len(self.reports())

        def look():
            return next((r for r in self.reports()[num_before:] if holds(r)), None)

        try:
            return wait_until(what, look, within_s)
        except AssertionError as error:
            logs = "\n".join(f"--- {door.log_path.name}\n{door.log}" for door in self._doors)
            raise AssertionError(f"{error}\n{self.reports()[-1:]}\n{logs}") from None

    def outcome(self):
        """All that is equal, to the last bit, in two runs that trained on the same data."""
        summary, last = self.summary, self.reports()[-1]
        assert identities_hold(last)
        return {
            **{name: summary[name] for name in COUNTED},
            **{name: last[name] for name in LEARNED},
            **{
                path.name: hashlib.sha256(path.read_bytes()).hexdigest()
                for path in self.checkpoints()[-1].glob("*.safetensors")
            },
        }

    def close(self):
        for door in self._doors:
            door.kill()


@contextmanager
def site(folder):
    folder.mkdir(exist_ok=True)
    opened = Site(folder)
    try:
        yield opened
    finally:
        opened.close()


def given(settings):
    return [part for setting in settings for part in ("--set", setting)]


def module(folder, name, text):
    """The environment of a process that finds a user's own module."""
    (folder / f"{name}.py").write_text(text)
    return {"PYTHONPATH": f"{folder}:{Path.cwd()}"}


def is_alive(process):
    """A zombie is not alive: the process that inherits an orphan may be slow to collect it."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def use_of(process, over_s):
    """Share of one core that a process uses, and how often in a second one of its threads wakes."""
    watched = psutil.Process(process.pid)

    def measure():
        status = "".join(
            path.read_text() for path in Path(f"/proc/{process.pid}/task").glob("*/status")
        )
        wakes = sum(map(int, re.findall(r"^voluntary_ctxt_switches:\s+(\d+)", status, re.M)))
        return np.array([sum(watched.cpu_times()[:2]), wakes, time.monotonic()])

    before = measure()
    time.sleep(over_s)
    cpu_s, num_wakes, passed_s = measure() - before
    return cpu_s / passed_s, num_wakes / passed_s


def identities_hold(report):
    """The accounts balance, whatever moment the report is from."""
    check_identities(report)
    return True
