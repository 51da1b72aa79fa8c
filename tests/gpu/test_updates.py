"""An update on a GPU is as on a CPU."""

import math

import numpy as np
import pytest
import torch

from impala_async.config.algorithm import AlgorithmSection
from impala_async.config.model import ModelSection
from impala_async.models.flat import Snapshot
from impala_async.policy import Policy
from impala_async.schema import ActionPart, ActionSpec, ArraySpec, ObsSpec, Schema
from impala_async.training.batch import Batch
from impala_async.training.step import UpdateStep
from impala_async.weights import Version

pytestmark = pytest.mark.gpu

COLUMNS, ROWS = 8, 10
SCHEMA = Schema(
    ObsSpec((ArraySpec("", (4,), "float32"),)),
    ActionSpec((ActionPart("", "discrete", (3,)),)),
    ROWS,
)


def step_on(device, **settings):
    policy = Policy(SCHEMA, ModelSection(), seed=3, device=device)
    section = AlgorithmSection.model_validate({"grad_clip": 0.1, "lr": 1e-3, **settings})
    return UpdateStep(policy, section)


def slot_on(device):
    layout = SCHEMA.layout
    planes = (layout.obs_bytes, layout.small_bytes)
    return Batch.in_planes(
        SCHEMA,
        *(torch.zeros((COLUMNS, size), dtype=torch.uint8, device=device) for size in planes),
    )


def fill(slot, seed):
    """Noise, with ends of episodes and the masked rows behind them."""
    rng = np.random.default_rng(seed)
    shape = (COLUMNS, ROWS)
    slot.obs[""].copy_(torch.from_numpy(rng.normal(size=(COLUMNS, ROWS + 1, 4))))
    slot.actions[""].copy_(torch.from_numpy(rng.integers(0, 3, shape)))
    slot.rewards_BT.copy_(torch.from_numpy(rng.normal(size=shape)))
    slot.log_probs_BT.copy_(torch.from_numpy(-rng.uniform(0.5, 2.0, shape)))
    slot.mask_BT.fill_(True)
    slot.terminated_BT.fill_(False)
    slot.terminated_BT[1, 3] = True
    slot.mask_BT[1, 4] = False
    slot.rewards_BT[1, 4] = math.nan


def test_an_update_is_the_same_on_a_cpu_and_on_a_gpu(device):
    steps = [step_on("cpu"), step_on(device)]
    slots = [slot_on(where) for where in ("cpu", device)]
    for number in range(6):
        results, weights = [], []
        alive_B = torch.arange(COLUMNS) != (4 if number == 2 else -1)
        for step, slot in zip(steps, slots, strict=True):
            fill(slot, number)
            if number == 3:
                slot.rewards_BT.fill_(math.inf)
            results.append(step.run(slot, alive_B, number))
            taken = Snapshot(step.policy.layout, step.policy.tensors).take(Version(1, number))
            assert taken is not None
            weights.append(taken.buffer.view(np.float32))
        assert {result.num_updates for result in results} == {int(number != 3)}
        assert torch.equal(results[1].is_failed_B, results[0].is_failed_B)
        if number != 3:
            assert results[1].stats == pytest.approx(results[0].stats, rel=1e-3, abs=1e-4)
        np.testing.assert_allclose(weights[1], weights[0], rtol=1e-3, atol=1e-4)
