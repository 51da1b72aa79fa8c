"""Every setting of the system: one frozen section per owner, gathered in `RunConfig`.

The text below each key is what the configuration page shows.
"""

from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Any, Literal

from pydantic import Field

from impala_async.config.actor import MAX_COLUMNS, ActorSection
from impala_async.config.algorithm import ALGORITHM_KEYS, ALGORITHMS, AlgorithmSection
from impala_async.config.env import EnvSection
from impala_async.config.evaluate import EvaluateSection
from impala_async.config.learner import BindSection, LearnerSection
from impala_async.config.model import ModelSection
from impala_async.config.policies import PoliciesSection
from impala_async.config.section import MOST_S, Named, Section, unknown_name

MANY = 1_000_000
DECIDED = (
    *("learner.batch_columns", "learner.num_passes", "learner.queue_size"),
    "algorithm.num_minibatches",
)
"""The keys that follow from others where nobody sets them."""
ADDRESSES = ("bind.data", "bind.weights")
SINKS = {
    "tensorboard": "impala_async.metrics.sinks:TensorBoardSink",
    "wandb": "impala_async.metrics.sinks:WandbSink",
}
"""The sinks that a run may have besides `metrics.jsonl` and the terminal, each with its class."""
ONLY_WHERE = {
    ("actor.sampler", "parallel", "auto"): "actor.num_workers",
    ("actor.sampler", "serial", "parallel", "auto"): "env.num_spares",
    **ALGORITHM_KEYS,
    ("pace.mode", "async"): "learner.init_num_passes learner.minibatch_buffer_size "
    "learner.publish_every_updates",
    ("pace.mode", "lockstep"): "pace.lag pace.on_loss pace.cut_share",
    ("model.name", "impala_resnet"): "model.width",
    ("model.core", "lstm", "gru"): "model.core_size",
    ("policies.names",): "policies.mapping policies.train policies.copies",
    ("policies.copies",): "policies.copy_every_updates",
    ("evaluate.every_s",): "evaluate.episodes evaluate.actions stop.eval_return",
}
"""A key and its values, or the key alone where it is set: the keys that else do nothing."""


class TrajectorySection(Section):
    """The unit that actors send."""

    rows: int = Field(16, ge=1, le=65535)
    """T: env steps per trajectory."""


class PaceSection(Section):
    """Whether actors and learner wait for each other."""

    mode: Literal["async", "lockstep"] = "async"
    """async: nobody waits. lockstep: one update per trajectory of every actor, all with the same
    weights, in an order that is always the same."""
    lag: int = Field(0, ge=0, le=1)
    """lockstep: actors are so many versions behind: 1 overlaps both."""
    on_loss: Literal["go_on", "stop"] = "go_on"
    """lockstep: what happens when the session of an actor ends."""
    cut_share: float | None = Field(None, gt=0, lt=1)
    """lockstep, several ranks: where this share of them has its batch, the others cut the
    trajectories that they lack, so none holds all up. Two runs are not equal then."""

    @property
    def is_lockstep(self) -> bool:
        return self.mode == "lockstep"


class TrainSection(Section):
    """The `train` door: one learner and its actors on this machine."""

    num_actors: int = Field(2, ge=1, le=1024)
    """Actor processes to start."""


class StopSection(Section):
    """When a run is over: whichever comes first. Without any of them it runs until stopped."""

    env_steps: int | None = Field(None, gt=0)
    """Env steps trained."""
    updates: int | None = Field(None, gt=0)
    """Updates made; minibatches of the last batch may pass it."""
    mean_return: float | None = None
    """Mean return of the last 100 episodes."""
    eval_return: float | None = None
    """Mean return of an evaluation (`evaluate.every_s`)."""
    wall_s: float | None = Field(None, gt=0, le=MOST_S)
    """Seconds from the first update."""


class CheckpointSection(Section):
    """When checkpoints are written and how many stay."""

    every_s: float = Field(60.0, gt=0, le=MOST_S)
    """Seconds between checkpoints."""
    keep: int = Field(3, ge=1)
    """Newest checkpoints that stay (the best one stays too, and the newest that all ranks have)."""


class ReportSection(Section):
    """Where reports go, besides `metrics.jsonl` and the terminal."""

    sinks: tuple[Named, ...] = ()
    """tensorboard, wandb, or your own as package.module:Name; or a table of name and kwargs."""

    def broken_rules(self) -> Iterator[str]:
        for sink in self.sinks:
            yield from unknown_name("sinks", sink.name, SINKS)


