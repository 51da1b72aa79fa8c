"""Every knob of the system: one frozen section per owner, gathered in `RunConfig`.

A function takes its own section, never the whole config. `config_load` reads them from a file
and the command line. Descriptions are what the help text and the configuration page show.
"""

import json
import re
import typing
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

# V-trace holds its own against data about this many updates old, and not much beyond.
SAFE_LAG_UPDATES = 8


class Section(BaseModel):
    """A frozen group of settings that refuses keys it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _truth_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """pydantic reads true as 1, which nobody means."""
        kind = cls.model_fields[str(info.field_name)].annotation
        takes_numbers = {int, float} & {kind, *typing.get_args(kind)}
        items = value if isinstance(value, list) else [value]
        if takes_numbers and any(isinstance(item, bool) for item in items):
            wanted = "numbers" if isinstance(value, list) else "a number"
            raise ValueError(f"wants {wanted}, got {json.dumps(value)}")
        if kind is bool and isinstance(value, int | float | str) and not isinstance(value, bool):
            raise ValueError(f"wants true or false, got {json.dumps(value)}")
        return value


class EnvSection(Section):
    """Which environment the actors step, and how the learner gets to know its spaces."""

    id: str = Field(min_length=1, description="Gymnasium id, or package.module:Name.")
    kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Keyword arguments of the environment."
    )
    probe: Literal["learner", "actor"] = Field(
        "learner",
        description="Who describes the spaces: a short-lived child of the learner, or the first "
        "actor (when the environment is not installed at the learner).",
    )


class AlgorithmSection(Section):
    """The loss, its coefficients and the optimizer."""

    name: Literal["impala"] = Field("impala", description="The algorithm.")
    gamma: float = Field(0.99, ge=0, le=1, description="Discount per step.")
    lr: float = Field(5e-4, gt=0, description="Adam's learning rate at the start.")
    lr_end: float | None = Field(None, ge=0, description="Rate at the schedule's end; none: flat.")
    entropy_cost: float = Field(0.01, ge=0, description="Weight of the entropy bonus.")
    entropy_cost_end: float | None = Field(
        None, ge=0, description="Weight at the schedule's end; none: flat."
    )
    schedule_env_steps: int | None = Field(
        None, gt=0, description="Env steps trained at which the schedules reach their end."
    )
    value_cost: float = Field(0.5, ge=0, description="Weight of the value loss.")
    grad_clip: float | None = Field(40.0, gt=0, description="Largest global gradient norm.")
    rho_bar: float | None = Field(1.0, gt=0, description="V-trace bar on the TD weights.")
    c_bar: float | None = Field(1.0, gt=0, description="V-trace bar on the trace weights.")
    pg_rho_bar: float | None = Field(1.0, gt=0, description="V-trace bar in the policy gradient.")
    lambda_: float = Field(1.0, ge=0, le=1, alias="lambda", description="Trace decay.")
    adam_eps: float = Field(1e-5, gt=0, description="Adam's epsilon.")
    reward_scale: float = Field(
        1.0, description="Rewards are multiplied by this in the loss, never in reported returns."
    )
    reduction: Literal["mean", "sum"] = Field(
        "mean", description="Mean over valid rows, or the sum that the IMPALA paper uses."
    )

    @model_validator(mode="after")
    def _schedules_have_a_horizon(self) -> Self:
        ends = {"lr_end": self.lr_end, "entropy_cost_end": self.entropy_cost_end}
        named = [f"{key} ({value})" for key, value in ends.items() if value is not None]
        if named and self.schedule_env_steps is None:
            raise ValueError(f"{named[0]} needs schedule_env_steps: the steps to get there")
        if self.schedule_env_steps is not None and not named:
            raise ValueError(
                f"schedule_env_steps ({self.schedule_env_steps}) does nothing without lr_end or "
                "entropy_cost_end"
            )
        return self


class ModelSection(Section):
    """The network."""

    name: Literal["mlp"] = Field("mlp", description="The torso.")
    hidden_sizes: tuple[int, ...] = Field((64, 64), min_length=1, description="Hidden widths.")
    activation: Literal["tanh", "relu"] = Field("tanh", description="Between the layers.")
    shared_torso: bool = Field(
        False, description="One torso for policy and value, or one each (the default)."
    )

    @model_validator(mode="after")
    def _widths_are_positive(self) -> Self:
        if min(self.hidden_sizes) < 1:
            raise ValueError(f"hidden_sizes must all be at least 1, got {list(self.hidden_sizes)}")
        return self


class TrajectorySection(Section):
    """The unit that actors send."""

    rows: int = Field(50, ge=1, le=65535, description="T: env steps per trajectory.")


class ActorSection(Section):
    """An actor process. It gets all of this from the learner when it says hello."""

    num_envs: int = Field(8, ge=1, le=4096, description="Environments, so columns, per actor.")
    sampler: Literal["auto", "serial", "vector"] = Field(
        "auto",
        description="serial: environments in turn; vector: the environment's own numpy code.",
    )
    threads: int = Field(1, ge=1, description="torch threads of an actor.")
    reconnect_s: float = Field(
        60.0, gt=0, description="How long an actor looks for a lost learner before it exits."
    )


class LearnerSection(Section):
    """The learner: batches, ring, limits and periods."""

    device: str = Field("auto", description="auto, cpu, cuda or cuda:N.")
    threads: int = Field(1, ge=1, description="torch threads of the learner.")
    batch_columns: int = Field(16, ge=1, le=4096, description="B: trajectories per batch.")
    num_passes: int = Field(1, ge=1, description="Updates made of each batch.")
    minibatch_buffer_size: int = Field(1, ge=1, description="Batches replayed side by side.")
    init_num_passes: int | None = Field(
        None, ge=1, description="Passes of the ring's first batch; none: num_passes."
    )
    queue_size: int = Field(
        2,
        ge=1,
        description="Batches that may wait for the learner, beside the one that is filling.",
    )
    max_lag: int = Field(
        100,
        ge=1,
        le=10_000,
        description="A trajectory older than this many updates is never trained on.",
    )
    publish_every_updates: int = Field(1, ge=1, description="Updates per published version.")
    report_every_s: float = Field(2.0, gt=0, description="Seconds between reports.")
    starved_after_s: float = Field(5.0, gt=0, description="Waiting this long is starvation.")
    lease_s: float = Field(10.0, ge=1, description="An actor silent this long loses its credit.")
    heartbeat_s: float = Field(2.0, gt=0, description="How often an actor shows that it lives.")

    @model_validator(mode="after")
    def _counts_agree(self) -> Self:
        if self.init_num_passes is not None and self.init_num_passes > self.num_passes:
            raise ValueError(
                f"init_num_passes ({self.init_num_passes}) must not exceed "
                f"num_passes ({self.num_passes})"
            )
        replay_lag = self.minibatch_buffer_size * (self.num_passes - 1)
        if self.max_lag < replay_lag:
            raise ValueError(
                f"max_lag ({self.max_lag}) must be at least minibatch_buffer_size * "
                f"(num_passes - 1) = {replay_lag}, or no batch can have all its passes"
            )
        if self.publish_every_updates > self.max_lag:
            raise ValueError(
                f"publish_every_updates ({self.publish_every_updates}) must not exceed max_lag "
                f"({self.max_lag}), or all data is too old before new weights come out"
            )
        if self.heartbeat_s > self.lease_s / 2:
            raise ValueError(
                f"heartbeat_s ({self.heartbeat_s}) must be at most half of lease_s "
                f"({self.lease_s}), or a single late heartbeat ends a lease"
            )
        return self

    @property
    def expected_lag_updates(self) -> int:
        """Updates between acting and training when every queue is full (one batch granted)."""
        return self.num_passes * (self.queue_size + self.minibatch_buffer_size + 1)


TCP_URL = re.compile(
    r"tcp://(\[[0-9a-f:.]+(?:%\w+)?\]|[^\s:/\[\]]+):(\*|\d{1,5})", re.ASCII | re.IGNORECASE
)
# Hosts that stand for every interface of a machine.
EVERY_HOST = ("tcp://*", "tcp://0.0.0.0", "tcp://[::]")


def is_loopback(url: str) -> bool:
    """Whether only processes of this host can reach a tcp url."""
    host = url.removeprefix("tcp://").rpartition(":")[0]
    return host in {"localhost", "[::1]", "::1"} or host.startswith("127.")


class BindSection(Section):
    """Where the learner listens. `*` as the port takes a free one."""

    data: str = Field("tcp://127.0.0.1:5555", description="Trajectories come in here.")
    weights: str = Field("tcp://127.0.0.1:5556", description="Weights are pulled from here.")

    @field_validator("data", "weights")
    @classmethod
    def _is_tcp(cls, url: str) -> str:
        found = TCP_URL.fullmatch(url)
        if found and (found[2] == "*" or 0 < int(found[2]) < 65536):
            return url
        wanted = "tcp://HOST:PORT, or tcp://HOST:* for any free port"
        if url.removeprefix("tcp://").count(":") > 1:
            wanted += "; an IPv6 address stands in brackets, as in tcp://[::1]:5555"
        raise ValueError(f"wants {wanted}, got {json.dumps(url)}")

    @model_validator(mode="after")
    def _ports_differ(self) -> Self:
        (host, _, port), (other_host, _, other_port) = (
            url.rpartition(":") for url in (self.data, self.weights)
        )
        is_shared = host == other_host or not {host, other_host}.isdisjoint(EVERY_HOST)
        if port == other_port != "*" and is_shared:
            raise ValueError(
                f"data and weights each need a port of their own, got {self.data} and "
                f"{self.weights}"
            )
        return self


class TrainSection(Section):
    """The `train` door: one learner and its actors on this machine."""

    num_actors: int = Field(2, ge=1, le=1024, description="Actor processes to start.")


class StopSection(Section):
    """When a run is over: whichever comes first. Without any of them it runs until stopped."""

    env_steps: int | None = Field(None, gt=0, description="Env steps trained.")
    mean_return: float | None = Field(None, description="Mean return of the last 100 episodes.")
    wall_s: float | None = Field(None, gt=0, description="Seconds from the first update.")


class CheckpointSection(Section):
    """When checkpoints are written and how many stay."""

    every_s: float = Field(60.0, gt=0, description="Seconds between checkpoints.")
    keep: int = Field(3, ge=1, description="Newest checkpoints that stay (the best one stays too).")


class RunConfig(Section):
    """All settings of one run."""

    seed: int = Field(
        0, ge=0, le=2**31 - 1, description="Seeds the model and, with their rank, actors."
    )
    env: EnvSection
    algorithm: AlgorithmSection = AlgorithmSection()
    model: ModelSection = ModelSection()
    trajectory: TrajectorySection = TrajectorySection()
    actor: ActorSection = ActorSection()
    learner: LearnerSection = LearnerSection()
    bind: BindSection = BindSection()
    train: TrainSection = TrainSection()
    stop: StopSection = StopSection()
    checkpoint: CheckpointSection = CheckpointSection()

    @model_validator(mode="after")
    def _a_message_fits_a_batch(self) -> Self:
        if self.actor.num_envs > self.learner.batch_columns:
            raise ValueError(
                f"learner.batch_columns ({self.learner.batch_columns}) must be at least "
                f"actor.num_envs ({self.actor.num_envs}): an actor sends a column per environment"
            )
        return self

    def warnings(self) -> list[str]:
        """What is allowed but will probably disappoint."""
        found = []
        if self.learner.expected_lag_updates > SAFE_LAG_UPDATES:
            found.append(
                f"with all queues full a trajectory is {self.learner.expected_lag_updates} updates "
                f"old when it is trained on, and V-trace holds to about {SAFE_LAG_UPDATES}: lower "
                "learner.num_passes, learner.queue_size or learner.minibatch_buffer_size"
            )
        if is_loopback(self.bind.data) != is_loopback(self.bind.weights):
            found.append(
                f"bind.data ({self.bind.data}) and bind.weights ({self.bind.weights}): actors of "
                "other hosts must reach both"
            )
        for key, url in (("bind.data", self.bind.data), ("bind.weights", self.bind.weights)):
            if not is_loopback(url):
                found.append(
                    f"{key} = {url} leaves this host, and connections are neither encrypted nor "
                    "authenticated: use it only inside a network that you trust"
                )
        return found


class ActorSettings(Section):
    """What an actor is told when it is welcomed: all that it needs to know of a run."""

    seed: int
    env: EnvSection
    model: ModelSection
    trajectory: TrajectorySection
    actor: ActorSection
    max_lag: int

    @staticmethod
    def of(config: RunConfig) -> "ActorSettings":
        return ActorSettings(
            seed=config.seed,
            env=config.env,
            model=config.model,
            trajectory=config.trajectory,
            actor=config.actor,
            max_lag=config.learner.max_lag,
        )
