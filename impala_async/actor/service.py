"""The actor: connect, build what the learner asks for, and unroll until it is over.

Runs on: sampler thread (the main thread of an actor)
"""

import logging
import signal
import sys
import time
from functools import partial

import numpy as np
import torch

from impala_async import errors
from impala_async.actor.client import POLL_S, Client, NewRun, NewSettings, RunFinished
from impala_async.actor.sampler import Sampler, sampler_for
from impala_async.actor.setup import FIRST_COLUMNS, Setup, Trials, close_quietly, make_setup
from impala_async.actor.stopping import Stopper
from impala_async.config.run import ActorSettings
from impala_async.envs.faults import CLOSE_S, Watch, with_id
from impala_async.metrics.names import ACTOR_TIMERS, AGENTS_PER_STEP
from impala_async.models.torso import pick_precision
from impala_async.output import told_of
from impala_async.policy import AnyPolicy, build_policy, check_defaults
from impala_async.processes import answer_requests
from impala_async.schema import Schema, recurrent_state
from impala_async.user_code import one_line
from impala_async.weights import Weights
from impala_async.wire.sockets import new_context

logger = logging.getLogger(__name__)

# We listen this often within a trajectory, whichever comes first, for weights and a goodbye.
PUMP_EVERY_STEPS = 16
PUMP_EVERY_S = 0.05
TIMERS_EVERY_S = 0.5


