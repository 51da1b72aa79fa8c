"""Every knob of the system: one frozen section per owner, gathered in `RunConfig`.

A function takes its own section, never the whole config. `load.py` reads them from a file
and the command line. Descriptions are what the help text and the configuration page show.
"""

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from impala_async.config.actor import MAX_COLUMNS, ActorSection
from impala_async.config.algorithm import AlgorithmSection
from impala_async.config.bind import BindSection, is_loopback
from impala_async.config.env import EnvSection
from impala_async.config.learner import LearnerSection
from impala_async.config.model import ModelSection
from impala_async.config.policies import PoliciesSection
from impala_async.config.report import ReportSection
from impala_async.config.section import MOST_S, Section

# V-trace holds its own against data about this many updates old, and not much beyond.
SAFE_LAG_UPDATES = 8
# Lockstep decides these by itself: the lag is known, and one batch waits while one is trained.
DECIDED_BY_LOCKSTEP = ("learner.max_lag", "learner.queue_size")
LOCKSTEP_QUEUE_SIZE = 1


class TrajectorySection(Section):
    """The unit that actors send."""

    rows: int = Field(50, ge=1, le=65535, description="T: env steps per trajectory.")


class PaceSection(Section):
    """Whether actors and learner wait for each other."""

    mode: Literal["async", "lockstep"] = Field(
        "async",
        description="async: nobody waits. lockstep: one update per trajectory of every actor, all "
        "with the same weights, in an order that is always the same.",
    )
    lag: int = Field(
        0, ge=0, le=1, description="lockstep: actors are so many versions behind: 1 overlaps both."
    )
    on_loss: Literal["go_on", "stop"] = Field(
        "go_on", description="lockstep: what happens when the session of an actor ends."
    )

    @property
    def is_lockstep(self) -> bool:
        return self.mode == "lockstep"

    def broken_rules(self) -> Iterator[str]:
        for key, default in (("lag", 0), ("on_loss", "go_on")):
            if getattr(self, key) != default and not self.is_lockstep:
                yield f"{key} does nothing in mode async: drop it, or set mode lockstep"


class TrainSection(Section):
    """The `train` door: one learner and its actors on this machine."""

    num_actors: int = Field(2, ge=1, le=1024, description="Actor processes to start.")


class StopSection(Section):
    """When a run is over: whichever comes first. Without any of them it runs until stopped."""

    env_steps: int | None = Field(None, gt=0, description="Env steps trained.")
    updates: int | None = Field(
        None, gt=0, description="Updates made; minibatches of the last batch may pass it."
    )
    mean_return: float | None = Field(None, description="Mean return of the last 100 episodes.")
    wall_s: float | None = Field(
        None, gt=0, le=MOST_S, description="Seconds from the first update."
    )


class CheckpointSection(Section):
    """When checkpoints are written and how many stay."""

    every_s: float = Field(60.0, gt=0, le=MOST_S, description="Seconds between checkpoints.")
    keep: int = Field(3, ge=1, description="Newest checkpoints that stay (the best one stays too).")


