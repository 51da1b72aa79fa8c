"""Picks the sampler that fits a batch of environments, or two groups of them.

Runs on: sampler thread
"""

from collections.abc import Sequence
from typing import Any

from gymnasium.vector import AutoresetMode

from impala_async.actor.samplers.alternating import AlternatingSampler, Group, SplitBatch
from impala_async.actor.samplers.direct import DirectSampler, NextStepSampler, SameStepSampler
from impala_async.actor.samplers.protocols import ActingPolicy, BufferSource, Newest, Sampler
from impala_async.envs.batch import EnvBatch
from impala_async.errors import MismatchError
from impala_async.spec import Schema
from impala_async.weights import Weights


def build_sampler(
    schema: Schema,
    envs: EnvBatch,
    policy: ActingPolicy,
    rng: Any,
    *,
    buffers: BufferSource,
    newest: Newest,
    seed: int,
) -> DirectSampler:
    """A sampler over these environments, which it resets now and closes in its own `close`.

    MismatchError when they are not what the schema says: the learner described another version of
    the environment, or the same one as another sampler sees it.
    """
    here = Schema(envs.obs_spec, envs.action_spec, schema.rows, schema.state, schema.policies)
    if here != schema:
        raise MismatchError(
            "the environment of this actor is not the one that the learner knows: "
            f"{here.difference(schema, 'here', 'at the learner')}"
        )
    kind: type[DirectSampler] = NextStepSampler
    if envs.autoreset is AutoresetMode.SAME_STEP:
        kind = SameStepSampler
    return kind(schema, envs, policy, rng, buffers=buffers, newest=newest, seed=seed)


def build_alternating(
    schema: Schema,
    groups: Sequence[SplitBatch],
    policy: ActingPolicy,
    rng: Any,
    *,
    buffers: BufferSource,
    newest: Newest,
    seed: int,
) -> Sampler:
    """As `build_sampler`, over two groups of equal width."""
    # The second one plays with what the first one got.
    asks = [newest, _no_news]
    return AlternatingSampler(
        [
            Group(
                build_sampler(schema, envs, policy, rng, buffers=buffers, newest=ask, seed=seed),
                envs,
            )
            for envs, ask in zip(groups, asks, strict=True)
        ]
    )


def _no_news() -> Weights | None:
    return None


def columns_per_message(envs: EnvBatch) -> int:
    """How many columns each message of a sampler over these environments carries."""
    return 1 if envs.autoreset is AutoresetMode.SAME_STEP else envs.num_envs
