"""One training through the door that users take, in a folder of its own, and what it leaves there.

It is a process group of its own that ends with whoever started it, by SIGKILL too, and everybody
in it ends with `train`.
"""

import ctypes
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
# Nothing but us ends the run, whatever the config says.
ENDLESS = tuple(f"stop.{goal}=none" for goal in ("env_steps", "updates", "mean_return", "wall_s"))
TIME_LIMIT_S = 600.0
END_S = 10.0
LAST_WORDS = 2000
# A report is a line of about 4 kB.
TAIL_BYTES = 65536
LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1

Report = dict[str, Any]


@contextmanager
def one_run(
    config: Path | None, settings: Sequence[str], num_ranks: int = 1, checkout: Path | None = None
) -> Iterator["OneRun"]:
    """Launch it; behind the block neither its processes nor its folder are there any more.

    Without a config, generic defaults apply to what is not set. Several ranks are torchrun's.
    Another checkout trains with the package that lies there.
    """
    with tempfile.TemporaryDirectory(
        prefix="impala-async-bench-", ignore_cleanup_errors=True
    ) as folder:
        run = OneRun(config, settings, Path(folder), num_ranks, checkout)
        try:
            yield run
        finally:
            run.end()


class OneRun:
    """The process of `train`, and the files that its learner writes."""

    def __init__(
        self,
        config: Path | None,
        settings: Sequence[str],
        folder: Path,
        num_ranks: int = 1,
        checkout: Path | None = None,
    ) -> None:
        self.run_dir = folder / "run"
        self._log = folder / "train.log"
        self._metrics = self.run_dir / "metrics.jsonl"
        command = [sys.executable]
        if num_ranks > 1:
            command += ["-m", "torch.distributed.run", "--standalone"]
            command += ["--nproc-per-node", str(num_ranks)]
        command += ["-m", "impala_async.train", "--run-dir", str(self.run_dir)]
        command += [] if config is None else ["--config", str(config)]
        command += [part for setting in settings for part in ("--set", setting)]
        with self._log.open("w") as log:
            self.launched_at = time.time()
            self._process = subprocess.Popen(
                command,
                cwd=checkout,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
                preexec_fn=end_with_parent,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def moments(self, every_s: float, limit_s: float = TIME_LIMIT_S) -> Iterator[float]:
        """Seconds since launch, again and again, until the run has ended.

        RuntimeError with what it said last, if it fails or does not end within the limit.
        """
        while self._process.poll() is None:
            since_launch_s = time.time() - self.launched_at
            if since_launch_s > limit_s:
                raise RuntimeError(f"still running after {limit_s:.0f} s: {self._last_words()}")
            yield since_launch_s
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(every_s)
        if self._process.returncode != 0:
            raise RuntimeError(f"exit code {self._process.returncode}: {self._last_words()}")

    def end(self) -> None:
        """End it at once, if it still runs, with all below it: they end when `train` is gone."""
        if self._process.poll() is None:
            family = psutil.Process(self.pid).children(recursive=True)
            self._process.kill()
            self._process.wait()
            for process in psutil.wait_procs(family, END_S)[1]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()

    def reports(self) -> list[Report]:
        """All of them so far."""
        return [json.loads(line) for line in self._metrics.read_text().splitlines()]

    def last_report(self) -> Report | None:
        return last_report_in(self._metrics)

    def summary(self) -> dict[str, Any]:
        summary: dict[str, Any] = json.loads((self.run_dir / "summary.json").read_text())
        return summary

    @property
    def last_report_after_s(self) -> float:
        """The time from launch to the last report: the file of reports was not changed since."""
        return self._metrics.stat().st_mtime - self.launched_at

    @property
    def first_update_after_s(self) -> float:
        """The time from launch, for a run that has ended: its last report says how long ago."""
        trained_s: float = self.reports()[-1]["learner/wall_s"]
        return self.last_report_after_s - trained_s

    def _last_words(self) -> str:
        return self._log.read_text(errors="replace")[-LAST_WORDS:]


def last_report_in(metrics: Path) -> Report | None:
    """The newest, read from the end of a file that may be long."""
    try:
        with metrics.open("rb") as file:
            file.seek(max(0, metrics.stat().st_size - TAIL_BYTES))
            # A line that crosses pages can be read before all of it is there.
            whole_lines = file.read().rpartition(b"\n")[0]
            report: Report = json.loads(whole_lines.splitlines()[-1])
    except (FileNotFoundError, IndexError):
        return None
    return report


def steps_per_s(
    reports: Sequence[Report], after_s: float = 0.0, what: str = "env_steps_trained"
) -> float:
    """Env steps trained per second, or another count of a report, from so long after the first
    update to the end."""
    counted = [each for each in reports if (each["learner/wall_s"] or -1.0) >= after_s]
    if len(counted) < 2:
        raise RuntimeError(f"{len(counted)} reports {after_s:g} s after the first update, wants 2")
    first, last = counted[0], counted[-1]
    steps: int = last[what] - first[what]
    spent_s: float = last["time_s"] - first["time_s"]
    return steps / spent_s


def end_with_parent() -> None:
    """SIGTERM from the kernel when the thread that launches it is gone."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
