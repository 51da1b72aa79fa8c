"""Picks the sampler that fits a batch of environments.

Runs on: sampler thread
"""

from typing import Any

from gymnasium.vector import AutoresetMode

from impala_async.actor.samplers.direct import DirectSampler, NextStepSampler, SameStepSampler
from impala_async.actor.samplers.protocols import ActingPolicy, BufferSource, Newest, Sampler
from impala_async.envs.vector import EnvBatch
from impala_async.errors import MismatchError
from impala_async.spec import Schema


def build_sampler(
    schema: Schema,
    envs: EnvBatch,
    policy: ActingPolicy,
    rng: Any,
    *,
    buffers: BufferSource,
    newest: Newest,
    seed: int,
) -> Sampler:
    """A sampler over these environments, which it resets now and closes in its own `close`.

    `envs.make.build_envs` makes the batch that `actor.sampler` asks for. MismatchError when it is
    not what the schema says: the learner described another version of the environment, or the
    same one as another sampler sees it.
    """
    here = Schema(envs.obs_spec, envs.action_spec, schema.rows, schema.state, schema.policies)
    if here != schema:
        raise MismatchError(
            "the environment of this actor is not the one that the learner knows: "
            f"{here.difference(schema)}"
        )
    kind: type[DirectSampler] = NextStepSampler
    if envs.autoreset is AutoresetMode.SAME_STEP:
        kind = SameStepSampler
    return kind(schema, envs, policy, rng, buffers=buffers, newest=newest, seed=seed)


def columns_per_message(envs: EnvBatch) -> int:
    """How many columns each message of a sampler over these environments carries."""
    return 1 if envs.autoreset is AutoresetMode.SAME_STEP else envs.num_envs
