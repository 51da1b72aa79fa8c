"""Samplers, workers and devices: what goes together, and what is refused with the way out."""

import pytest

from impala_async.config.load import validate_config
from impala_async.errors import ConfigError
from tests.config.test_run import nested


def config_of(**actor):
    return validate_config(nested({"env.id": "X", **{f"actor.{k}": v for k, v in actor.items()}}))


@pytest.mark.parametrize("sampler", ["auto", "parallel"])
def test_as_many_workers_as_environments_and_no_more(sampler):
    assert config_of(sampler=sampler, num_envs=4, num_workers=4).actor.num_workers == 4
    with pytest.raises(ConfigError, match=r"num_workers \(6\) must not exceed num_envs \(4\)"):
        config_of(sampler=sampler, num_envs=4, num_workers=6)


@pytest.mark.parametrize("sampler", ["serial", "vector"])
def test_samplers_without_workers_are_given_none(sampler):
    with pytest.raises(ConfigError, match=f"num_workers does nothing with sampler {sampler}"):
        config_of(sampler=sampler, num_workers=2)


@pytest.mark.parametrize("sampler", ["auto", "serial", "vector", "parallel"])
def test_any_sampler_acts_on_a_device(sampler):
    assert config_of(sampler=sampler, device="cuda:1").actor.device == "cuda:1"


def test_a_device_is_no_sampler():
    with pytest.raises(ConfigError) as refused:
        config_of(sampler="central")
    assert str(refused.value) == (
        "config: actor.sampler: wants parallel, with where the policy acts in actor.device, "
        'got "central"'
    )
