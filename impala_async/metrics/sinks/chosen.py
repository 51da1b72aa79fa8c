"""The sinks that `report.sinks` names: made at the start, then fed by a thread each.

Nobody waits for such a sink while a run goes on: one that is slow loses its oldest reports, and one
that fails is told of once and gets no more. At the end all of them together have a few seconds.

Owns these threads, which are named `sink-NAME`. It is used by the reporter only.
"""

import contextlib
import logging
import queue
import threading
import time
from typing import Final, cast

from impala_async.config.run import SINKS, ReportSection
from impala_async.config.section import Named
from impala_async.errors import ConfigError
from impala_async.metrics.names import Value
from impala_async.metrics.sinks import Run, Sink
from impala_async.user_code import NamedInSetting, import_callable

_LOG = logging.getLogger(__name__)
_KEY: Final = "report.sinks"
# Reports that may wait for a slow sink, and how long their last ones may take. A learner that is
# told to end has ten seconds for everything.
MAX_WAITING: Final = 64
CLOSE_WITHIN_S: Final = 4.0


class ChosenSinks:
    """As many as a section names, as one sink. Each may wait and fail without the others."""

    def __init__(self, section: ReportSection, run: Run) -> None:
        """Make them; raises ConfigError where one cannot be made."""
        sinks = [(one.name, _make(one, run)) for one in section.sinks]
        self._feeds = [_Feed(name, sink) for name, sink in sinks]

    def write(self, report: dict[str, Value]) -> None:
        """Hand the report over; nobody waits for it to be taken."""
        for feed in self._feeds:
            feed.put(report)

    def close(self) -> None:
        """Let all of them take what waits and close, within a few seconds."""
        for feed in self._feeds:
            feed.end()
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

    def put(self, report: dict[str, Value]) -> None:
        """Where too many reports wait, the oldest is lost."""
        if not self._thread.is_alive():
            return
        if self._waiting.full():
            self._lose_oldest()
        self._waiting.put_nowait(dict(report))  # what it does to it no other one sees

    def end(self) -> None:
        """No more reports come."""
        if self._waiting.full():
            self._lose_oldest()
        self._waiting.put_nowait(None)

    def join(self, deadline: float) -> None:
        """Until the sink has closed, or until this moment of the monotonic clock."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            _LOG.warning("%s: %s has not closed in time, and is left alone", _KEY, self._name)

    def _lose_oldest(self) -> None:
        with contextlib.suppress(queue.Empty):  # the thread may have just taken it
            self._waiting.get_nowait()
        if not self._has_lost:
            self._has_lost = True
            _LOG.warning("%s: %s is too slow, and misses some reports", _KEY, self._name)

    def _run(self) -> None:
        try:
            while (report := self._waiting.get()) is not None:
                with NamedInSetting(_KEY, self._name, "to take a report"):
                    self._sink.write(report)
            with NamedInSetting(_KEY, self._name, "to close"):
                self._sink.close()
        except ConfigError as error:
            _LOG.error("%s; it gets no more reports, and training goes on", error)


def _make(one: Named, run: Run) -> Sink:
    make = import_callable(f"{_KEY}: {one.name}", SINKS.get(one.name, one.name))
    with NamedInSetting(_KEY, one.name, "when it was made"):
        sink = make(run, **one.kwargs)
    if not all(callable(getattr(sink, method, None)) for method in ("write", "close")):
        raise ConfigError(
            f"{_KEY}: {one.name} made a {type(sink).__name__}, which is no sink: it must have "
            "write(report) and close()"
        )
    return cast(Sink, sink)