class ActorService:
    def __init__(
        self,
        learner: str,
        *,
        num_envs: int | None,
        connect_s: float,
        start: tuple[int, int, int],
    ) -> None:
        """`learner`: its address or its run folder. `start`: the number of this actor, how often
        it was started before, and its number among those of this host."""
        self._num_envs = num_envs
        self._signal = 0
        self._is_sampling = False
        self._context = new_context()
        self._client = Client(
            self._context, learner, should_stop=lambda: self._signal != 0, connect_s=connect_s
        )
        self._client.side.number, self._life, self._local = start
        self._watch = Watch(logger.warning, whose=self._whose)
        self._stopper = Stopper(logger.warning, self._whose)

    @property
    def is_finished(self) -> bool:
        """Whether the learner has said that the run is over."""
        return self._client.is_finished

    @property
    def is_told_to_end(self) -> bool:
        """Whether a signal has come."""
        return self._signal != 0

    @property
    def exit_code(self) -> int:
        """That of an end at which nothing has failed."""
        return errors.Exit.INTERRUPTED if self._signal == signal.SIGINT else errors.Exit.DONE

    def run(self) -> int:
        """Serve until the learner is finished, or a signal comes; returns the exit code. NewRun:
        a new process is to look at this address, which imports code as it is now."""
        answer_requests(self._on_signal)
        self._watch.start()
        self._stopper.start()
        try:
            self._client.connect()
            while True:
                try:
                    self._work(self._client.settings)
                except NewSettings:
                    logger.info("this run has other settings now: starting anew")
        except RunFinished:
            pass
        finally:
            self._watch.close()
            error = sys.exception()
            is_fault = isinstance(error, Exception) and not isinstance(error, NewRun)
            self._client.leave(one_line(error) if error and is_fault else "")
            self._context.term()
            self._stopper.close()
        return self.exit_code

    def _work(self, settings: ActorSettings) -> None:
        torch.set_num_threads(settings.actor.threads)
        self._watch.limit(settings.env.step_timeout_s)
        setup, schema = self._make_setup(settings)
        try:
            sampler = self._join(settings, setup, schema)
            self._is_sampling = True
            self._sample(sampler, settings.trajectory.rows)
        except (errors.EnvError, errors.EnvHangsError) as error:
            if self._signal:  # processes of the environment may have been told to end as well
                raise RunFinished from None
            # It may be the user's own: where it failed is what they need.
            if error.__cause__ is not None:
                logger.error("the environment failed", exc_info=error.__cause__)
            with_id(error, settings.env.id)
            self._watch.limit(CLOSE_S, f"after this: {error}")
            raise
        finally:
            self._is_sampling = False
            close_quietly(setup.envs)

    def _join(self, settings: ActorSettings, setup: Setup, schema: Schema) -> Sampler:
        client, envs = self._client, setup.envs
        wanted = self._num_envs or settings.actor.num_envs
        policy = self._build_policy(schema, settings, setup.device)
        layouts = policy.layout, policy.coarse_layout
        width = setup.columns_per_message
        client.join(schema, layouts, width, envs.num_envs // width)
        held: list[Weights] = []
        if settings.pace.is_lockstep:
            # There numbers are given out again, and the first weights tell one's beginning.
            first = client.newest()
            assert first is not None, "in lockstep the first weights are waited for"
            held, begun = [first], (*first.version, 0)
        else:
            while not client.side.is_joined:
                client.pump(POLL_S)
            begun = client.side.welcome.epoch, 0, self._life
        # It may have come back with another number while it waited.
        number = client.side.welcome.number
        seed = seed_of(settings.seed, number, *begun)
        (acting, *_) = policy.members.values()
        precision = str(acting.model.precision).removeprefix("torch.")
        logger.info(
            "actor %d: %d environments of %s, acting in %s",
            *(number, envs.num_envs, settings.env.id, precision),
        )
        return sampler_for(envs)(
            schema,
            envs,
            policy,
            policy.new_generator().manual_seed(seed),
            take_buffer=client.take_buffer,
            newest=lambda: held.pop() if held else client.newest(),
            seed=seed,
            num_agents=1 if wanted == "auto" else envs.num_envs // wanted,
            is_to_cut=None if settings.pace.cut_share is None else client.is_to_cut,
        )

    def _make_setup(self, settings: ActorSettings) -> tuple[Setup, Schema]:
        actor, env, policies = settings.actor, settings.env, settings.policies
        wanted, most = self._num_envs or actor.num_envs, self._client.side.welcome.max_columns
        num_envs = min(FIRST_COLUMNS, most) if wanted == "auto" else wanted
        try:
            setup = make_setup(actor, env, num_envs, policies, self._look_up, self._local)
        except errors.EnvError as error:
            if error.is_death:
                raise
            # The learner could make it, or was told not to try: it is this host that lacks it.
            raise errors.MismatchError(errors.plain(str(with_id(error, env.id)))) from error
        if wanted == "auto" and (columns := setup.envs.num_envs) != num_envs:
            close_quietly(setup.envs)
            raise errors.MismatchError(
                f"actor.num_envs (auto) does not go for {columns // num_envs} agents: the learner "
                "wants a whole number there, or --num-envs here"
            )
        obs, action, model = setup.envs.obs_spec, setup.envs.action_spec, settings.model
        state = recurrent_state(model.core, model.core_size)
        schema = Schema(obs, action, settings.trajectory.rows, state, policies.names)
        if actor.sampler == "auto" and settings.pace.is_lockstep:
            logger.info("actor.sampler auto takes %s: lockstep measures nothing", setup)
        elif "auto" in (actor.sampler, wanted):
            make_policy = partial(self._build_policy, schema, settings)
            most *= wanted == "auto"
            of = setup, settings, schema, make_policy, self._look_up, most, self._local
            setup = Trials(*of).choose(num_envs)
        return setup, schema

    def _build_policy(self, schema: Schema, settings: ActorSettings, device: str) -> AnyPolicy:
        model = settings.model
        check_defaults(settings.env.id)
        try:
            with told_of("the network is being built", logger.warning), self._stopper.building():
                policy = build_policy(
                    schema, model, settings.policies, seed=settings.seed, device=device
                )
            precision = pick_precision(model.precision, policy.torso_name, torch.device(device))
            policy.act_in(precision)
        except errors.ConfigError as error:
            # An own torso is not installed here, or a network fits neither the spaces nor memory.
            raise errors.MismatchError(errors.plain(str(error))) from error
        return policy

    def _look_up(self) -> None:
        """Called while env workers are waited for, however long they take."""
        if self._signal:
            raise RunFinished
        if self._is_sampling:
            self._client.pump(0)

    def _sample(self, sampler: Sampler, rows: int) -> None:
        num_steps = 0
        now = time.monotonic()
        report_at, pump_at = now + TIMERS_EVERY_S, now + PUMP_EVERY_S
        while True:
            for finished in sampler.step():
                self._client.send(finished)
                now = time.monotonic()
                if now >= report_at:
                    self._client.timers.update(self._times(sampler, rows))
                    report_at = now + TIMERS_EVERY_S
            num_steps += 1
            if self._signal:
                raise RunFinished
            now = time.monotonic()
            if num_steps % PUMP_EVERY_STEPS == 0 or now >= pump_at:
                self._client.pump(0)
                pump_at = now + PUMP_EVERY_S

    def _times(self, sampler: Sampler, rows: int) -> dict[str, float]:
        """Where the time went since the last call, in milliseconds per trajectory; and how many
        agents acted at once."""
        *spent_s, num_steps = sampler.take_times()
        spent_s += self._client.take_waits()
        per_trajectory = 1000 * rows / max(1, num_steps)
        times = {
            name: seconds * per_trajectory
            for name, seconds in zip(ACTOR_TIMERS, spent_s, strict=True)
        }
        return times | {AGENTS_PER_STEP: sampler.take_agents()}

    def _whose(self) -> str:
        return f"actor {self._client.side.welcome.number} ({self._client.settings.env.id})"

    def _on_signal(self, number: int, frame: object) -> None:
        self._signal = self._signal or number  # of a second one the stopper hears


def seed_of(run_seed: int, number: int, epoch: int = 1, begins_at: int = 0, life: int = 0) -> int:
    """A seed for each actor of a run, so that no two step the same environments: nor one that has
    a number in lockstep after another, whose first weights are those of update `begins_at`, nor
    one that is started again, as `life` counts."""
    # Zeros at the end change nothing, up to four words.
    words = (run_seed, number, epoch - 1, begins_at, *([life] if life else []))
    return int(np.random.SeedSequence(words).generate_state(1)[0] >> 1)
