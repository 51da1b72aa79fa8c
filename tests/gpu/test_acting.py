"""A policy on the GPU acts for all columns, whatever steps the environments."""

import numpy as np
import pytest
import torch

from impala_async.actor.setup import make_setup
from impala_async.config.actor import ActorSection
from impala_async.config.model import ModelSection
from impala_async.policy import Policy
from impala_async.schema import Schema
from tests.actor.fakes import sampler_over
from tests.actor.worlds import section

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("sampler", "num_workers"), [("serial", None), ("parallel", 2)])
def test_it_acts_there_as_the_same_policy_would_here(device, sampler, num_workers):
    actor = ActorSection(sampler=sampler, device=str(device), num_workers=num_workers)
    setup = make_setup(actor, section("Masked"), 6)
    assert setup.device == f"{device}:0"
    schema = Schema(setup.envs.obs_spec, setup.envs.action_spec, 8)
    there = Policy(schema, ModelSection(), seed=1, device=setup.device)
    here = Policy(schema, ModelSection(), seed=1)
    generator = torch.Generator(setup.device).manual_seed(0)
    sampler = sampler_over(setup.envs, schema, there, generator)
    (message,) = [message for _ in range(8) for message in sampler.step()]
    setup.envs.close()
    columns = message.buffer.columns
    evaluated = here.evaluate(
        {name: torch.from_numpy(array) for name, array in columns.obs.items()},
        {name: torch.from_numpy(array) for name, array in columns.actions.items()},
        torch.from_numpy(columns.mask_CT),
        {},
    )
    expected = evaluated.log_probs_TB.detach().numpy().T[columns.mask_CT]
    np.testing.assert_allclose(columns.log_probs_CT[columns.mask_CT], expected, atol=1e-4)
