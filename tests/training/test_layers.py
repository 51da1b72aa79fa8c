"""Layers over numpy compute what torch does, and their gradients are autograd's."""

import numpy as np
import pytest
import torch

from impala_async.config.model import ModelSection
from impala_async.policy import Policy
from impala_async.training.layers import Net, row_sums


@pytest.mark.parametrize("model", [{}, {"shared_torso": True, "activation": "relu"}])
def test_outputs_and_gradients_are_those_of_torch(schema, make_batch, model):
    network = Policy(schema, ModelSection.model_validate(model), seed=3).model
    net, batch, rng = Net(network), make_batch(), np.random.default_rng(0)
    found = net.forward(batch)
    rows = {name: leaf.flatten(0, 1) for name, leaf in batch.rows_of_obs().items()}
    outputs_NP, values_N = network(rows)
    expected = outputs_NP, values_N.unsqueeze(-1)
    gradients = [rng.normal(size=each.shape).astype(np.float32) for each in found]
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, theirs.detach().numpy(), rtol=1e-5, atol=1e-6)
    torch.autograd.backward(expected, [torch.from_numpy(each) for each in gradients])
    theirs = {name: weight.grad for name, weight in network.named_parameters()}
    network.zero_grad()
    net.backward(*(each.copy() for each in gradients))
    for name, weight in network.named_parameters():
        torch.testing.assert_close(weight.grad, theirs[name], rtol=1e-4, atol=1e-5)


def test_rows_are_added_up():
    rows_NA = np.arange(12, dtype=np.float32).reshape(3, 4)
    np.testing.assert_array_equal(row_sums(rows_NA), rows_NA.sum(1))
