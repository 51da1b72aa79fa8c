"""An update on a GPU: launched without a wait, recorded as a graph, and the same as on a CPU."""

import contextlib
import logging
import math
import warnings
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch

from impala_async.config.algorithm import AlgorithmSection
from impala_async.config.model import ModelSection
from impala_async.policy import Policy
from impala_async.schema import ActionPart, ActionSpec, ArraySpec, ObsSpec, Schema
from impala_async.training.batch import Batch
from impala_async.training.snapshot import Snapshot
from impala_async.training.step import UpdateStep
from impala_async.weights import Version

pytestmark = pytest.mark.gpu

COLUMNS, ROWS = 8, 10
SCHEMA = Schema(
    ObsSpec((ArraySpec("", (4,), "float32"),)),
    ActionSpec((ActionPart("", "discrete", (3,)),)),
    ROWS,
)
ALIVE = torch.ones(COLUMNS, dtype=torch.bool)
# Cycles of a GPU, a second or two.
LONG = 2_000_000_000


def step_on(device: torch.device | str, *, is_graphed: bool = False, **settings: Any) -> UpdateStep:
    policy = Policy(SCHEMA, ModelSection(), seed=3, device=device)
    section = AlgorithmSection.model_validate({"grad_clip": 0.1, "lr": 1e-3, **settings})
    return UpdateStep(policy, section, device, is_graphed=is_graphed)


def slot_on(device: torch.device | str) -> Batch:
    layout = SCHEMA.layout
    planes = (layout.obs_bytes, layout.small_bytes)
    return Batch.in_planes(
        SCHEMA,
        *(torch.zeros((COLUMNS, size), dtype=torch.uint8, device=device) for size in planes),
    )


def fill(slot: Batch, seed: int) -> None:
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


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever waits for the device is an error."""
    try:
        with warnings.catch_warnings():
            # That it does not see every wait.
            warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_graphs_make_the_same_weights_as_launches(device: torch.device) -> None:
    schedule = {"lr_end": 0.0, "entropy_cost_end": 0.0, "schedule_env_steps": 100}
    plain, graphed = step_on(device, **schedule), step_on(device, is_graphed=True, **schedule)
    slots = [slot_on(device) for _ in range(2)]
    for update in range(20):
        slot = slots[update % 2]
        fill(slot, update)
        alive_B = torch.arange(COLUMNS) != update
        if update == 7:
            slot.rewards_BT.fill_(math.inf)
        want, got = (step.run(slot, alive_B, update) for step in (plain, graphed))
        assert got.applied == want.applied == (update != 7)
        if got.applied:
            assert got.stats == pytest.approx(want.stats, rel=1e-3, abs=1e-5)
    assert graphed._graphs is not None
    assert not graphed._graphs.is_given_up
    for one, other in zip(plain.policy.tensors, graphed.policy.tensors, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_an_update_is_that_of_a_cpu(device: torch.device) -> None:
    steps = [step_on(where) for where in ("cpu", device)]
    slots = [slot_on(where) for where in ("cpu", device)]
    for update in range(5):
        results = []
        for step, slot in zip(steps, slots, strict=True):
            fill(slot, update)
            results.append(step.run(slot, ALIVE, update).stats)
        assert results[1] == pytest.approx(results[0], rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("name", ["impala", "appo", "ppo", "a2c"])
def test_nothing_waits_for_the_device_while_an_update_is_launched(
    device: torch.device, name: str
) -> None:
    step, slot = step_on(device, name=name), slot_on(device)
    fill(slot, 0)
    step.run(slot, ALIVE, 0)
    with no_waiting():
        numbers = step._launch(slot, slot.mask_BT, 0.01)
    assert numbers.isfinite().all()


@pytest.mark.parametrize("is_graphed", [False, True])
def test_updates_and_their_weights_are_launched_without_a_wait_and_are_those_of_updates_looked_at(
    device: torch.device, is_graphed: bool
) -> None:
    at_once, pipelined = (step_on(device, is_graphed=is_graphed) for _ in range(2))
    assert pipelined.is_pipelined
    one, other = (
        Snapshot(step.policy.layout, step.policy.tensors, device) for step in (at_once, pipelined)
    )
    slots = [slot_on(device) for _ in range(6)]
    for seed, slot in enumerate(slots):
        fill(slot, seed)
    slots[3].rewards_BT.fill_(math.inf)
    want = []
    for number, slot in enumerate(slots):
        result = at_once.run(slot, alive_in(number), number)
        copy = one.take()
        weights = copy.as_version(Version(1, number)).buffer.view(np.float32).copy()
        want.append((result, weights))
    # The first of each records, where it is to be recorded, and changes nothing.
    for slot in slots:
        assert not pipelined.run(slot, torch.zeros_like(ALIVE), 0).applied
    launched = []
    # Else the GPU could be as fast as the host.
    torch.cuda._sleep(LONG)
    with no_waiting():
        for number, slot in enumerate(slots):
            result = pipelined.begin(slot, alive_in(number), number)
            launched.append((result, other.take()))
    for _, copy in launched:
        assert not copy.flat._copied.query()
    for number, (result, copy) in enumerate(launched):
        (expected, weights), got = want[number], result()
        assert got.num_updates == expected.num_updates == (number != 3)
        assert torch.equal(got.is_failed_B, expected.is_failed_B)
        if got.applied:
            assert got.stats == pytest.approx(expected.stats, rel=1e-3, abs=1e-5)
        buffer = copy.as_version(Version(1, number)).buffer
        np.testing.assert_allclose(buffer.view(np.float32), weights, rtol=1e-3, atol=1e-5)
        assert torch.from_numpy(buffer).is_pinned()


def alive_in(number: int) -> torch.Tensor:
    """In one of the updates a column is dead."""
    return torch.arange(COLUMNS) != (4 if number == 2 else -1)


def test_what_cannot_be_recorded_is_launched(
    device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    """A torso that looks at its own numbers waits for the device, which a graph cannot."""
    plain, step, slot = step_on(device), step_on(device, is_graphed=True), slot_on(device)
    fill(slot, 0)

    def look(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
        assert output.sum().item() == output.sum().item()

    step.policy.model.policy_torso.register_forward_hook(look)
    with caplog.at_level(logging.WARNING):
        results = [each.run(slot, ALIVE, 0).stats for each in (plain, step)]
    assert "no CUDA graph" in caplog.text
    assert results[1] == pytest.approx(results[0], rel=1e-3, abs=1e-5)


def test_a_slot_lies_where_it_was_put(device: torch.device) -> None:
    slot = slot_on(device)
    tensors = [getattr(slot, item.name) for item in fields(slot)]
    assert all(t.device.type == "cuda" for t in tensors if isinstance(t, torch.Tensor))
