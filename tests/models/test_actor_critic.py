"""Observation leaves in any dtype and shape; one set of logits per action part; one value."""

import pytest
import torch

from impala_async.config import ModelSection
from impala_async.models.actor_critic import ActorCritic
from impala_async.spec import ActionPart, ActionSpec, ArraySpec, ObsSpec

PLAIN_OBS = ObsSpec((ArraySpec("", (3,), "float32"),))
PLAIN_ACTION = ActionSpec((ActionPart("", "discrete", (4,)),))
MIXED_OBS = ObsSpec(
    (
        ArraySpec("image", (2, 2), "uint8"),
        ArraySpec("flag", (), "bool"),
        ArraySpec("speed", (1,), "float64"),
    )
)


def build(obs=PLAIN_OBS, action=PLAIN_ACTION, **settings):
    return ActorCritic(ModelSection(hidden_sizes=(8, 8), **settings), obs, action)


def test_outputs_one_value_and_one_set_of_logits_per_row():
    output = build()({"": torch.randn(7, 3)})
    assert [part.shape for part in output.logits] == [(7, 4)]
    assert output.values_N.shape == (7,)


def test_action_parts_split_the_head_in_their_order():
    action = ActionSpec((ActionPart("a", "discrete", (2,)), ActionPart("b", "discrete", (5,))))
    model = build(action=action)
    with torch.no_grad():
        model.policy_head.weight.zero_()
        model.policy_head.bias.copy_(torch.arange(7))
    first, second = model({"": torch.randn(1, 3)}).logits
    assert first.tolist() == [[0, 1]]
    assert second.tolist() == [[2, 3, 4, 5, 6]]


def test_leaves_are_flattened_cast_and_joined_in_the_order_of_the_spec():
    model = build(MIXED_OBS)
    seen = []
    model.policy_torso.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    leaves = {
        "speed": torch.tensor([[0.5], [0.25]], dtype=torch.float64),
        "flag": torch.tensor([True, False]),
        "image": torch.tensor([[[1, 2], [3, 255]], [[0, 0], [0, 9]]], dtype=torch.uint8),
    }
    model(leaves)
    assert seen[0].dtype == torch.float32
    assert seen[0].tolist() == [[1, 2, 3, 255, 1, 0.5], [0, 0, 0, 9, 0, 0.25]]


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int8", "uint16", "int16", "int32", "int64"])
def test_a_single_leaf_that_is_not_float32_is_cast(dtype):
    model = build(ObsSpec((ArraySpec("", (3,), dtype),)))
    rows_NF = torch.tensor([[0, 1, 1], [1, 0, 1]])
    cast = model({"": rows_NF.to(getattr(torch, dtype))})
    plain = model({"": rows_NF.float()})
    assert torch.equal(cast.values_N, plain.values_N)


@pytest.mark.parametrize("is_shared", [False, True])
def test_logits_alone_equal_those_of_forward(is_shared):
    model = build(shared_torso=is_shared)
    obs = {"": torch.randn(5, 3)}
    assert torch.equal(model.logits(obs)[0], model(obs).logits[0])


def test_a_shared_torso_feeds_both_heads_and_own_torsos_only_their_own():
    obs = {"": torch.randn(5, 3)}
    shared, separate = build(shared_torso=True), build(shared_torso=False)
    shared(obs).values_N.sum().backward()
    separate(obs).values_N.sum().backward()
    assert shared.policy_torso.layers[0].weight.grad is not None
    assert shared.value_torso is None
    assert separate.policy_torso.layers[0].weight.grad is None
    assert separate.value_torso.layers[0].weight.grad is not None


def test_the_first_policy_is_nearly_uniform_and_the_first_value_is_not_tiny():
    model = build()
    output = model({"": torch.randn(100, 3)})
    assert (output.logits[0].softmax(-1) - 0.25).abs().max() < 0.02
    torch.testing.assert_close(model.value_head.weight.norm(), torch.tensor(1.0))
