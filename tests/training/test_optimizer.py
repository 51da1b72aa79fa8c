"""Each kind as published, clipping by global norm, and a state that survives JSON and files."""

import json
import math
import subprocess
import sys

import pytest
import torch

from impala_async.config.run import AlgorithmSection
from impala_async.errors import CheckpointError
from impala_async.training.optimizer import (
    RMSPropTF,
    build_optimizer,
    flatten_optimizer,
    global_norm,
    restore_optimizer,
    scheduled,
    take_step,
)
from tests.training.conftest import are_equal


def make_parameters(seed=0):
    source = torch.Generator().manual_seed(seed)
    shapes = ((3, 2), (4,), (1, 5))
    return [torch.nn.Parameter(torch.randn(shape, generator=source)) for shape in shapes]


def set_gradients(parameters, seed):
    source = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=source)


def build(parameters, kind="adam", **options):
    section = AlgorithmSection(lr=0.01, optimizer=kind, optimizer_options=options)
    return build_optimizer(parameters, section)


def train(optimizer, parameters, seeds):
    for seed in seeds:
        set_gradients(parameters, seed)
        optimizer.param_groups[0]["lr"] = 0.01 / (1 + seed)
        take_step(optimizer, 0.0, None)


def test_the_global_norm_is_that_of_all_gradients_as_one_vector():
    parameters = make_parameters()
    set_gradients(parameters, 1)
    parameters[1].grad = None
    flat = torch.cat([parameters[0].grad.flatten(), parameters[2].grad.flatten()])
    torch.testing.assert_close(global_norm(parameters), flat.norm())


@pytest.mark.parametrize("share", [None, 0.01, 0.25, 1.0, 1.7])
def test_clipping_scales_all_gradients_alike_and_only_above_the_limit(share):
    parameters = make_parameters()
    set_gradients(parameters, 1)
    before = [parameter.grad.clone() for parameter in parameters]
    norm = float(global_norm(parameters))
    take_step(build(parameters), norm, None if share is None else share * norm)
    for parameter, gradient in zip(parameters, before, strict=True):
        torch.testing.assert_close(parameter.grad, gradient * min(1.0, share or 1.0))


@pytest.mark.parametrize("clip", [None, 0.01, 1.0, 1e6])
def test_clipping_by_value_bounds_each_entry(clip):
    parameters = make_parameters()
    set_gradients(parameters, 1)
    before = [parameter.grad.clone() for parameter in parameters]
    take_step(build(parameters), float(global_norm(parameters)), clip, "value")
    for parameter, gradient in zip(parameters, before, strict=True):
        clipped = gradient if clip is None else gradient.clamp(-clip, clip)
        assert torch.equal(parameter.grad, clipped)


def final_weights(step, parameters):
    for seed in range(6):
        set_gradients(parameters, seed)
        step()
    return torch.cat([parameter.detach().flatten() for parameter in parameters])


def test_each_kind_is_the_one_it_is_named_after():
    theirs = {
        "adam": lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-5),
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-5, weight_decay=0.01),
        "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, alpha=0.99, eps=1e-5),
        "rmsprop_tf": lambda p: RMSPropTF(p, lr=0.01, decay=0.99, eps=0.1, momentum=0.0),
    }
    found = []
    for kind, make in theirs.items():
        parameters, others = make_parameters(), make_parameters()
        ours = build(parameters, kind)
        found.append(
            final_weights(lambda optimizer=ours: take_step(optimizer, 0.0, None), parameters)
        )
        torch.testing.assert_close(found[-1], final_weights(make(others).step, others))
    for number, weights in enumerate(found):
        assert not any(torch.allclose(weights, other, rtol=1e-4) for other in found[:number])


@pytest.mark.parametrize("momentum", [0.0, 0.8])
def test_tfs_rmsprop_by_hand_with_a_rate_that_changes(momentum):
    """A rate is in the momentum from when its gradient came: TF1, not torch.

    decay 0.9, eps 0.1: ms = 0.9 + 0.1 * 4 = 1.3, then 0.9 * 1.3 + 0.1 * 1 = 1.27.
    """
    weight, idle = (torch.nn.Parameter(torch.tensor(0.0, dtype=torch.float64)) for _ in range(2))
    optimizer = RMSPropTF([weight, idle], lr=0.5, decay=0.9, eps=0.1, momentum=momentum)
    weight.grad = torch.full_like(weight, 2.0)
    optimizer.step()
    first = 0.5 * 2 / math.sqrt(1.4)
    assert weight.item() == pytest.approx(-first, rel=1e-12)
    optimizer.param_groups[0]["lr"] = 0.25
    weight.grad.fill_(-1.0)
    optimizer.step()
    second = momentum * first - 0.25 * 1 / math.sqrt(1.37)
    assert weight.item() == pytest.approx(-first - second, rel=1e-12)
    # A parameter without a gradient stays as it is, and has no state.
    assert idle.item() == 0
    assert len(optimizer.state) == 1


