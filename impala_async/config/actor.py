"""The actor's section of the config: its environments, and how they are stepped."""

import re
from collections.abc import Iterator
from typing import Literal

from pydantic import Field, field_validator

from impala_async.config.section import MOST_S, Section

MAX_COLUMNS = 4096
SamplerName = Literal["auto", "serial", "vector", "parallel"]
DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")


class ActorSection(Section):
    """An actor process. It gets all of this from the learner when it says hello."""

    num_envs: int = Field(
        8, ge=1, le=MAX_COLUMNS, description="Environments, so columns, per actor."
    )
    sampler: SamplerName = Field(
        "auto",
        description="serial: environments in turn; vector: the environment's own numpy code; "
        "parallel: in processes of their own; auto: what a short measurement finds to be fastest.",
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

    @field_validator("sampler", mode="before")
    @classmethod
    def _is_no_device(cls, sampler: object) -> object:
        if sampler == "central":
            raise ValueError(
                'wants parallel, with where the policy acts in actor.device, got "central"'
            )
        return sampler

    def broken_rules(self) -> Iterator[str]:
        if DEVICE.fullmatch(self.device) is None:
            yield f"device wants auto, cpu, cuda or cuda:N, got {self.device!r}"
        if self.num_workers is None:
            return
        if self.sampler in ("serial", "vector"):
            yield (
                f"num_workers does nothing with sampler {self.sampler}, which steps environments "
                "in the actor itself: drop it, or set sampler to parallel or auto"
            )
        elif self.num_workers > self.num_envs:
            yield (
                f"num_workers ({self.num_workers}) must not exceed num_envs ({self.num_envs}): "
                "each worker steps at least one"
            )
