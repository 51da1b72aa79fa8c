"""The settings that are allowed but will probably disappoint, each told with what would mend it."""

from collections.abc import Iterator

from impala_async.config.run import RunConfig

# V-trace holds its own against data about this many passes over a batch old, and not much beyond;
# the clip of PPO and APPO against as many batches.
SAFE_LAG = 8


def warnings_of(config: RunConfig, env_steps: int = 0, num_ranks: int = 1) -> list[str]:
    """Those of a run of so many learners that has trained so many env steps."""
    found = *_lag_warnings(config), *_idle_warnings(config), *_schedule_warnings(config, env_steps)
    if config.pace.cut_share is not None and num_ranks == 1:
        found += ("pace.cut_share does nothing with one learner: start several, or drop it",)
    return [*found, *config.bind.warnings()]


def _lag_warnings(config: RunConfig) -> Iterator[str]:
    learner, algorithm, pace = config.learner, config.algorithm, config.pace
    # A batch's minibatches are near to each other, and a clip bounds what passes can do.
    lag, what, fix = learner.most_passes, "passes over a batch", "learner.num_passes, "
    if algorithm.has_clip:
        lag, what, fix = 1, "batches", ""
    if pace.is_lockstep:
        lag, fix = lag * (pace.lag + 1), f"{fix}or pace.lag"
    else:
        # The weights that act may be so many batches older.
        late = learner.publish_every_updates - 1
        lag *= config.batches_under_way + late // config.updates_of_a_batch
        fix += "learner.queue_size or learner.minibatch_buffer_size"
        fix = f"learner.publish_every_updates, {fix}" if late else fix
    old = f"a trajectory may be {lag} {what} old when it is trained on, and"
    # PPO's clip bounds how far it goes from the policy that acted.
    takes_for_new = algorithm.returns_kind == "gae" and algorithm.name != "ppo"
    if takes_for_new and not (pace.is_lockstep and not pace.lag):
        vtrace = ", or algorithm.returns to vtrace" if algorithm.may_use_vtrace else ""
        yield (
            f"{old} returns by GAE take it for new: set pace.mode to lockstep and pace.lag to 0"
            f"{vtrace}"
        )
    elif lag > SAFE_LAG:
        what = "a clip" if algorithm.has_clip else "V-trace"
        yield f"{old} {what} copes with about {SAFE_LAG}: lower {fix}"
    updates = config.most_batches_old * config.updates_of_a_batch
    updates += learner.publish_every_updates - 1
    if updates > learner.max_lag and not pace.is_lockstep:
        yield (
            f"a trajectory may be {updates} updates old when it is trained on, and is dropped "
            f"over learner.max_lag ({learner.max_lag}): raise that, or lower {fix}, or "
            "algorithm.num_minibatches"
        )
    if learner.least_passes > 1 and not algorithm.may_use_vtrace:
        yield (
            f"learner.num_passes ({learner.num_passes}): {algorithm.name} has no ratio of "
            "policies to correct its passes after the first, where the policy is no longer the "
            "one that acted: set learner.num_passes to 1, or algorithm.name to ppo"
        )


def _idle_warnings(config: RunConfig) -> Iterator[str]:
    """Keys that do nothing in a run of this shape."""
    learner, algorithm, actor = config.learner, config.algorithm, config.actor
    if config.pace.is_lockstep and actor.sampler == "auto" and actor.num_workers is not None:
        yield (
            "actor.num_workers does nothing in lockstep with actor.sampler auto, which takes "
            "no env workers there: set actor.sampler to parallel"
        )
    if learner.stop_kl is not None and learner.most_passes == 1:
        yield (
            "learner.stop_kl is looked at between the passes over a batch, and here is one: "
            "raise learner.num_passes, or drop learner.stop_kl"
        )
    has_no_kl = algorithm.name == "appo" and algorithm.has_current_target
    if learner.stop_kl is not None and has_no_kl:
        yield (
            "learner.stop_kl does nothing while algorithm.target_update_every_updates is 1 and "
            "algorithm.tau is 1: it is the KL from the target network, which is always the current "
            "one: raise the former or lower algorithm.tau"
        )
    if learner.minibatch_buffer_size > 1 and learner.most_passes == 1:
        yield (
            f"learner.minibatch_buffer_size ({learner.minibatch_buffer_size}) mixes the passes of "
            "several batches, and here each has one: raise learner.num_passes, or drop "
            "learner.minibatch_buffer_size"
        )
    is_current = algorithm.tau == 1 and algorithm.target_update_every_updates is None
    if (
        algorithm.kl_coeff > 0
        and is_current
        and learner.most_passes * algorithm.num_minibatches == 1
    ):
        yield (
            f"algorithm.kl_coeff ({algorithm.kl_coeff}) does nothing where a batch is one "
            "update, as the target network is always the current one: raise learner.num_passes "
            "or algorithm.num_minibatches, or lower algorithm.tau"
        )
    if algorithm.shuffle_rows and algorithm.num_minibatches == 1:
        yield (
            "algorithm.shuffle_rows deals rows to several minibatches, and here is one: raise "
            "algorithm.num_minibatches or learner.batch_columns, or drop algorithm.shuffle_rows"
        )


def _schedule_warnings(config: RunConfig, env_steps: int) -> Iterator[str]:
    stop, zero_at, horizon = config.stop, config.idle_from, config.schedule_env_steps
    lr, lr_end = config.algorithm.lr, config.algorithm.lr_end
    if horizon is not None and lr_end is not None and lr_end > lr:
        yield (
            f"algorithm.lr rises from {lr:g} to algorithm.lr_end ({lr_end:g}): set that to "
            "none for a flat one, or below"
        )
    # A goal may be reached before.
    has_goal = any(each is not None for each in (stop.mean_return, stop.eval_return, stop.updates))
    if horizon is not None and env_steps >= horizon:
        idle = "" if zero_at is None else "; algorithm.lr is 0, so nothing is learned"
        yield (
            f"algorithm.schedule_env_steps ({horizon:,}) is over at env step {env_steps:,}: "
            f"raise it to go on from there{idle}"
        )
    elif zero_at is not None and (stop.env_steps is not None or not has_goal):
        end = "" if stop.env_steps is None else f" to stop.env_steps ({stop.env_steps:,})"
        yield (
            f"algorithm.lr is 0 from env step {zero_at:,} on (algorithm.schedule_env_steps), "
            f"and the run goes on{end} without learning: raise that, or set algorithm.lr_end "
            "over 0"
        )
