"""An update on a GPU is as on a CPU."""

import math

import numpy as np
import pytest
import torch

from impala_async.config.algorithm import AlgorithmSection
from impala_async.config.model import ModelSection
from impala_async.models.flat import Snapshot
from impala_async.policy import Policy
from impala_async.schema import (
    ActionPart,
    ActionSpec,
    ArraySpec,
    ObsSpec,
    Schema,
    recurrent_state,
)
from impala_async.training.batch import Batch
from impala_async.training.step import UpdateStep
from impala_async.weights import Version
from tests.columns import Planes, flat_schema
from tests.training.conftest import PLAIN

pytestmark = pytest.mark.gpu

COLUMNS, ROWS = 8, 10
SCHEMA = flat_schema(4, 3, ROWS)


def step_on(device, is_graphed=False, **settings):
    policy = Policy(SCHEMA, ModelSection(), seed=3, device=device)
    section = AlgorithmSection.model_validate(PLAIN | {"grad_clip": 0.1, "lr": 1e-3} | settings)
    return UpdateStep(policy, section, is_graphed=is_graphed)


def slot_on(device):
    planes = Planes(SCHEMA, COLUMNS)
    given = (torch.from_numpy(plane).to(device) for plane in (planes.obs, planes.small))
    return Batch.in_planes(SCHEMA, *given)


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


KINDS = {
    "impala": {"entropy_cost": 0.02, "entropy_cost_end": 0.0, "schedule_env_steps": 6},
    "appo": {"name": "appo", "kl_coeff": 0.5, "kl_target": 0.01, "normalize_returns": True},
    "ppo": {"name": "ppo", "num_minibatches": 2},
}


@pytest.mark.parametrize("is_graphed", [False, True], ids=["plain", "graphed"])
@pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS.keys())
def test_an_update_is_the_same_on_a_cpu_and_on_a_gpu(device, settings, is_graphed, caplog):
    steps = [step_on("cpu", **settings), step_on(device, is_graphed, **settings)]
    slots = [slot_on(where) for where in ("cpu", device)]
    for number in range(8):
        results, weights = [], []
        alive_B = torch.arange(COLUMNS) != (4 if number == 4 else -1)
        for step, slot in zip(steps, slots, strict=True):
            fill(slot, number)
            if number == 5:
                slot.rewards_BT.fill_(math.inf)
            results.append(step.run(step.begin(slot), alive_B, number))
            taken = Snapshot(step.policy.layout, step.policy.tensors).take(Version(1, number))
            assert taken is not None
            weights.append(taken.buffer.view(np.float32))
        assert results[1].num_updates == results[0].num_updates
        assert bool(results[1].num_updates) == (number != 5)
        assert torch.equal(results[1].is_failed_B, results[0].is_failed_B)
        if number != 5:
            assert results[1].stats == pytest.approx(results[0].stats, rel=1e-3, abs=1e-4)
        np.testing.assert_allclose(weights[1], weights[0], rtol=1e-3, atol=1e-4)
    assert not caplog.records


LSTM = flat_schema(4, 3, ROWS, state=recurrent_state("lstm", 8))
SQUASHED = ActionPart("", "squashed", shape=(2,))
STOCK = ArraySpec("", (4,), "int64")
FRAMES = ArraySpec("", (4, 84, 84), "uint8", is_stack=True)
NETWORKS = {
    "mlp": (SCHEMA, {"normalize_obs": True}),
    "whole numbers": (Schema(ObsSpec((STOCK,)), SCHEMA.action, ROWS), {}),
    "lstm": (LSTM, {"core": "lstm", "core_size": 8}),
    "squashed": (Schema(SCHEMA.obs, ActionSpec((SQUASHED,)), ROWS), {}),
    "frames": (Schema(ObsSpec((FRAMES,)), SCHEMA.action, ROWS), {"name": "nature_cnn"}),
}


@pytest.mark.parametrize(("schema", "model"), NETWORKS.values(), ids=NETWORKS.keys())
def test_networks_and_actions_of_each_kind_can_be_graphed(device, schema, model, caplog):
    rng = np.random.default_rng(0)
    planes = Planes(schema, COLUMNS)
    columns = planes.columns
    for array in (*columns.obs.values(), *columns.actions.values(), columns.rewards_CT):
        array[...] = rng.integers(0, 3, array.shape)
    for window in columns.windows.values():
        window[...] = np.arange(ROWS + 1)[:, None] + np.arange(window.shape[-1])
    columns.log_probs_CT[...], columns.mask_CT[...] = -1.0, True
    given = (torch.from_numpy(plane).to(device) for plane in (planes.obs, planes.small))
    batch = Batch.in_planes(schema, *given)

    steps = []
    for is_graphed in (False, True):
        policy = Policy(schema, ModelSection.model_validate(model), seed=3, device=device)
        step = UpdateStep(policy, AlgorithmSection(**PLAIN | {"lr": 1e-3}), is_graphed=is_graphed)
        for _ in range(5):
            result = step.run(batch, torch.ones(COLUMNS, dtype=torch.bool), 0)
        steps.append((result, policy))
    (plain, mine), (graphed, theirs) = steps
    assert graphed.stats == pytest.approx(plain.stats, rel=1e-2, abs=1e-4)
    for a, b in zip(mine.tensors, theirs.tensors, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3)
    assert not caplog.records
