"""The knobs of the learner: batches, the ring, limits and periods."""

from collections.abc import Iterator

from pydantic import Field, field_validator

from impala_async.config.actor import DEVICE, MAX_COLUMNS
from impala_async.config.section import MOST_S, Section


class LearnerSection(Section):
    """The learner: batches, ring, limits and periods."""

    device: str = Field("auto", description="auto, cpu, cuda or cuda:N.")
    threads: int = Field(1, ge=1, le=1024, description="torch threads of the learner.")
    batch_columns: int = Field(
        16, ge=1, le=MAX_COLUMNS, description="B: trajectories per batch; in lockstep all actors'."
    )
    num_passes: int = Field(1, ge=1, description="Updates made of each batch.")
    minibatch_buffer_size: int = Field(1, ge=1, description="Batches replayed side by side.")
    init_num_passes: int | None = Field(
        None, ge=1, description="Passes of the ring's first batch; none: num_passes."
    )
    queue_size: int = Field(
        2,
        ge=1,
        description="Batches that may wait for the learner, beside the one that is filling. In "
        "lockstep always 1.",
    )
    max_lag: int = Field(
        100,
        ge=1,
        le=10_000,
        description="A trajectory older than this many updates is never trained on.",
    )
    publish_every_updates: int = Field(1, ge=1, description="Updates per published version.")
    report_every_s: float = Field(2.0, ge=0.01, le=MOST_S, description="Seconds between reports.")
    max_skipped_in_a_row: int = Field(
        50,
        ge=1,
        description="So many updates in a row whose loss, gradient or weights are not finite end "
        "the run.",
    )
    stuck_dump_s: float = Field(
        30.0,
        ge=2,
        le=1e6,
        description="An update or an event loop that takes this long shows the stacks of all "
        "threads. The first update may take ten times as long, and all of them three times as long "
        "as the longest so far.",
    )
    stuck_end_s: float = Field(
        60.0, ge=2, le=1e6, description="Likewise, one that takes this long ends the learner."
    )
    lease_s: float = Field(
        10.0,
        ge=1,
        le=MOST_S,
        description="An actor silent this long loses its credit. It shows that it lives five times "
        "as often, and at least every 2 s.",
    )

    @field_validator("device")
    @classmethod
    def _is_a_device(cls, device: str) -> str:
        if DEVICE.fullmatch(device) is None:
            raise ValueError(f"wants auto, cpu, cuda or cuda:N, got {device!r}")
        return device

    def broken_rules(self) -> Iterator[str]:
        if self.init_num_passes is not None and self.init_num_passes > self.num_passes:
            yield (
                f"init_num_passes ({self.init_num_passes}) must not exceed "
                f"num_passes ({self.num_passes})"
            )
        if self.publish_every_updates > self.max_lag:
            yield (
                f"publish_every_updates ({self.publish_every_updates}) must not exceed max_lag "
                f"({self.max_lag}), or all data is too old before new weights come out"
            )
        if self.stuck_dump_s >= self.stuck_end_s:
            yield (
                f"stuck_dump_s ({self.stuck_dump_s}) must be below stuck_end_s "
                f"({self.stuck_end_s}), which ends what is stuck"
            )

    @property
    def heartbeat_s(self) -> float:
        """How often an actor shows that it lives: a few late heartbeats end no lease."""
        return min(2.0, self.lease_s / 5)

    @property
    def starved_after_s(self) -> float:
        """A learner that has waited so long for a batch is starved."""
        return min(5.0, self.lease_s / 2)

    @property
    def expected_lag_updates(self) -> int:
        """Updates between acting and training when every queue is full (one batch granted)."""
        return self.num_passes * (self.queue_size + self.minibatch_buffer_size + 1)
