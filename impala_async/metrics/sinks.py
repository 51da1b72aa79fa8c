"""Where report lines go: `metrics.jsonl`, and the sinks that `report.sinks` names.

`metrics.jsonl` and the console take every report on the event loop, so they must be quick, and
they outlive their medium: a full disk, a closed terminal or a dead peer is logged once and tried
again, and never ends a run.

Nobody waits for a chosen sink while a run goes on: one that is slow loses its oldest reports, and
one that fails is told of once and gets no more. At the end all of them together have a few seconds.
"""

import contextlib
import errno
import inspect
import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from stat import S_ISREG
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, cast

from impala_async.config.run import SINKS, ReportSection
from impala_async.config.section import Named
from impala_async.errors import ConfigError
from impala_async.metrics.names import Value, numbers
from impala_async.user_code import UserCode, import_callable

_LOG = logging.getLogger(__name__)
Report: TypeAlias = dict[str, Value]


class Sink(Protocol):
    """Takes every report of a run in order, then one `close`."""

    def write(self, report: Report) -> None:
        """Take one report; it belongs to all sinks and is not to be changed."""
        ...

    def close(self) -> None:
        """Let go of the medium; a second call does nothing."""
        ...


# -------------------- metrics.jsonl

# A pipe that nobody empties is not waited for.
_FLAGS: Final = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
_TAIL_BYTES: Final = 65536


class JsonlSink:
    """Appends reports to `path`, which the first of them creates: a line of strict JSON each.

    Who reads the file meanwhile may see the last line without its end, and reads it again. If the
    disk fills up in the middle of a line, its half is cut off again, at once or, after a crash, by
    the next report. Every report opens the file anew, so it comes back when its folder does, and
    one that is moved away is followed by a new one.

    `reserve` says how many bytes reports leave free for what matters more, and `is_gone` whether
    the folder is not there any more, but perhaps somebody else's: then nothing is written.
    """

    def __init__(
        self,
        path: Path,
        *,
        reserve: Callable[[], int] = lambda: 0,
        is_gone: Callable[[], bool] = lambda: False,
    ) -> None:
        self._path = path
        self._reserve = reserve
        self._is_gone = is_gone
        self._num_lost = 0

    def write(self, report: Report) -> None:
        """Append one line, or note that it is lost; one that is no strict JSON is a bug of ours."""
        if self._is_gone():
            return
        line = json.dumps(report, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        try:
            _append(self._path, line, self._reserve())
        except OSError as error:
            if self._num_lost == 0:
                _LOG.error("%s: cannot be written (%s); still trying", self._path, error)
            self._num_lost += 1
            return
        if self._num_lost:
            _LOG.warning("%s: written again, %d reports lost", self._path, self._num_lost)
        self._num_lost = 0

    def close(self) -> None:
        """Nothing is open between two reports."""


def _append(path: Path, line: bytes, reserve: int) -> None:
    """Append by one `write`."""
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
    """Shorten a file to its last whole line; a pipe or a device has no such thing."""
    status = os.fstat(fd)
    if not S_ISREG(status.st_mode):
        return 0
    end, newline = status.st_size, -1
    while end > 0 and newline < 0:
        start = max(0, end - _TAIL_BYTES)
        newline = os.pread(fd, end - start, start).rfind(b"\n")
        end = start + newline + 1
    if end < status.st_size:
        os.ftruncate(fd, end)
    return end


# -------------------- those that a run names

_KEY: Final = "report.sinks"
# Reports that may wait for a slow sink, and how long their last ones may take. A learner that is
# told to end has ten seconds for everything.
MAX_WAITING: Final = 64
CLOSE_WITHIN_S: Final = 4.0


class Run(NamedTuple):
    """The facts about a run with which a sink of `report.sinks` is made: `Name(run, **kwargs)`."""

    folder: Path
    """That of the run."""
    run_id: str
    """The same in all starts of a run."""
    config: Mapping[str, Any]
    """All settings, as `config.json` has them."""
    env_steps: int
    """Trained before this start; more than 0 in a run that is resumed."""


class ChosenSinks:
    """As many as a section names, as one sink. Each has a thread, to wait and fail on its own."""

    def __init__(self, section: ReportSection, run: Run) -> None:
        """Make them; raises ConfigError where one cannot be made."""
        sinks = [(one.name, _make(one, run)) for one in section.sinks]
        self._waiting: dict[threading.Thread, queue.Queue[Report | None]] = {}
        self._slow: set[threading.Thread] = set()
        for name, sink in sinks:
            waiting: queue.Queue[Report | None] = queue.Queue(MAX_WAITING)
            # Nobody waits for it for ever: a sink may hang.
            thread = threading.Thread(
                target=_feed, args=(name, sink, waiting), name=name, daemon=True
            )
            self._waiting[thread] = waiting
            thread.start()

    def write(self, report: Report | None) -> None:
        """Hand the report over; nobody waits for it to be taken. None is the end."""
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
        """Let all of them take what waits and close, within a few seconds."""
        self.write(None)
        deadline = time.monotonic() + CLOSE_WITHIN_S
        for thread in self._waiting:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                _LOG.warning("%s: %s has not closed in time, and is left alone", _KEY, thread.name)
        self._waiting.clear()


def _make(one: Named, run: Run) -> Sink:
    make = import_callable(f"{_KEY}: {one.name}", SINKS.get(one.name, one.name))
    with UserCode(f"{_KEY}: {one.name}", "when it was made"):
        sink = make(run, **one.kwargs)
    if not all(callable(getattr(sink, method, None)) for method in ("write", "close")):
        raise ConfigError(
            f"{_KEY}: {one.name} made a {type(sink).__name__}, which is no sink: it must have "
            "write(report) and close()"
        )
    return cast(Sink, sink)


def _feed(name: str, sink: Sink, waiting: "queue.Queue[Report | None]") -> None:
    """The body of a thread: one sink takes what waits for it."""
    try:
        while (report := waiting.get()) is not None:
            with UserCode(f"{_KEY}: {name}", "to take a report"):
                sink.write(report)
        with UserCode(f"{_KEY}: {name}", "to close"):
            sink.close()
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

    It is begun by the first report, on the thread of the sink: that may take long where its server
    cannot be reached, and must not keep training waiting. `settings` are those of `wandb.init`.
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
        # A setting that does not exist is told of now.
        inspect.signature(wandb.init).bind(**usual | settings)
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
