"""The actor's section of the config: its environments, and how they are stepped."""

import re
from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from impala_async.config.section import MOST_S, Section

MAX_COLUMNS = 4096
SamplerName = Literal["auto", "serial", "vector", "parallel", "alternating"]
# These step environments in processes of their own.
WITH_WORKERS = ("parallel", "alternating")
DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")


class ActorSection(Section):
    """An actor process. It gets all of this from the learner when it says hello."""

    num_envs: int = Field(
        8, ge=1, le=MAX_COLUMNS, description="Environments, so columns, per actor."
    )
    sampler: SamplerName = Field(
        "auto",
        description="serial: environments in turn; vector: the environment's own numpy code; "
        "parallel: in processes of their own; alternating: in two groups of those, one steps while "
        "the policy acts for the other; auto: what a short measurement finds to be fastest.",
    )
    num_workers: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="Processes that step environments; none: one for each core that the actor "
        "may use.",
    )
    device: str = Field(
        "auto",
        description="Where the policy acts, with any sampler: auto, cpu, cuda or cuda:N. auto: the "
        "CPU, or with sampler auto a GPU if that is found to be faster.",
    )
    threads: int = Field(1, ge=1, le=1024, description="torch threads of an actor.")
    compress: Literal["auto", "on", "off"] = Field(
        "auto",
        description="zstd for observations on their way, while it makes them a fifth smaller. "
        "auto: to learners on other hosts.",
    )
    reconnect_s: float = Field(
        60.0,
        gt=0,
        le=MOST_S,
        description="How long an actor looks for a lost learner before it exits.",
    )

    def broken_rules(self) -> Iterator[str]:
        if DEVICE.fullmatch(self.device) is None:
            yield f"device wants auto, cpu, cuda or cuda:N, got {self.device!r}"
        if self.num_workers is not None:
            yield from self._broken_workers(self.num_workers)
        if self.sampler == "alternating" and self.num_envs % 2:
            yield (
                f"num_envs ({self.num_envs}) must be even with sampler alternating, which steps "
                "them in two groups of one size"
            )

    def _broken_workers(self, num_workers: int) -> Iterator[str]:
        if self.sampler in ("serial", "vector"):
            yield (
                f"num_workers does nothing with sampler {self.sampler}, which steps environments "
                f"in the actor itself: drop it, or set sampler to {', '.join(WITH_WORKERS)} or auto"
            )
        elif num_workers > self.num_envs:
            yield (
                f"num_workers ({num_workers}) must not exceed num_envs ({self.num_envs}): each "
                "worker steps at least one"
            )
        if self.sampler == "alternating" and num_workers % 2:
            yield (
                f"num_workers ({num_workers}) must be even with sampler alternating, which has "
                "two groups of them"
            )