class RunConfig(Section):
    """All settings of one run."""

    seed: int = Field(
        0, ge=0, le=2**31 - 1, description="Seeds the model and, with rank and start, actors."
    )
    env: EnvSection
    algorithm: AlgorithmSection = AlgorithmSection()
    model: ModelSection = ModelSection()
    policies: PoliciesSection = PoliciesSection()
    trajectory: TrajectorySection = TrajectorySection()
    actor: ActorSection = ActorSection()
    learner: LearnerSection = LearnerSection()
    bind: BindSection = BindSection()
    pace: PaceSection = PaceSection()
    train: TrainSection = TrainSection()
    stop: StopSection = StopSection()
    checkpoint: CheckpointSection = CheckpointSection()
    report: ReportSection = ReportSection()

    def model_post_init(self, context: Any, /) -> None:
        """Lockstep decides some keys, which are frozen for everybody else."""
        if self.pace.is_lockstep:
            decided = {"queue_size": LOCKSTEP_QUEUE_SIZE}
            if "batch_columns" not in self.learner.model_fields_set:
                decided["batch_columns"] = self._lockstep_columns
            self.__dict__["learner"] = self.learner.model_copy(update=decided)

    def broken_rules(self) -> Iterator[str]:
        learner, num_minibatches = self.learner, self.algorithm.num_minibatches
        yield from self._broken_compile()
        if self.pace.is_lockstep:
            yield from self._broken_lockstep()
        elif self.actor.num_envs > learner.batch_columns:
            yield (
                f"learner.batch_columns ({learner.batch_columns}) must be at least "
                f"actor.num_envs ({self.actor.num_envs}): an actor sends a column per environment"
            )
        if num_minibatches > learner.batch_columns:
            yield (
                f"algorithm.num_minibatches ({num_minibatches}) must not exceed "
                f"learner.batch_columns ({learner.batch_columns}): a minibatch has whole columns"
            )
        replay_lag = learner.minibatch_buffer_size * (learner.num_passes - 1) * num_minibatches
        # In lockstep they are one update.
        if learner.max_lag < replay_lag and not self.pace.is_lockstep:
            yield (
                f"learner.max_lag ({learner.max_lag}) must be at least minibatch_buffer_size * "
                f"(num_passes - 1) * algorithm.num_minibatches = {replay_lag}, or no batch can "
                "have all its passes"
            )

    def _broken_compile(self) -> Iterator[str]:
        """Where compiling or recording would do nothing."""
        way, device, algorithm = self.learner.compile, self.learner.device, self.algorithm
        optimizer, num_minibatches = algorithm.optimizer, algorithm.num_minibatches
        if way != "off" and self.policies.names:
            yield (
                f"learner.compile ({way}) does nothing with policies.names, where a batch is split "
                "by who played it: set it to off"
            )
        elif way == "cuda_graph":
            for is_clash, key, fix in (
                (device.startswith("cpu"), f"learner.device ({device})", "auto or cuda"),
                (
                    optimizer not in ("adam", "adamw"),
                    f"algorithm.optimizer ({optimizer})",
                    "adam or adamw",
                ),
                (num_minibatches > 1, f"algorithm.num_minibatches ({num_minibatches})", "1"),
                (algorithm.normalize_returns, "algorithm.normalize_returns (true)", "false"),
                (algorithm.kl_coeff > 0, f"algorithm.kl_coeff ({algorithm.kl_coeff})", "0"),
            ):
                if is_clash:
                    yield (
                        f"learner.compile (cuda_graph) does nothing with {key}: set that to {fix}, "
                        "or learner.compile to off or inductor"
                    )

    @property
    def _lockstep_columns(self) -> int:
        return self.train.num_actors * self.actor.num_envs

    def _broken_lockstep(self) -> Iterator[str]:
        learner, width = self.learner, self._lockstep_columns
        if width > MAX_COLUMNS:
            yield (
                f"pace.mode lockstep: train.num_actors * actor.num_envs ({width}) is a batch, and "
                f"that has at most {MAX_COLUMNS} columns"
            )
        # How many agents an environment has, of which each is a column, nobody knows yet.
        if learner.batch_columns % width:
            yield (
                f"pace.mode lockstep: learner.batch_columns ({learner.batch_columns}) must be "
                f"train.num_actors * actor.num_envs ({width}), as it is when it is not set, or "
                "that times the agents of an environment"
            )
        for key in ("minibatch_buffer_size", "publish_every_updates"):
            if (value := getattr(learner, key)) != 1:
                yield f"pace.mode lockstep: learner.{key} ({value}) must be 1"
        if learner.init_num_passes not in (None, learner.num_passes):
            yield (
                f"pace.mode lockstep: learner.init_num_passes ({learner.init_num_passes}) does "
                "nothing: every batch has all its passes"
            )

    @property
    def idle_from(self) -> int | None:
        """The env step from which on the run goes on without learning; none if it ends by then."""
        zero_at, end = self.algorithm.lr_is_0_at, self.stop.env_steps
        return None if zero_at is None or (end is not None and end <= zero_at) else zero_at

    def warnings(self, env_steps: int = 0) -> list[str]:
        """Tell what is allowed but will probably disappoint when so many env steps are trained."""
        lag_warnings = self._lockstep_warnings if self.pace.is_lockstep else self._async_warnings
        found = [*lag_warnings(), *self._reuse_warnings()]
        steps, others = self.stop.env_steps, (self.stop.mean_return, self.stop.updates)
        has_goal = any(goal is not None for goal in others)
        found += self.algorithm.schedule_warnings(steps, env_steps, has_goal=has_goal)
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

    def _async_warnings(self) -> Iterator[str]:
        algorithm = self.algorithm
        lag = self.learner.expected_lag_updates * algorithm.num_minibatches
        old = f"with all queues full a trajectory is {lag} updates old when it is trained on, and"
        if algorithm.returns_kind == "gae":
            fix = f"set pace.mode to lockstep{self._or_vtrace}"
            yield f"{old} returns by GAE take it for new: {fix}"
        elif lag > SAFE_LAG_UPDATES:
            yield (
                f"{old} V-trace holds to about {SAFE_LAG_UPDATES}: lower learner.num_passes, "
                "learner.queue_size, learner.minibatch_buffer_size or algorithm.num_minibatches"
            )

    def _lockstep_warnings(self) -> Iterator[str]:
        algorithm, lag = self.algorithm, self.pace.lag
        num_updates = self.learner.num_passes * (lag + 1)
        if algorithm.returns_kind == "gae" and lag:
            yield (
                f"pace.lag ({lag}) makes all data a version old, and returns by GAE take it for "
                f"new: set pace.lag to 0{self._or_vtrace}"
            )
        elif (
            algorithm.returns_kind == "vtrace"
            and not algorithm.has_clip
            and num_updates > SAFE_LAG_UPDATES
        ):
            yield (
                f"from acting to the last pass over what was acted {num_updates} updates are made "
                "(learner.num_passes * (pace.lag + 1)), and V-trace holds to about "
                f"{SAFE_LAG_UPDATES}: lower one of them"
            )

    def _reuse_warnings(self) -> Iterator[str]:
        """Warn of passes that nothing corrects: ppo has its ratio, V-trace has its weights."""
        num_passes = self.learner.num_passes
        if not self.algorithm.has_ratio and num_passes > 1:
            yield (
                f"learner.num_passes ({num_passes}): {self.algorithm.name} has no ratio of "
                "policies to correct its passes after the first, where the policy is no longer the "
                "one that acted: set learner.num_passes to 1, or algorithm.name to ppo"
            )

    @property
    def _or_vtrace(self) -> str:
        return ", or algorithm.returns to vtrace" if self.algorithm.may_use_vtrace else ""


class ActorSettings(Section):
    """An actor is told this when it is welcomed: all that it needs to know of a run."""

    seed: int = Field(ge=0, le=2**31 - 1)
    env: EnvSection
    model: ModelSection
    policies: PoliciesSection
    trajectory: TrajectorySection
    actor: ActorSection
    pace: PaceSection
    max_lag: int = Field(ge=0)

    @staticmethod
    def of(config: RunConfig) -> "ActorSettings":
        return ActorSettings(
            seed=config.seed,
            env=config.env,
            model=config.model,
            policies=config.policies,
            trajectory=config.trajectory,
            actor=config.actor,
            pace=config.pace,
            max_lag=config.learner.max_lag,
        )
