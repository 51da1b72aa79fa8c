"""Samplers, workers and devices: what goes together, and what is refused with the way out."""

import pytest

from impala_async.config.load import validate_config
from impala_async.errors import ConfigError
from tests.config.test_run import nested


def config_of(**actor):
    return validate_config(nested({"env.id": "X", **{f"actor.{k}": v for k, v in actor.items()}}))


@pytest.mark.parametrize("sampler", ["auto", "parallel", "alternating"])
def test_as_many_workers_as_environments_and_no_more(sampler):
    assert config_of(sampler=sampler, num_envs=4, num_workers=4).actor.num_workers == 4
    with pytest.raises(ConfigError, match=r"num_workers \(6\) must not exceed num_envs \(4\)"):
        config_of(sampler=sampler, num_envs=4, num_workers=6)


@pytest.mark.parametrize("sampler", ["serial", "vector"])
def test_samplers_without_workers_are_given_none(sampler):
    with pytest.raises(ConfigError, match=f"num_workers does nothing with sampler {sampler}"):
        config_of(sampler=sampler, num_workers=2)


def test_groups_that_alternate_are_of_one_size():
    with pytest.raises(ConfigError, match=r"num_envs \(7\) must be even"):
        config_of(sampler="alternating", num_envs=7)
    with pytest.raises(ConfigError, match=r"num_workers \(3\) must be even"):
        config_of(sampler="alternating", num_envs=8, num_workers=3)
    assert config_of(sampler="parallel", num_envs=7, num_workers=3).actor.num_envs == 7


@pytest.mark.parametrize("sampler", ["auto", "serial", "vector", "parallel", "alternating"])
def test_any_sampler_acts_on_a_device(sampler):
    assert config_of(sampler=sampler, device="cuda:1").actor.device == "cuda:1"


def test_lockstep_has_one_message_per_actor():
    settings = {"env.id": "X", "pace.mode": "lockstep", "actor.sampler": "alternating"}
    with pytest.raises(ConfigError, match=r"actor\.sampler alternating sends two messages"):
        validate_config(nested(settings))
    validate_config(nested({**settings, "actor.sampler": "parallel"}))
