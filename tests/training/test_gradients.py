"""Gradients of a batch's loss, whatever step is taken with them."""

import dataclasses
import math
from typing import NamedTuple

import pytest
import torch

from impala_async.training.algorithms import Target, make_algorithm
from impala_async.training.gradients import Coefficients, TorchGradients

WHOLE = Coefficients(entropy_cost=0.02, reward_factor=0.5, kl_coeff=0.0)


class Made(NamedTuple):
    compute: TorchGradients
    parameters: tuple
    target: Target | None


@pytest.fixture
def make_gradients(make_step):
    """Those of a policy that begins alike each time."""

    def make(has_target=False, **settings):
        step = make_step(**settings)
        policy, section = step.policy, step.section
        target = Target(policy, section) if has_target else None
        algorithm = make_algorithm(section)
        compute = TorchGradients(
            policy, section, algorithm, step.parameters, target=target, intrinsic=None
        )
        return Made(compute, step.parameters, target)

    return make


def found(gradients, batch, of=WHOLE, *, with_sums=False):
    numbers, names = gradients.compute(batch, of, with_sums=with_sums)
    return numbers, names, [each.grad.clone() for each in gradients.parameters]


def test_the_numbers_of_a_batch_are_loss_norm_valid_rows_and_statistics(make_gradients, make_batch):
    batch = make_batch()
    numbers, names, grads = found(make_gradients(), batch)
    told = dict(zip(names, numbers[3:].tolist(), strict=True))
    parts = sum(told[f"loss/{part}"] for part in ("policy", "value", "entropy"))
    norm = math.sqrt(sum(float(grad.square().sum()) for grad in grads))
    assert numbers[:3].tolist() == pytest.approx([parts, norm, float(batch.mask_BT.sum())])
    # They replace those of the batch before.
    gradients = make_gradients()
    found(gradients, make_batch(seed=1))
    for mine, theirs in zip(found(gradients, batch)[2], grads, strict=True):
        assert torch.equal(mine, theirs)


def test_the_sums_of_the_targets_come_last_and_wide(make_gradients, make_batch):
    batch = make_batch()
    plain, names, _ = found(make_gradients(), batch)
    numbers, same_names, _ = found(make_gradients(), batch, with_sums=True)
    assert (len(numbers), numbers.dtype, same_names) == (len(plain) + 3, torch.float64, names)
    count, total, total_square = numbers[-3:].tolist()
    assert count == float(batch.mask_BT.sum())
    assert total_square >= total**2 / count > 0


def test_parts_with_the_valid_rows_of_all_add_up_to_the_whole(make_gradients, make_batch):
    batch = make_batch()
    whole = found(make_gradients(), batch)[2]
    of_all = WHOLE._replace(num_valid=float(batch.mask_BT.sum()))
    parts = [
        found(make_gradients(), batch.take(torch.tensor(columns)), of_all)[2]
        for columns in ([0, 3], [1, 2, 4])
    ]
    for one, other, both in zip(*parts, whole, strict=True):
        torch.testing.assert_close(one + other, both, rtol=1e-4, atol=1e-7)


def test_only_a_termination_ends_the_discount_and_rewards_are_clipped_before_they_are_scaled(
    make_gradients, make_batch
):
    batch = make_batch()
    rewards_BT = torch.full_like(batch.rewards_BT, 3.0)
    batch = dataclasses.replace(batch, rewards_BT=rewards_BT)
    rows = make_gradients(gamma=0.9, reward_clip=2.0).compute.transitions(batch, WHOLE)
    assert batch.terminated_BT.any()
    ends_TB = rows["discounts_TB"] == 0
    assert torch.equal(ends_TB, batch.terminated_BT.t())
    assert rows["discounts_TB"][~ends_TB].unique().tolist() == pytest.approx([0.9])
    assert rows["rewards_TB"].unique().tolist() == [1.0]


def test_a_target_network_is_looked_at_and_learns_nothing(make_gradients, make_batch):
    gradients = make_gradients(has_target=True, name="appo", kl_coeff=0.3)
    numbers, names, _ = found(gradients, make_batch(), WHOLE._replace(kl_coeff=0.3))
    told = dict(zip(names, numbers[3:].tolist(), strict=True))
    assert told["policy/kl"] == pytest.approx(0.0, abs=1e-6)
    assert all(weight.grad is None for weight in gradients.target.model.parameters())
    assert gradients.compute.view(make_batch(), WHOLE).target is not None
