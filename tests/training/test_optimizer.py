"""Adam as published, clipping by global norm, and a state that survives JSON and files."""

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
    can_skip,
    clip_gradients,
    clip_unseen,
    flatten_optimizer,
    global_norm,
    norm_limit,
    restore_optimizer,
    set_learning_rate,
    step_unless,
)

SECTION = AlgorithmSection(lr=0.01, optimizer_options={"eps": 1e-3})


def make_parameters(seed=0):
    source = torch.Generator().manual_seed(seed)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=source)) for shape in ((3, 2), (4,), (1, 5))
    ]


def set_gradients(parameters, seed):
    source = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=source)


def train(optimizer, parameters, seeds):
    for seed in seeds:
        set_gradients(parameters, seed)
        set_learning_rate(optimizer, 0.01 / (1 + seed))
        optimizer.step()


def test_the_global_norm_is_that_of_all_gradients_as_one_vector():
    parameters = make_parameters()
    set_gradients(parameters, 1)
    flat = torch.cat([parameter.grad.flatten() for parameter in parameters])
    torch.testing.assert_close(global_norm(parameters), flat.norm())


def test_clipping_scales_all_gradients_alike_and_only_above_the_limit():
    parameters = make_parameters()
    set_gradients(parameters, 1)
    before = [parameter.grad.clone() for parameter in parameters]
    norm = float(global_norm(parameters))
    for limit in (None, norm, norm * 2):
        clip_gradients(parameters, norm, limit)
        assert all(torch.equal(p.grad, g) for p, g in zip(parameters, before, strict=True))
    clip_gradients(parameters, norm, norm / 4)
    assert math.isclose(float(global_norm(parameters)), norm / 4, rel_tol=1e-5)
    for parameter, gradient in zip(parameters, before, strict=True):
        torch.testing.assert_close(parameter.grad, gradient / 4)


@pytest.mark.parametrize("share", [None, 0.01, 0.3, 1.0, 1.7])
def test_clipping_unseen_is_clipping_to_the_last_bit(share):
    seen, unseen = make_parameters(), make_parameters()
    for seed in range(20):
        for parameters in (seen, unseen):
            set_gradients(parameters, seed)
        norm = global_norm(seen)
        limit = None if share is None else share * float(norm)
        clip_gradients(seen, float(norm), limit)
        clip_unseen(unseen, norm, limit)
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(seen, unseen, strict=True))


def test_gradients_of_0_stay_0():
    parameters = make_parameters()
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    clip_unseen(parameters, global_norm(parameters), 0.5)
    assert not any(parameter.grad.any() for parameter in parameters)


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_a_step_that_is_not_taken_leaves_no_trace(name):
    section = AlgorithmSection(optimizer=name)
    straight, interrupted = make_parameters(), make_parameters()
    optimizers = [build_optimizer(parameters, section) for parameters in (straight, interrupted)]
    assert all(can_skip(optimizer) for optimizer in optimizers)
    for seed in range(4):
        for parameters, optimizer in zip((straight, interrupted), optimizers, strict=True):
            if parameters is interrupted:
                for parameter in parameters:
                    parameter.grad = torch.full_like(parameter, math.nan)
                step_unless(optimizer, torch.tensor(True))
            set_gradients(parameters, seed)
            step_unless(optimizer, torch.tensor(False))
    assert all(torch.equal(a, b) for a, b in zip(straight, interrupted, strict=True))
    states = [flatten_optimizer(optimizer)[0] for optimizer in optimizers]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_others_cannot_skip_by_themselves():
    for name in ("rmsprop", "rmsprop_tf"):
        assert not can_skip(build_optimizer(make_parameters(), AlgorithmSection(optimizer=name)))


def test_a_parameter_without_gradient_is_no_obstacle():
    parameters = make_parameters()
    set_gradients(parameters, 1)
    parameters[1].grad = None
    flat = torch.cat([parameters[0].grad.flatten(), parameters[2].grad.flatten()])
    torch.testing.assert_close(global_norm(parameters), flat.norm())
    clip_gradients(parameters, 2.0, 1.0)


