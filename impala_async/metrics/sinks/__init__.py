"""Where report lines go. One Protocol; each sink is a file of its own, imported where used.

A sink is used by the reporter alone, one call per report interval. It must be quick, since the
event loop waits for it, and it must outlive its medium: a full disk, a closed terminal or a
dead peer is logged once and tried again, and never ends a run.
"""

from typing import Protocol

from impala_async.metrics.names import Value


class Sink(Protocol):
    """Takes every report of a run in order, then one `close`."""

    def write(self, report: dict[str, Value]) -> None:
        """Take one report; it belongs to all sinks and is not to be changed."""
        ...

    def close(self) -> None:
        """Let go of the medium; a second call does nothing."""
        ...
