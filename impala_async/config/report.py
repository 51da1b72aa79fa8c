"""The `[report]` section: which sinks take the reports of a run."""

from collections.abc import Iterator
from typing import Any

from pydantic import Field, field_validator

from impala_async.config.section import NAME_OF_OWN, Named, Section, read_named

SINKS = {
    "tensorboard": "impala_async.metrics.trackers:TensorBoardSink",
    "wandb": "impala_async.metrics.trackers:WandbSink",
}
"""The sinks that a run may have besides `metrics.jsonl` and the terminal, each with its class."""


class ReportSection(Section):
    """Where reports go, besides `metrics.jsonl` and the terminal."""

    sinks: tuple[Named, ...] = Field(
        (),
        description="tensorboard, wandb, or your own as package.module:Name; with arguments a "
        "table of name and kwargs.",
    )

    @field_validator("sinks", mode="before")
    @classmethod
    def _read_sinks(cls, given: Any) -> Any:
        return read_named(
            given, '["tensorboard"] or [{name = "wandb", kwargs = {project = "mine"}}]'
        )

    def broken_rules(self) -> Iterator[str]:
        for sink in self.sinks:
            if sink.name not in SINKS and NAME_OF_OWN.fullmatch(sink.name) is None:
                yield (
                    f"sinks must be {', '.join(SINKS)}, or package.module:Name of your own, "
                    f"got {sink.name!r}"
                )