def test_an_optimizer_that_never_stepped_has_a_state_too():
    tensors, options = flatten_optimizer(build_optimizer(make_parameters(), SECTION))
    assert tensors == {}
    restore_optimizer(build_optimizer(make_parameters(), SECTION), tensors, options)


def test_how_this_machine_computes_is_not_restored():
    parameters = make_parameters()
    foreign = torch.optim.Adam(parameters, lr=0.5, fused=False, foreach=True)
    train(foreign, parameters, range(1))
    mine = build_optimizer(make_parameters(), SECTION)
    restore_optimizer(mine, *flatten_optimizer(foreign))
    assert mine.param_groups[0]["fused"] is True
    assert mine.param_groups[0]["foreach"] is None
    assert mine.param_groups[0]["lr"] == 0.01


def test_a_state_of_another_kind_or_shape_is_refused():
    parameters = make_parameters()
    optimizer = build_optimizer(parameters, SECTION)
    train(optimizer, parameters, range(1))
    tensors, options = flatten_optimizer(optimizer)
    with pytest.raises(CheckpointError, match="RMSprop"):
        restore_optimizer(optimizer, tensors, {**options, "kind": "RMSprop"})
    with pytest.raises(CheckpointError, match="shape"):
        restore_optimizer(optimizer, {**tensors, "0.exp_avg": torch.zeros(2, 2)}, options)
    with pytest.raises(CheckpointError, match="does not exist"):
        restore_optimizer(optimizer, {**tensors, "3.exp_avg": torch.zeros(2, 2)}, options)
    with pytest.raises(CheckpointError, match=r"state of parameters \[.*\], not "):
        restore_optimizer(optimizer, tensors, {**options, "groups": options["groups"] * 2})


def build(parameters, **settings):
    return build_optimizer(parameters, AlgorithmSection(lr=0.01, **settings))


def final_weights(optimizer, parameters):
    for seed in range(6):
        set_gradients(parameters, seed)
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in parameters])


def test_each_kind_is_the_one_it_is_named_after():
    wanted = {
        "adam": lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-5),
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-5, weight_decay=0.01),
        "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, alpha=0.99, eps=1e-5),
    }
    found = {}
    for kind, make in wanted.items():
        parameters, theirs = make_parameters(), make_parameters()
        found[kind] = final_weights(build(parameters, optimizer=kind), parameters)
        torch.testing.assert_close(found[kind], final_weights(make(theirs), theirs))
    parameters = make_parameters()
    found["rmsprop_tf"] = final_weights(build(parameters, optimizer="rmsprop_tf"), parameters)
    kinds = list(found)
    for number, kind in enumerate(kinds):
        for other in kinds[number + 1 :]:
            assert not torch.allclose(found[kind], found[other], rtol=1e-4), (kind, other)


