"""One turn of one system: started, read while it trains, ended with all that descends from it."""

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.peers.family import Family
from bench.peers.say import LAUNCHED_AT

ROOT = Path(__file__).parents[2]
POLL_S = 0.25
LAST_WORDS = 2000
# One thread a process, as processes share the cores; a runner that learns alone may take more.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore",
    "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled",
}  # fmt: skip


class Tail:
    """The whole lines of a file that is still written; it need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._num_read = 0
        self._begun = b""

    def new_lines(self) -> list[str]:
        """Those that were finished since the last call."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._num_read)
            piece = file.read()
        self._num_read += len(piece)
        *whole, self._begun = (self._begun + piece).split(b"\n")
        return [line.decode(errors="replace") for line in whole]


@dataclass(frozen=True)
class Progress:
    """A word of a runner: env steps trained on by then, and the mean return of 100 episodes."""

    elapsed_s: float
    trained: int
    mean_return: float | None


@dataclass(frozen=True)
class Turn:
    """All that was said, and the most memory that was held at a time."""

    progress: Sequence[Progress]
    peak_bytes: int = 0

    def start_s(self) -> float | None:
        """The time from launch to the first trained step, as far as it was told."""
        return next((each.elapsed_s for each in self.progress if each.trained > 0), None)

    def rate(self, warm_s: float) -> float:
        """Trained steps per second of what came after the first trained step and this time."""
        start_s = self.start_s()
        assert start_s is not None
        begin = [each for each in self.progress if each.elapsed_s <= start_s + warm_s][-1]
        end = self.progress[-1]
        return (end.trained - begin.trained) / (end.elapsed_s - begin.elapsed_s)

    def reached_s(self, mean_return: float) -> float | None:
        """The time from launch to this mean return; None if it was not reached."""
        for each in self.progress:
            if each.mean_return is not None and each.mean_return >= mean_return:
                return each.elapsed_s
        return None

    def has_trained(self, seconds: float) -> bool:
        """Whether it has trained for longer than that."""
        start_s = self.start_s()
        return start_s is not None and self.progress[-1].elapsed_s > start_s + seconds


def run_turn(command: Sequence[str], is_enough: Callable[[Turn], bool], limit_s: float) -> Turn:
    """Run it until enough was said or the time is over, in a folder that goes with it."""
    with tempfile.TemporaryDirectory(prefix="peers-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        # First in, last out: all processes have ended when the folder goes.
        with Family() as family:
            process = _launch(command, folder)
            turn = _watch(process, folder, family, is_enough, limit_s)
        process.wait()
    return turn


def _launch(command: Sequence[str], folder: Path) -> "subprocess.Popen[bytes]":
    environment = {**os.environ, **ENVIRONMENT, LAUNCHED_AT: str(time.monotonic())}
    with (folder / "said").open("w") as said, (folder / "errors").open("w") as errors:
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=said, stderr=errors)


def _watch(
    process: "subprocess.Popen[bytes]",
    folder: Path,
    family: Family,
    is_enough: Callable[[Turn], bool],
    limit_s: float,
) -> Turn:
    said = Tail(folder / "said")
    progress: list[Progress] = []
    peak_bytes = 0
    end_at = time.monotonic() + limit_s
    while time.monotonic() < end_at:
        has_ended = process.poll() is not None
        # Some print other things as well.
        lines = [line for line in said.new_lines() if line.startswith('{"elapsed_s": ')]
        progress += [Progress(**json.loads(line)) for line in lines]
        peak_bytes = max(peak_bytes, family.rss_bytes())
        if is_enough(Turn(progress)):
            break
        if has_ended:
            words = (folder / "errors").read_text()[-LAST_WORDS:]
            raise RuntimeError(f"{process.args!r} ended with {process.returncode}:\n{words}")
        time.sleep(POLL_S)
    return Turn(progress, peak_bytes)
