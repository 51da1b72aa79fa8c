"""The processes of a run hold these: memory, descriptors, threads, as the kernel counts them."""

from contextlib import suppress
from typing import NamedTuple

import psutil

DOORS = {
    "impala_async.learner": "learner",
    "impala_async.actor": "actor",
}
GONE = (psutil.NoSuchProcess, psutil.ZombieProcess)
# The kernel walks all pages of a process for its PSS.
LOOKS_PER_PSS = 4


class Held(NamedTuple):
    """The resources of one process at one moment; `kind` says which process it is."""

    kind: str
    rss_bytes: int
    descriptors: int
    threads: int


class PeakMemory:
    """The greatest sum over learner, actors and what they start; `train` itself is not in it.

    RSS counts a page that several share for each of them, PSS once. `pss_bytes` stays 0 where the
    kernel does not let us look.
    """

    def __init__(self, train_pid: int) -> None:
        self._train = psutil.Process(train_pid)
        self._num_looks = 0
        self.rss_bytes = self.pss_bytes = 0

    def look(self) -> None:
        """Add this moment."""
        with suppress(*GONE):
            processes = self._train.children(recursive=True)
            self.rss_bytes = max(self.rss_bytes, sum(map(_rss_bytes, processes)))
            if self._num_looks % LOOKS_PER_PSS == 0:
                self.pss_bytes = max(self.pss_bytes, sum(map(_pss_bytes, processes)))
            self._num_looks += 1


def cpu_s(train_pid: int) -> float:
    """Processor seconds so far of `train` and all that runs below it now."""
    spent_s = 0.0
    with suppress(*GONE):
        train = psutil.Process(train_pid)
        for process in (train, *train.children(recursive=True)):
            with suppress(*GONE):
                times = process.cpu_times()
                spent_s += times.user + times.system
    return spent_s


def held_by_each(train_pid: int) -> dict[int, Held]:
    """Look at `train` and all below it, by their ids."""
    held: dict[int, Held] = {}
    with suppress(*GONE):
        train = psutil.Process(train_pid)
        for process in (train, *train.children(recursive=True)):
            with suppress(*GONE, psutil.AccessDenied):
                held[process.pid] = Held(
                    _kind(process, train),
                    process.memory_info().rss,
                    process.num_fds(),
                    process.num_threads(),
                )
    return held


def _kind(process: psutil.Process, train: psutil.Process) -> str:
    if process == train:
        return "train"
    doors = [DOORS[part] for part in process.cmdline() if part in DOORS]
    return doors[0] if doors else "other"


def _rss_bytes(process: psutil.Process) -> int:
    with suppress(*GONE):
        rss: int = process.memory_info().rss
        return rss
    return 0


def _pss_bytes(process: psutil.Process) -> int:
    with suppress(*GONE, psutil.AccessDenied):
        pss: int = process.memory_full_info().pss
        return pss
    return 0
