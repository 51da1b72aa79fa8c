"""The loop that the learner is measured against, recorded as a CUDA graph."""

from dataclasses import fields, replace

import pytest
import torch

from bench.bare_loop import BareLoop
from impala_async.config.model import ModelSection
from impala_async.policy import Policy
from impala_async.training.batch import Batch
from tests.bench.test_learner import SCHEMA, SECTION, batch

pytestmark = pytest.mark.gpu


def batch_on(device: torch.device) -> Batch:
    made = batch()
    parts = {item.name: getattr(made, item.name) for item in fields(made)}
    return replace(
        made,
        **{
            name: part.to(device)
            if isinstance(part, torch.Tensor)
            else {key: leaf.to(device) for key, leaf in part.items()}
            for name, part in parts.items()
        },
    )


def test_recorded_it_makes_the_same_weights(device: torch.device) -> None:
    policies = [Policy(SCHEMA, ModelSection(), seed=3, device=device) for _ in range(2)]
    plain, recorded = (BareLoop(policy, SECTION, batch_on(device)) for policy in policies)
    turn = recorded.recorded()
    for _ in range(5):
        turn()
    # Warming up trains, and recording does not.
    for _ in range(3 + 5):
        plain.update()
    for one, other in zip(policies[0].tensors, policies[1].tensors, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