def test_torchs_rmsprop_by_hand():
    """From a mean square of 0, epsilon outside the root: where TF1 has 1, and inside."""
    weight = torch.nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
    optimizer = build(
        [weight], optimizer="rmsprop", optimizer_options={"decay": 0.9, "eps": 0.1, "momentum": 0.8}
    )
    square, moment, want = 0.0, 0.0, 1.0
    for gradient in (2.0, -1.0, 0.5):
        weight.grad = torch.full_like(weight, gradient)
        optimizer.step()
        square = 0.9 * square + 0.1 * gradient**2
        moment = 0.8 * moment + gradient / (math.sqrt(square) + 0.1)
        want -= 0.01 * moment
        assert weight.item() == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "adam", "optimizer_options": {"eps": 0.1}},
        {"optimizer": "rmsprop_tf", "optimizer_options": {"decay": 0.9, "momentum": 0.5}},
        {"optimizer": "rmsprop", "optimizer_options": {"decay": 0.9, "momentum": 0.5}},
        {"optimizer": "adamw", "optimizer_options": {"weight_decay": 0.1}},
        {"optimizer": "rmsprop_tf", "optimizer_options": {"eps": 0.5}},
    ],
)
def test_every_kind_goes_on_bit_for_bit_and_its_keys_do_something(settings):
    parameters, resumed = make_parameters(), make_parameters()
    optimizer = build(parameters, **settings)
    train(optimizer, parameters, range(4))
    tensors, options = flatten_optimizer(optimizer)
    options = json.loads(json.dumps(options))
    assert tensors
    with torch.no_grad():
        for mine, theirs in zip(resumed, parameters, strict=True):
            mine.copy_(theirs)
    other = build(resumed, **settings)
    restore_optimizer(other, {k: v.clone() for k, v in tensors.items()}, options)
    # Whoever steps sets the rate of the schedule before.
    assert other.param_groups[0]["lr"] == 0.01
    train(optimizer, parameters, range(4, 9))
    train(other, resumed, range(4, 9))
    assert all(torch.equal(a, b) for a, b in zip(parameters, resumed, strict=True))
    plain = make_parameters()
    train(build(plain, optimizer=settings["optimizer"]), plain, range(9))
    assert not torch.allclose(plain[0], parameters[0], rtol=1e-4)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"optimizer": "adam"}, {"optimizer_options": {"eps": 0.5}}),
        ({"optimizer": "adamw"}, {"optimizer_options": {"weight_decay": 0.5}}),
        ({"optimizer": "rmsprop"}, {"optimizer_options": {"decay": 0.5}}),
        ({"optimizer": "rmsprop"}, {"optimizer_options": {"momentum": 0.5}}),
        (
            {"optimizer": "rmsprop", "optimizer_options": {"momentum": 0.5}},
            {"optimizer_options": {"momentum": 0.0}},
        ),
        ({"optimizer": "rmsprop_tf"}, {"optimizer_options": {"decay": 0.5}}),
        ({"optimizer": "rmsprop_tf"}, {"optimizer_options": {"momentum": 0.5}}),
        (
            {"optimizer": "rmsprop_tf", "optimizer_options": {"momentum": 0.5}},
            {"optimizer_options": {"momentum": 0.0}},
        ),
    ],
)
def test_changed_settings_hold_in_a_resumed_run(before, after):
    """As if they had been changed in the one that never stopped."""
    parameters, resumed = make_parameters(), make_parameters()
    optimizer = build(parameters, **before)
    train(optimizer, parameters, range(4))
    tensors, options = flatten_optimizer(optimizer)
    with torch.no_grad():
        for mine, theirs in zip(resumed, parameters, strict=True):
            mine.copy_(theirs)
    other = build(resumed, **{**before, **after})
    restore_optimizer(other, {k: v.clone() for k, v in tensors.items()}, options)
    fresh = build(make_parameters(), **{**before, **after})
    (mine,), (wanted,) = other.param_groups, fresh.param_groups
    assert {**mine, "params": None} == {**wanted, "params": None}
    for parameter in parameters:
        state = optimizer.state[parameter]
        state.setdefault("momentum_buffer", torch.zeros_like(parameter))
    optimizer.param_groups[0].update({k: v for k, v in wanted.items() if k != "params"})
    train(optimizer, parameters, range(4, 9))
    train(other, resumed, range(4, 9))
    assert all(torch.equal(a, b) for a, b in zip(parameters, resumed, strict=True))


def test_momentum_that_was_taken_away_and_comes_back_begins_anew():
    for kind in ("rmsprop", "rmsprop_tf"):
        parameters = make_parameters()
        optimizer = build(parameters, optimizer=kind, optimizer_options={"momentum": 0.5})
        train(optimizer, parameters, range(2))
        saved = flatten_optimizer(optimizer)
        assert "0.momentum_buffer" in saved[0]
        without = build(make_parameters(), optimizer=kind)
        restore_optimizer(without, *saved)
        assert not any("momentum" in name for name in flatten_optimizer(without)[0])


