"""Rewards before the loss: they are clipped as published, and scaled as the returns are."""

import json
import math

import pytest
import torch

from impala_async.training.rewards import ReturnScale, clip_rewards, scale_of, sums_of


def sums(targets, mask=None):
    targets_TB = torch.as_tensor(targets, dtype=torch.float32).reshape(-1, 1)
    mask_TB = torch.ones_like(targets_TB) > 0 if mask is None else torch.tensor(mask).reshape(-1, 1)
    return sums_of(targets_TB, mask_TB).tolist()


def scale_after(*batches, times=1):
    """Each batch is a pair of targets and what their rewards were divided by."""
    scale = ReturnScale()
    for _ in range(times):
        for targets, divisor in batches:
            scale.add([sums(targets)], divisor)
    return scale


def test_clips_are_the_published_ones():
    rewards = torch.tensor([-30.0, -0.5, 0.0, 0.5, 30.0])
    assert clip_rewards(rewards, None) is rewards
    assert clip_rewards(rewards, "unit").tolist() == [-1, -0.5, 0, 0.5, 1]
    half = math.tanh(0.5)
    wanted = [-0.3, -0.3 * half, 0, 5 * half, 5]
    assert clip_rewards(rewards, "soft_asymmetric").tolist() == pytest.approx(wanted, rel=1e-6)


def test_sums_are_of_valid_targets_and_those_of_parts_add_up():
    whole = sums([1.0, 3.0, 5.0, 7.0])
    assert whole == [4, 16, 84]
    assert scale_of(whole) == pytest.approx(math.sqrt(5))
    one, other = ReturnScale(), ReturnScale()
    one.add([whole], 3.0)
    other.add([sums([1.0, math.nan, 3.0], [True, False, True]), sums([5.0, 7.0])], 3.0)
    assert one.state() == other.state()


def test_without_any_target_the_scale_is_one():
    scale = ReturnScale()
    scale.add([], 1.0)
    scale.add([[0.0, 0.0, 0.0]], 1.0)
    assert scale.weight == 0
    assert scale.scale == scale_of([0.0, 0.0, 0.0]) == 1


def test_the_first_batches_count_alike_and_later_ones_move_it_slowly():
    """Corrected for its start at zero: the plain deviation of two batches, nearly."""
    scale = scale_after(([0.0, 4.0], 1.0))
    assert scale.scale == pytest.approx(2)
    scale.add([sums([0.0, 8.0])], 1.0)
    # Weights 0.99 and 1: the square of the mean is off by less than a hundredth.
    mean, mean_square = (2 * 0.99 + 4) / 1.99, (8 * 0.99 + 32) / 1.99
    assert scale.scale == pytest.approx(math.sqrt(mean_square - mean**2), rel=1e-9)
    scale = scale_after(([-1.0, 1.0], 1.0), times=300)
    scale.add([sums([-100.0, 100.0])], 1.0)
    assert 1 < scale.scale < 15
    for _ in range(1500):
        scale.add([sums([-100.0, 100.0])], 1.0)
    assert scale.scale == pytest.approx(100, rel=1e-3)


def test_an_absurd_batch_is_forgotten_and_a_new_size_is_followed():
    scale = scale_after(([-1.0, 1.0], 1.0), times=200)
    scale.add([sums([0.0, 1e15])], 1.0)
    assert 1 < scale.scale < 4
    for _ in range(300):
        scale.add([sums([-1.0, 1.0])], 1.0)
    assert scale.scale == pytest.approx(1, rel=0.3)
    for _ in range(10):
        scale.add([sums([-1000.0, 1000.0])], 1.0)
    assert scale.scale > 100
    # Returns after none at all are believed at once.
    sparse = scale_after(([0.0, 0.0], 1.0), times=200)
    sparse.add([sums([0.0, 1000.0])], 1.0)
    assert sparse.scale > 10


def test_it_has_bounds_below_and_above_whatever_it_is_fed():
    """It may be fed its own output, by values that have gone astray."""
    assert scale_after(([500.0] * 4, 1.0), times=1000).scale == pytest.approx(50)
    assert scale_after(([0.0] * 4, 1.0), times=1000).scale == 0.01
    assert scale_of([1.0, 1e200, 1e300]) == 1e15
    for size in (1e9, 1e30, 3e38, math.inf, math.nan):
        scale = ReturnScale()
        for _ in range(50):
            scale.add([sums([-size, 2 * size, 0.0])], scale.scale)
        assert 0.01 <= scale.scale <= 1e15, size
        json.dumps(scale.state(), allow_nan=False)
        for _ in range(5000):
            scale.add([sums([-1 / scale.scale, 1 / scale.scale])], scale.scale)
        assert scale.scale < 1e5, size
    # So that the update that would use it is skipped.
    for targets in ([math.inf, 1.0], [math.nan, 1.0], [math.inf, -math.inf]):
        assert math.isnan(scale_of(sums(targets)))
