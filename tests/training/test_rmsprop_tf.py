"""RMSProp as TensorFlow 1 computed it, against numbers worked out by hand."""

import math

import pytest
import torch

from impala_async.training.rmsprop_tf import RMSPropTF


def steps(optimizer, weight, gradients):
    found = []
    for gradient in gradients:
        weight.grad = torch.full_like(weight, gradient)
        optimizer.step()
        found.append(weight.item())
    return found


def test_by_hand_without_momentum():
    """decay 0.9, eps 0.1: ms = 0.9 + 0.1 * 4 = 1.3, then 0.9 * 1.3 + 0.1 * 1 = 1.27."""
    weight = torch.nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
    optimizer = RMSPropTF([weight], lr=0.5, decay=0.9, eps=0.1)
    first = 1 - 0.5 * 2 / math.sqrt(1.4)
    second = first + 0.5 * 1 / math.sqrt(1.37)
    assert steps(optimizer, weight, [2.0, -1.0]) == pytest.approx([first, second], rel=1e-12)


def test_by_hand_with_momentum_and_a_rate_that_changes():
    """A rate is in the momentum from when its gradient came: TF1, not torch."""
    weight = torch.nn.Parameter(torch.tensor(0.0, dtype=torch.float64))
    optimizer = RMSPropTF([weight], lr=0.5, decay=0.9, eps=0.1, momentum=0.8)
    moment = 0.5 * 2 / math.sqrt(1.4)
    assert steps(optimizer, weight, [2.0]) == pytest.approx([-moment], rel=1e-12)
    optimizer.param_groups[0]["lr"] = 0.25
    second = 0.8 * moment - 0.25 * 1 / math.sqrt(1.37)
    assert steps(optimizer, weight, [-1.0]) == pytest.approx([-moment - second], rel=1e-12)


def test_a_parameter_without_gradient_stays_as_it_is():
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = RMSPropTF(weights, lr=0.5)
    optimizer.step()
    weights[0].grad = torch.ones(2)
    optimizer.step()
    assert (weights[0] < 1).all()
    assert (weights[1] == 1).all()
    assert len(optimizer.state) == 1


def test_a_closure_is_called_with_gradients_on():
    weight = torch.nn.Parameter(torch.tensor(3.0))
    optimizer = RMSPropTF([weight], lr=0.5)

    def closure():
        loss = weight.square()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 9.0
    assert weight < 3
