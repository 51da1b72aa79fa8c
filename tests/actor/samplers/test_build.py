from dataclasses import replace

import pytest

from bench.probes import CountingVector
from impala_async.actor.samplers.build import build_sampler, columns_per_message
from impala_async.actor.samplers.direct import NextStepSampler, SameStepSampler
from impala_async.actor.samplers.protocols import Sampler
from impala_async.config.run import EnvSection
from impala_async.envs.batch import EnvBatch
from impala_async.envs.make import build_envs
from impala_async.envs.vector import VectorEnvs
from impala_async.errors import EXIT_MISMATCH, MismatchError
from impala_async.spec import Schema
from tests.actor.fakes import FakeBuffers, FakePolicy, NoNews


def schema_for(envs: EnvBatch, rows: int = 4) -> Schema:
    return Schema(envs.obs_spec, envs.action_spec, rows)


def build(envs: EnvBatch, schema: Schema) -> Sampler:
    buffers = FakeBuffers(schema)
    return build_sampler(schema, envs, FakePolicy(), None, buffers=buffers, newest=NoNews(), seed=0)


@pytest.mark.parametrize("sampler", ["serial", "vector", "auto"])
def test_next_step_batches_get_one_message_of_all_columns(sampler: str) -> None:
    envs = build_envs(sampler, EnvSection(id="CartPole-v1"), 3)  # type: ignore[arg-type]
    made = build(envs, schema_for(envs))
    assert isinstance(made, NextStepSampler)
    assert columns_per_message(envs) == 3
    (message,) = [message for _ in range(4) for message in made.step()]
    assert message.buffer.num_columns == 3
    made.close()


def test_same_step_batches_get_a_message_per_column() -> None:
    envs = VectorEnvs(CountingVector(3, autoreset="SameStep"))
    made = build(envs, schema_for(envs))
    assert isinstance(made, SameStepSampler)
    assert columns_per_message(envs) == 1
    messages = [message for _ in range(4) for message in made.step()]
    assert {message.buffer.num_columns for message in messages} == {1}


def test_an_environment_that_the_learner_does_not_know_is_a_mismatch() -> None:
    envs = build_envs("serial", EnvSection(id="CartPole-v1"), 2)
    other = build_envs("serial", EnvSection(id="Acrobot-v1"), 2)
    with pytest.raises(
        MismatchError, match=r"choices: \(2,\) here, \(3,\) at the learner"
    ) as caught:
        build(envs, schema_for(other))
    assert caught.value.exit_code == EXIT_MISMATCH
    wide = replace(schema_for(envs), obs=other.obs_spec)
    with pytest.raises(MismatchError, match=r"shape: \(4,\) here, \(6,\) at the learner"):
        build(envs, wide)
    envs.close()
    other.close()
