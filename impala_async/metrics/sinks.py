"""Where report lines go, and the sinks that `report.sinks` names, fed by a thread each.

`metrics.jsonl` and the console take every report on the event loop, so they must be quick, and
they outlive their medium: a full disk, a closed terminal or a dead peer is logged once and tried
again, and never ends a run.

Nobody waits for a chosen sink while a run goes on: one that is slow loses its oldest reports, and
one that fails is told of once and gets no more. At the end all of them together have a few seconds.
"""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, cast

from impala_async.config.run import SINKS, ReportSection
from impala_async.config.section import Named
from impala_async.errors import ConfigError
from impala_async.metrics.names import Value
from impala_async.user_code import UserCode, import_callable

_LOG = logging.getLogger(__name__)
_KEY: Final = "report.sinks"
# Reports that may wait for a slow sink, and how long their last ones may take. A learner that is
# told to end has ten seconds for everything.
MAX_WAITING: Final = 64
CLOSE_WITHIN_S: Final = 4.0


class Sink(Protocol):
    """Takes every report of a run in order, then one `close`."""

    def write(self, report: dict[str, Value]) -> None:
        """Take one report; it belongs to all sinks and is not to be changed."""
        ...

    def close(self) -> None:
        """Let go of the medium; a second call does nothing."""
        ...


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
    """As many as a section names, as one sink. Each may wait and fail without the others."""

    def __init__(self, section: ReportSection, run: Run) -> None:
        """Make them; raises ConfigError where one cannot be made."""
        sinks = [(one.name, _make(one, run)) for one in section.sinks]
        self._feeds = [_Feed(name, sink) for name, sink in sinks]

    def write(self, report: dict[str, Value]) -> None:
        """Hand the report over; nobody waits for it to be taken."""
        for feed in self._feeds:
            feed.put(deepcopy(report))  # what one does to it no other one sees

    def close(self) -> None:
        """Let all of them take what waits and close, within a few seconds."""
        for feed in self._feeds:
            feed.put(None)
        deadline = time.monotonic() + CLOSE_WITHIN_S
        for feed in self._feeds:
            feed.join(deadline)
        self._feeds.clear()


class _Feed:
    """The thread of one sink, and the reports that wait for it."""

    def __init__(self, name: str, sink: Sink) -> None:
        self._name, self._sink = name, sink
        self._waiting: queue.Queue[dict[str, Value] | None] = queue.Queue(MAX_WAITING)
        self._has_lost = False
        # Nobody waits for it for ever: a sink may hang.
        self._thread = threading.Thread(target=self._run, name=f"sink-{name}", daemon=True)
        self._thread.start()

    def put(self, report: dict[str, Value] | None) -> None:
        """Where too many reports wait, the oldest is lost; None is the end."""
        if not self._thread.is_alive():
            return
        if self._waiting.full():
            with contextlib.suppress(queue.Empty):  # the thread may have just taken it
                self._waiting.get_nowait()
            if not self._has_lost:
                self._has_lost = True
                _LOG.warning("%s: %s is too slow, and misses some reports", _KEY, self._name)
        self._waiting.put_nowait(report)

    def join(self, deadline: float) -> None:
        """Until the sink has closed, or until this moment of the monotonic clock."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            _LOG.warning("%s: %s has not closed in time, and is left alone", _KEY, self._name)

    def _run(self) -> None:
        try:
            while (report := self._waiting.get()) is not None:
                with UserCode(f"{_KEY}: {self._name}", "to take a report"):
                    self._sink.write(report)
            with UserCode(f"{_KEY}: {self._name}", "to close"):
                self._sink.close()
        except ConfigError as error:
            _LOG.error("%s; it gets no more reports, and training goes on", error)


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
