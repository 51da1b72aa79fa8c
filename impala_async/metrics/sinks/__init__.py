"""Where report lines go. One Protocol; each sink is a file of its own, imported where used.

`metrics.jsonl` and the console take every report on the event loop, so they must be quick, and
they outlive their medium: a full disk, a closed terminal or a dead peer is logged once and tried
again, and never ends a run. The sinks that `report.sinks` chooses have a thread each (`chosen`).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from impala_async.metrics.names import Value


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
