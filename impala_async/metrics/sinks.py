"""Where report lines go: `metrics.jsonl`, and the sinks that `report.sinks` names.

Nobody waits for a chosen sink while a run goes on: one that is slow loses its oldest reports, and
one that fails is told of once and gets no more. At the end all of them together have a few seconds.
"""

import contextlib
import errno
import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from stat import S_ISREG
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

from impala_async.config.run import SINKS, ReportSection
from impala_async.errors import ConfigError
from impala_async.metrics.names import Value, numbers
from impala_async.user_code import UserCode, import_callable

_LOG = logging.getLogger(__name__)
Report: TypeAlias = dict[str, Value]


class Sink(Protocol):
    """Takes every report of a run in order, then one `close`."""

    def write(self, report: Report) -> None:
        """It belongs to all sinks and is not to be changed."""

    def close(self) -> None: ...


# A pipe that nobody empties is not waited for.
_FLAGS: Final = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
# No report is nearly as long.
_MOST_LINE_BYTES: Final = 1 << 18


@dataclass(eq=False)
class JsonlSink:
    """Appends reports to `path`, which the first of them creates: a line of strict JSON each.

    Every report opens the file anew, so one that is moved away is followed by a new one. A disk
    that fails is logged once and tried again. `reserve` says how many bytes reports leave free for
    what matters more, and `is_gone` whether the folder is not there any more, or somebody else's.
    """

    path: Path
    reserve: Callable[[], int] = lambda: 0
    is_gone: Callable[[], bool] = lambda: False
    _num_lost: int = field(default=0, init=False)

    def write(self, report: Report) -> None:
        self.append(json_line(report))

    def append(self, lines: bytes) -> None:
        if self.is_gone():
            return
        try:
            _append(self.path, lines, self.reserve())
        except OSError as error:
            if self._num_lost == 0:
                _LOG.error("%s: cannot be written (%s); still trying", self.path, error)
            self._num_lost += lines.count(b"\n")
            return
        if self._num_lost:
            _LOG.warning("%s: written again, %d lines lost", self.path, self._num_lost)
        self._num_lost = 0

    def close(self) -> None:
        """Nothing is open between two reports."""


