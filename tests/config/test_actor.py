"""Samplers, workers and devices: what goes together, and what is refused with the way out."""

import pytest

from tests.config.made import complaint, config_of


@pytest.mark.parametrize("sampler", ["auto", "parallel"])
def test_as_many_workers_as_environments_and_no_more(sampler):
    settings = {"actor__sampler": sampler, "actor__num_envs": 4}
    config_of(**settings, actor__num_workers=4)
    text = complaint(**settings, actor__num_workers=6)
    assert "num_workers (6) must not exceed num_envs (4)" in text


@pytest.mark.parametrize("sampler", ["serial", "vector"])
def test_samplers_without_workers_are_given_none(sampler):
    text = complaint(actor__sampler=sampler, actor__num_workers=2)
    assert f"num_workers (2) does nothing where sampler is {sampler}: drop it, or set" in text


@pytest.mark.parametrize("key", ["actor__device", "learner__device"])
def test_a_device_is_one_of_those_that_can_be(key):
    for device in ("gpu", "meta", "cuda:", "cuda:x", "mps", ""):
        text = complaint(**{key: device})
        dotted = key.replace("__", ".")
        assert text == f"config: {dotted}: wants auto, cpu, cuda or cuda:N, got {device!r}"
    config_of(**{key: "cuda:1"})