def test_only_what_leaves_room_for_its_square_is_for_an_optimizer():
    assert norm_limit(40.0) == norm_limit(1e18) == math.inf
    assert norm_limit(None) == norm_limit(1e20) == 1e19


# -------------------- RMSProp as TensorFlow 1 computed it, against numbers worked out by hand


def moves(optimizer, weight, gradients):
    found = []
    for gradient in gradients:
        weight.grad = torch.full_like(weight, gradient)
        optimizer.step()
        found.append(weight.item())
    return found


def test_tfs_rmsprop_by_hand_without_momentum():
    """decay 0.9, eps 0.1: ms = 0.9 + 0.1 * 4 = 1.3, then 0.9 * 1.3 + 0.1 * 1 = 1.27."""
    weight = torch.nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
    optimizer = RMSPropTF([weight], lr=0.5, decay=0.9, eps=0.1)
    first = 1 - 0.5 * 2 / math.sqrt(1.4)
    second = first + 0.5 * 1 / math.sqrt(1.37)
    assert moves(optimizer, weight, [2.0, -1.0]) == pytest.approx([first, second], rel=1e-12)


def test_tfs_rmsprop_by_hand_with_momentum_and_a_rate_that_changes():
    """A rate is in the momentum from when its gradient came: TF1, not torch."""
    weight = torch.nn.Parameter(torch.tensor(0.0, dtype=torch.float64))
    optimizer = RMSPropTF([weight], lr=0.5, decay=0.9, eps=0.1, momentum=0.8)
    moment = 0.5 * 2 / math.sqrt(1.4)
    assert moves(optimizer, weight, [2.0]) == pytest.approx([-moment], rel=1e-12)
    optimizer.param_groups[0]["lr"] = 0.25
    second = 0.8 * moment - 0.25 * 1 / math.sqrt(1.37)
    assert moves(optimizer, weight, [-1.0]) == pytest.approx([-moment - second], rel=1e-12)


def test_tfs_rmsprop_leaves_a_parameter_without_gradient_as_it_is():
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = RMSPropTF(weights, lr=0.5)
    optimizer.step()
    weights[0].grad = torch.ones(2)
    optimizer.step()
    assert (weights[0] < 1).all()
    assert (weights[1] == 1).all()
    assert len(optimizer.state) == 1


AN_UPDATE = """
import sys, torch
from impala_async.config.run import AlgorithmSection, ModelSection
from impala_async.policy import Policy
from impala_async.schema import ActionPart, ActionSpec, ArraySpec, ObsSpec, Schema
from impala_async.training.batch import Batch
from impala_async.training.snapshot import Snapshot
from impala_async.training.step import UpdateStep
from impala_async.weights import NO_VERSION

obs, action = ArraySpec("", (3,), "float32"), ActionPart("", "discrete", (4,))
schema = Schema(ObsSpec((obs,)), ActionSpec((action,)), 5)
planes = (torch.zeros((2, size), dtype=torch.uint8)
          for size in (schema.layout.obs_bytes, schema.layout.small_bytes))
batch = Batch.in_planes(schema, *planes)
batch.mask_BT.fill_(True)
for optimizer in ("adam", "adamw", "rmsprop", "rmsprop_tf"):
    policy = Policy(schema, ModelSection(), seed=0)
    step = UpdateStep(policy, AlgorithmSection(optimizer=optimizer), "cpu")
    assert step.run(batch, torch.ones(2, dtype=torch.bool), 0).applied
    step.restore(step.capture())
    Snapshot(policy.layout, policy.tensors).take(NO_VERSION)
print("torch._dynamo" in sys.modules)
"""


def test_nothing_imports_the_compiler_of_torch_unasked():
    """It takes nearly as long to import as torch, before the first update of every run."""
    said = subprocess.run([sys.executable, "-c", AN_UPDATE], capture_output=True, text=True)
    assert said.stdout == "False\n", said.stderr