class RunConfig(Section):
    """All settings of one run."""

    seed: int = Field(0, ge=0, le=2**31 - 1)
    """Seeds the model and, with an actor's number and the start, actors."""
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
    evaluate: EvaluateSection = EvaluateSection()
    report: ReportSection = ReportSection()

    def model_post_init(self, context: Any, /) -> None:
        """Decide what follows from other keys; all are frozen from here on."""
        if self.pace.is_lockstep:
            # The lag is known, and one batch waits while one is trained.
            self.__dict__["learner"] = self.learner.model_copy(update={"queue_size": 1})
            self.learner.model_fields_set.discard("queue_size")
            self._decide("learner", batch_columns=self.train.num_actors * self.actor.least_envs)
        learner, usual = self.learner, self.algorithm.usual_passes
        is_given = "num_passes" in learner.model_fields_set and learner.num_passes != "auto"
        # Where they would make trajectories too old, there are fewer.
        newest = learner.max_lag - learner.publish_every_updates + 1
        most = MANY if self.pace.is_lockstep else max(1, newest // self.most_batches_old)
        parts = self.algorithm.num_minibatches
        if "num_minibatches" not in self.algorithm.model_fields_set:
            bound = most // (learner.most_passes if is_given else usual)
            rows = learner.batch_columns * self.trajectory.rows
            parts = max(1, min(self._most_parts, rows // self.algorithm.usual_part_rows, bound))
        self._decide("algorithm", num_minibatches=parts)
        self._decide("learner", num_passes=max(1, min(usual, most // parts)))

    @property
    def _most_parts(self) -> int:
        """The rows or columns that there are to deal."""
        return self.learner.batch_columns * (
            self.trajectory.rows if self.algorithm.shuffle_rows else 1
        )

    @property
    def batches_under_way(self) -> int:
        """Those between acting and training when every queue is full (one of them granted)."""
        learner = self.learner
        # A GPU may be found, and has two slots on the host at least.
        waiting = max(learner.queue_size, 1 if learner.device == "cpu" else 2)
        return waiting + learner.minibatch_buffer_size + 1

    @property
    def most_batches_old(self) -> int:
        """How many a trajectory may be by its last pass: one more can wait at its actor, and its
        own batch counts."""
        return self.batches_under_way + 2

    @property
    def updates_of_a_batch(self) -> int:
        return self.learner.least_passes * self.algorithm.num_minibatches

    def _decide(self, section: str, **values: int) -> None:
        """Set keys of a section that nobody has set; they stay among those."""
        owner = getattr(self, section)
        unset = {key: value for key, value in values.items() if key not in owner.model_fields_set}
        self.__dict__[section] = owner = owner.model_copy(update=unset)
        owner.model_fields_set.difference_update(unset)

    @property
    def decided(self) -> dict[str, Any]:
        """Those of `DECIDED`, and of the addresses, that nobody has set, and their values."""
        found = {}
        for key in (*DECIDED, *ADDRESSES):
            section, _, name = key.partition(".")
            owner = getattr(self, section)
            if name not in owner.model_fields_set:
                found[key] = getattr(owner, name)
        return found

    def take_for_decided(self, keys: Iterable[str]) -> None:
        """They have been decided, though they were given with the others: nobody has set them."""
        for key in keys:
            section, _, name = key.partition(".")
            getattr(self, section).model_fields_set.discard(name)

    def broken_rules(self) -> Iterator[str]:
        yield from (told for _, told in self.idle_keys())
        yield from self.broken_columns()
        if self.algorithm.wants_horizon and self.schedule_env_steps is None:
            yield (
                "algorithm.lr_end and algorithm.entropy_cost_end want an end: set "
                "algorithm.schedule_env_steps, or stop.env_steps, which it is otherwise"
            )
        learner, num_minibatches = self.learner, self.algorithm.num_minibatches
        if num_minibatches > self._most_parts:
            has_rows = self.algorithm.shuffle_rows
            times = f" * trajectory.rows ({self.trajectory.rows})" if has_rows else ""
            yield (
                f"algorithm.num_minibatches ({num_minibatches}) must not exceed "
                f"learner.batch_columns ({learner.batch_columns}){times}: a minibatch has "
                f"{'at least one row' if has_rows else 'whole columns'}"
            )
        is_one_row = self.algorithm.shuffle_rows or self.trajectory.rows == 1
        is_normal = self.algorithm.name in ALGORITHMS and self.algorithm.has_normal_advantages
        if is_normal and is_one_row and self._most_parts // num_minibatches == 1:
            fewer = "lower algorithm.num_minibatches, " if num_minibatches > 1 else ""
            which = "each" if num_minibatches == self._most_parts else "one or more"
            yield (
                f"{which} of algorithm.num_minibatches ({num_minibatches}) has one row, over which "
                f"an advantage is normalised to 0, so that no policy is learned: {fewer}raise "
                "trajectory.rows or learner.batch_columns, or set algorithm.normalize_advantages "
                "to false"
            )
        if self.algorithm.shuffle_rows and self.model.core is not None:
            yield (
                f"algorithm.shuffle_rows does not go with model.core ({self.model.core}), which "
                "wants trajectories row by row: drop one of them"
            )
        first = learner.init_num_passes
        if first is not None and first > learner.most_passes:
            yield (
                f"learner.init_num_passes ({first}) must not exceed learner.num_passes "
                f"({learner.num_passes})"
            )
        yield from self._broken_passes()
        replay_lag = learner.minibatch_buffer_size * (learner.least_passes - 1) * num_minibatches
        # In lockstep they are one update.
        if learner.max_lag < replay_lag and not self.pace.is_lockstep:
            yield (
                f"learner.max_lag ({learner.max_lag}) must be at least minibatch_buffer_size * "
                f"(num_passes - 1) * algorithm.num_minibatches = {replay_lag}, or no batch can "
                "have all its passes"
            )

    def _broken_passes(self) -> Iterator[str]:
        if self.learner.num_passes != "auto":
            return
        if self.pace.is_lockstep:
            yield (
                "learner.num_passes (auto) does not go in lockstep, where actors wait for the last "
                "pass: wants a whole number"
            )
        if not self.algorithm.has_clip:
            yield (
                f"learner.num_passes (auto) does not go with algorithm.name ({self.algorithm.name})"
                ", which has no clip to bound what many passes do: set a whole number, or "
                "algorithm.name to ppo or appo"
            )

    def idle_keys(self) -> Iterator[tuple[str, str]]:
        """The keys that do nothing beside others, each with a line that tells so."""
        for (choice, *names), keys in ONLY_WHERE.items():
            chosen, choice = attrgetter(choice)(self), choice.removesuffix("_kind")
            # An algorithm of a user's own may do something with every key.
            is_own = choice == "algorithm.name" and chosen not in ALGORITHMS
            if is_own or (chosen in names if names else chosen):
                continue
            where = f"where {choice} is {chosen or 'none'}" if names else f"without {choice}"
            fix = f"{choice} = {' or '.join(names)}" if names else choice
            for key in keys.split():
                section, _, name = key.rpartition(".")
                owner = attrgetter(section)(self)
                value, field = getattr(owner, name), type(owner).model_fields[name]
                if value != field.get_default(call_default_factory=True):
                    yield key, f"{key} ({value}) does nothing {where}: drop it, or set {fix}"

    def broken_columns(self, agents: int | None = None) -> Iterator[str]:
        """Tell if what actors send fits no batch. `agents`: an environment's columns, if known."""
        columns, width = self.learner.batch_columns, self.actor.least_envs * (agents or 1)
        if self.actor.num_envs == "auto" and (self.pace.is_lockstep or (agents or 1) > 1):
            where = "in lockstep" if self.pace.is_lockstep else f"for {agents} agents"
            yield f"actor.num_envs (auto) does not go {where}: wants a whole number"
            return
        of_agents = f" * {agents} agents" if (agents or 1) > 1 else ""
        if not self.pace.is_lockstep:
            if width > columns:
                yield (
                    f"learner.batch_columns ({columns}) must be at least actor.num_envs{of_agents} "
                    f"({width}): an actor sends a column per environment and agent, all together"
                )
            return
        width *= self.train.num_actors
        if columns > MAX_COLUMNS or (columns != width if agents else columns % width):
            # Until they are known there may be several.
            or_more = ": set it"
            if not agents:
                or_more = (
                    ", as it is when it is not set, or that times the agents of an environment"
                )
            yield (
                f"pace.mode lockstep: learner.batch_columns ({columns}) must be train.num_actors * "
                f"actor.num_envs{of_agents} ({width}), and at most {MAX_COLUMNS}{or_more}"
            )

    @property
    def schedule_env_steps(self) -> int | None:
        """Where schedules of rates end, if there are any: with the run, if nothing else says."""
        if not self.algorithm.has_schedule:
            return None
        return self.algorithm.schedule_env_steps or self.stop.env_steps

    @property
    def idle_from(self) -> int | None:
        """The env step from which on the run goes on without learning; none if it ends by then."""
        zero_at, end = self.schedule_env_steps, self.stop.env_steps
        if self.algorithm.lr_end != 0 or zero_at is None:
            return None
        return zero_at if end is None or end > zero_at else None


class ActorSettings(Section):
    """An actor is told this when it is welcomed: all that it needs to know of a run."""

    seed: int = Field(ge=0, le=2**31 - 1)
    env: EnvSection
    model: ModelSection
    policies: PoliciesSection
    trajectory: TrajectorySection
    actor: ActorSection
    pace: PaceSection
    max_lag: int = Field(ge=1)

    @staticmethod
    def of(config: RunConfig, seed: int | None = None) -> "ActorSettings":
        shared = ActorSettings.model_fields.keys() & RunConfig.model_fields.keys()
        settings = {key: getattr(config, key) for key in shared}
        settings |= {} if seed is None else {"seed": seed}
        return ActorSettings(max_lag=config.learner.max_lag, **settings)