def test_schedules_are_linear_and_end_exactly():
    assert [scheduled(3.0, None, None, at) for at in (0, 10**9)] == [3.0, 3.0]
    assert [scheduled(1.0, 0.2, 80, at) for at in (0, 40, 80, 81)] == [1.0, 0.6, 0.2, 0.2]
    # start + (end - start) would be 0.7999999999999998.
    assert scheduled(1e16, 0.8, 10, 10) == 0.8


def test_changed_settings_hold_in_a_resumed_run():
    """It goes on as if they had been changed in a run that never stopped."""
    for kind, before, after in (
        ("adam", {}, {"eps": 0.5}),
        ("adamw", {}, {"weight_decay": 0.5}),
        *((kind, {}, {"decay": 0.5}) for kind in ("rmsprop", "rmsprop_tf")),
        *((kind, {}, {"momentum": 0.5}) for kind in ("rmsprop", "rmsprop_tf")),
        *((kind, {"momentum": 0.5}, {"momentum": 0.0}) for kind in ("rmsprop", "rmsprop_tf")),
    ):
        parameters = make_parameters()
        optimizer = build(parameters, kind, **before)
        train(optimizer, parameters, range(4))
        copies = [torch.nn.Parameter(parameter.detach().clone()) for parameter in parameters]
        other = build(copies, kind, **after)
        tensors, saved = flatten_optimizer(optimizer)
        restore_optimizer(other, tensors, json.loads(json.dumps(saved)))
        # Momentum that comes back later begins anew.
        has_momentum = any("momentum" in name for name in flatten_optimizer(other)[0])
        assert has_momentum == bool(after.get("momentum")), kind
        (wanted,) = build(make_parameters(), kind, **after).param_groups
        assert {**other.param_groups[0], "params": None} == {**wanted, "params": None}
        for parameter in parameters:
            optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))
        optimizer.param_groups[0].update({k: v for k, v in wanted.items() if k != "params"})
        train(optimizer, parameters, range(4, 9))
        train(other, copies, range(4, 9))
        assert are_equal(parameters, copies), (kind, before, after)


def test_a_state_of_another_kind_or_shape_is_refused():
    parameters = make_parameters()
    optimizer = build(parameters)
    train(optimizer, parameters, range(1))
    tensors, options = flatten_optimizer(optimizer)
    for added, changed, why in [
        ({}, {"kind": "RMSprop"}, "state of RMSprop does not fit Adam"),
        ({"0.exp_avg": torch.zeros(2, 2)}, {}, "shape"),
        ({"3.exp_avg": torch.zeros(2, 2)}, {}, "does not exist"),
        ({"x.exp_avg": torch.zeros(2, 2)}, {}, "does not exist"),
    ]:
        with pytest.raises(CheckpointError, match=why):
            restore_optimizer(optimizer, tensors | added, options | changed)


@pytest.mark.parametrize("kind", ["adam", "adamw", "rmsprop"])
@pytest.mark.parametrize("are_all", [False, True])
def test_a_state_that_lacks_a_part_is_refused(kind, are_all):
    parameters = make_parameters()
    optimizer = build(parameters, kind)
    train(optimizer, parameters, range(1))
    tensors, options = flatten_optimizer(optimizer)
    for name in tensors:
        ending = name[name.index(".") :] if are_all else name
        others = {each: kept for each, kept in tensors.items() if not each.endswith(ending)}
        with pytest.raises(CheckpointError, match=f"it has no '.{name[name.index('.') :]}'"):
            restore_optimizer(optimizer, others, options)


AN_UPDATE = """
import sys, torch
from impala_async.config.run import AlgorithmSection, ModelSection
from impala_async.policy import Policy
from impala_async.models.flat import Snapshot
from impala_async.training.step import UpdateStep
from impala_async.weights import NO_VERSION
from tests.training.conftest import flat_schema, random_batch

schema = flat_schema(3, 4, 5)
batch = random_batch(schema, 2)
for optimizer in ("adam", "adamw", "rmsprop", "rmsprop_tf"):
    policy = Policy(schema, ModelSection(), seed=0)
    step = UpdateStep(policy, AlgorithmSection(optimizer=optimizer))
    assert step.run(batch, torch.ones(2, dtype=torch.bool), 0).num_updates
    step.restore(step.capture())
    Snapshot(policy.layout, policy.tensors).take(NO_VERSION)
print("torch._dynamo" in sys.modules)
"""


def test_nothing_imports_the_compiler_of_torch_unasked():
    """It takes nearly as long to import as torch, before the first update of every run."""
    said = subprocess.run([sys.executable, "-c", AN_UPDATE], capture_output=True, text=True)
    assert said.stdout == "False\n", said.stderr
