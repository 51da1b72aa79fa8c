"""The actor's section of the config: its environments, and how they are stepped."""

import re
from collections.abc import Iterator
from functools import partial
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from impala_async.config.section import MOST_S, Section, check_count

MAX_COLUMNS = 4096
SamplerName = Literal["auto", "serial", "vector", "parallel"]


def _check_device(name: str) -> str:
    # torch keeps the number in eight bits, and takes 256 for 0.
    if re.fullmatch(r"auto|cpu|cuda(:(0|[1-9]\d?))?", name) is None:
        raise ValueError(f"wants auto, cpu, cuda or cuda:N with N up to 99, got {name!r}")
    return name


Device = Annotated[str, AfterValidator(_check_device)]


NumEnvs = Annotated[
    Annotated[int, Field(ge=1, le=MAX_COLUMNS)] | Literal["auto"],
    BeforeValidator(partial(check_count, most=MAX_COLUMNS)),
]


class ActorSection(Section):
    """An actor process. It gets all of this from the learner when it says hello."""

    num_envs: NumEnvs = 8
    """Environments, so columns, per actor. auto: as many as a short measurement finds to pay, up to
    a batch."""
    sampler: SamplerName = "auto"
    """serial: environments in turn; vector: the environment's own numpy code; parallel: in
    processes of their own; auto: what a short measurement finds to be fastest."""
    num_workers: int | None = Field(None, ge=1, le=1024)
    """Processes that step environments; none: one for each core that the actor may use."""
    device: Device = "auto"
    """Where the policy acts, with any sampler: auto, cpu, cuda or cuda:N. cuda: actors of one
    host take its GPUs in turn. auto: the CPU, or with sampler auto such a GPU if that is found to
    be faster."""
    threads: int = Field(1, ge=1, le=1024)
    """torch threads of an actor."""
    compress: Literal["auto", "on", "off"] = "auto"
    """zstd for observations, while it makes them a fifth smaller. auto: to learners elsewhere."""
    reconnect_s: float = Field(60.0, gt=0, le=MOST_S)
    """How long an actor looks for a lost learner before it exits."""

    @property
    def least_envs(self) -> int:
        return 1 if self.num_envs == "auto" else self.num_envs

    def broken_rules(self) -> Iterator[str]:
        if self.num_envs == "auto":
            return
        if self.num_workers is not None and self.num_workers > self.num_envs:
            yield (
                f"num_workers ({self.num_workers}) must not exceed num_envs ({self.num_envs}): "
                "each worker steps at least one"
            )