def json_line(content: Mapping[str, Value]) -> bytes:
    return json.dumps(content, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def _append(path: Path, line: bytes, reserve: int) -> None:
    fd = os.open(path, _FLAGS, 0o644)
    try:
        disk = os.fstatvfs(fd)
        # Some file systems do not know what is free: all they say is 0.
        if disk.f_blocks and disk.f_bavail * disk.f_frsize < reserve:
            raise OSError(errno.ENOSPC, "what is free is left to checkpoints")
        end = _cut_torn_line(fd)
        num_written = os.write(fd, line)
        if num_written < len(line):
            # This process is the only writer, so the torn piece is the end of the file.
            os.ftruncate(fd, end)
            raise OSError(errno.ENOSPC, f"{num_written} of {len(line)} bytes written")
    finally:
        os.close(fd)


def _cut_torn_line(fd: int) -> int:
    """Shorten a file to its last whole line, as a crash may have torn the last one; its length."""
    status = os.fstat(fd)
    if not S_ISREG(status.st_mode):  # a pipe or a device
        return 0
    start = max(0, status.st_size - _MOST_LINE_BYTES)
    end = start + os.pread(fd, _MOST_LINE_BYTES, start).rfind(b"\n") + 1
    if end < status.st_size:
        os.ftruncate(fd, end)
    return end


_KEY: Final = "report.sinks"
# Reports that may wait for a slow sink, and how long the last ones of all may take.
MAX_WAITING: Final = 64
CLOSE_WITHIN_S: Final = 4.0


class Run(NamedTuple):
    """The facts about a run with which a sink of `report.sinks` is made: `Name(run, **kwargs)`."""

    folder: Path
    run_id: str
    config: Mapping[str, Any]
    """All settings, as `config.json` has them."""
    env_steps: int
    """Trained before this start; more than 0 in a run that is resumed."""


class ChosenSinks:
    """All sinks that a section names, as one. Each has a thread, to wait and fail on its own."""

    def __init__(self, section: ReportSection, run: Run) -> None:
        sinks: list[tuple[str, Sink]] = []
        for one in section.sinks:
            make = import_callable(f"{_KEY}: {one.name}", SINKS.get(one.name, one.name))
            with UserCode(f"{_KEY}: {one.name}", "when it was made"):
                sinks.append((one.name, sink := make(run, **one.kwargs)))
                _ = sink.write, sink.close  # it may be something else
        self._waiting: dict[threading.Thread, queue.Queue[Report | None]] = {}
        self._slow: set[threading.Thread] = set()
        for name, sink in sinks:
            waiting: queue.Queue[Report | None] = queue.Queue(MAX_WAITING)
            body = partial(_feed, name, sink, waiting)
            # Nobody waits for it for ever: a sink may hang.
            thread = threading.Thread(target=body, name=name, daemon=True)
            self._waiting[thread] = waiting
            thread.start()

    def write(self, report: Report | None) -> None:
        """Hand the report over; None is the end."""
        for thread, waiting in self._waiting.items():
            if not thread.is_alive():
                continue
            if waiting.full():
                with contextlib.suppress(queue.Empty):  # the thread may have just taken it
                    waiting.get_nowait()
                if thread not in self._slow:
                    _LOG.warning("%s: %s is too slow, and misses some reports", _KEY, thread.name)
                self._slow.add(thread)
            waiting.put_nowait(deepcopy(report))  # what one does to it no other one sees

    def close(self) -> None:
        self.write(None)
        deadline = time.monotonic() + CLOSE_WITHIN_S
        for thread in self._waiting:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                _LOG.warning("%s: %s has not closed in time, and is left alone", _KEY, thread.name)


def _feed(name: str, sink: Sink, waiting: "queue.Queue[Report | None]") -> None:
    def write_all() -> None:
        while (report := waiting.get()) is not None:
            sink.write(report)

    # One that fails is closed at once.
    for where, work in (("to take a report", write_all), ("to close", sink.close)):
        try:
            with UserCode(f"{_KEY}: {name}", where):
                work()
        except ConfigError as error:
            _LOG.error("%s; it gets no more reports, and training goes on", error)


class TensorBoardSink:
    """Numbers by env steps in an event file in the run folder. `settings` are SummaryWriter's."""

    def __init__(self, run: Run, **settings: Any) -> None:
        # torch's own writer takes two seconds to import.
        from tensorboardX import SummaryWriter

        # Steps that an earlier start wrote and a resumed one trains again are hidden.
        usual = {"logdir": str(run.folder / "tensorboard"), "purge_step": run.env_steps or None}
        self._writer = SummaryWriter(**usual | settings)

    def write(self, report: Report) -> None:
        found = numbers(report)
        for name, value in found.items():
            self._writer.add_scalar(name, value, int(found["env_steps_trained"]))

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """A run of Weights & Biases that has our id, and goes on when ours is resumed.

    It is begun by the first report, on the thread of the sink, as its server may not be reached.
    `settings` are those of `wandb.init`.
    """

    def __init__(self, run: Run, **settings: Any) -> None:
        import wandb

        usual = {
            "project": "impala-async",
            "name": run.folder.name,
            "id": run.run_id,
            "resume": "allow",
            "dir": str(run.folder),
            "config": dict(run.config),
            # The terminal belongs to our progress.
            "settings": {"console": "off"},
        }
        self._begin = partial(wandb.init, **usual | settings)
        self._run: Any = None

    def write(self, report: Report) -> None:
        if self._run is None:
            self._run = self._begin()
            self._run.define_metric("*", step_metric="env_steps_trained")
        self._run.log(numbers(report))

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
