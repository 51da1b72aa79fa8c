"""APPO's surrogate against a table computed by hand, one case of the clip per line."""

import math

import pytest
import torch
from torch import Tensor

from impala_async.algo.losses import appo_loss


def column(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64).unsqueeze(1)


def transition(pi: float, mu: float, target: float, reward: float) -> dict[str, Tensor]:
    """One row that ends its episode, value 0: the advantage is min(1, target / mu) * reward."""
    return {
        "log_probs_TB": column(math.log(pi)).requires_grad_(),
        "behaviour_log_probs_TB": column(math.log(mu)),
        "target_log_probs_TB": column(math.log(target)),
        "entropies_TB": column(0.5),
        "values_SB": column(0, 0),
        "rewards_TB": column(reward),
        "discounts_TB": column(0),
    }


# (pi, mu, target, reward): clip(mu / target, 0, 2) * pi / mu = ratio; surrogate
APPO_TABLE = [
    (0.50, 0.50, 0.50, 2.0, -2.0),  # ratio 1, advantage 2
    (0.55, 0.50, 0.50, 2.0, -2.2),  # ratio 1.1 within the clip
    (0.80, 0.50, 0.50, 2.0, -2.4),  # ratio 1.6, clipped to 1.2
    (0.80, 0.50, 0.50, -2.0, 3.2),  # ratio 1.6, negative advantage: not clipped
    (0.20, 0.50, 0.50, -2.0, 1.6),  # ratio 0.4, clipped to 0.8
    (0.20, 0.50, 0.50, 2.0, -0.8),  # ratio 0.4, positive advantage: not clipped
    (0.40, 0.40, 0.50, 2.0, -1.6),  # weight 0.8, advantage min(1, 1.25) * 2
    (0.60, 0.80, 0.20, 2.0, -0.6),  # weight 4 clipped to 2, ratio 1.5 to 1.2, advantage 0.5
    (0.60, 0.80, 0.20, -2.0, 0.75),  # the same, not clipped: 1.5 * -0.5
]


@pytest.mark.parametrize(("pi", "mu", "target", "reward", "surrogate"), APPO_TABLE)
def test_surrogate_by_hand(
    pi: float, mu: float, target: float, reward: float, surrogate: float
) -> None:
    got = appo_loss(**transition(pi, mu, target, reward))
    advantage = min(1, target / mu) * reward
    assert got.policy.item() == pytest.approx(surrogate, rel=1e-12)
    assert got.value.item() == pytest.approx(0.25 * advantage**2, rel=1e-12)
    assert got.entropy.item() == pytest.approx(-0.005, rel=1e-12)


def test_takes_returns_of_the_target_network_and_adds_kl() -> None:
    """pi_target / mu = 2, 1/2, 1 on the rows of test_vtrace, and pi = 1.1 pi_target.

    Targets 2.625, 3.25, 5, advantages 1.625, 1.25, 2; squared errors sum to 8.203125.
    """
    target_TB = column(-1, -2, -3)
    rows = {
        "log_probs_TB": target_TB + math.log(1.1),
        "behaviour_log_probs_TB": target_TB + column(-math.log(2), math.log(2), 0),
        "target_log_probs_TB": target_TB,
        "entropies_TB": column(0.5, 0.25, 0.75),
        "rewards_TB": column(1, 2, 3),
        "discounts_TB": column(0.5, 0.5, 0.5),
        "values_SB": column(1, 2, 3, 4),
    }
    kl_TB = column(0.1, 0.2, 0.6)
    got = appo_loss(**rows, kl_TB=kl_TB, kl_coeff=2.0)
    # mu / pi_target = 1/2, 2, 1, all within is_clip: every ratio is pi / pi_target = 1.1.
    assert got.policy.item() == pytest.approx(-1.1 * (1.625 + 1.25 + 2) / 3, rel=1e-12)
    assert got.value.item() == pytest.approx(0.25 * 8.203125 / 3, rel=1e-12)
    assert got.kl.item() == pytest.approx(0.3, rel=1e-12)
    weighted = got.policy + got.value + got.entropy
    assert got.total.item() == pytest.approx(weighted.item() + 0.6, rel=1e-12)
    assert appo_loss(**rows).kl.item() == 0
    narrow = appo_loss(**rows, clip=0.05, is_clip=1.5)
    # The second weight 2 becomes 1.5: ratios 1.1, 0.825, 1.1, and 1.1 is clipped to 1.05.
    policy = -(1.05 * 1.625 + 0.825 * 1.25 + 1.05 * 2) / 3
    assert narrow.policy.item() == pytest.approx(policy, rel=1e-12)


@pytest.mark.parametrize("reward", [-2.0, 2.0])
@pytest.mark.parametrize("pi", [0.2, 0.8])
def test_stops_pushing_beyond_the_clip(reward: float, pi: float) -> None:
    rows = transition(pi, 0.5, 0.5, reward)
    appo_loss(**rows).total.backward()
    is_beyond = (pi > 0.5) == (reward > 0)
    gradient = rows["log_probs_TB"].grad
    assert gradient is not None
    assert gradient.item() == pytest.approx(0.0 if is_beyond else -reward * pi / 0.5, rel=1e-12)


def test_multiplies_two_extreme_factors_exactly() -> None:
    """mu / pi_target = e^-30 and pi / mu = e^30.1: the ratio is pi / pi_target = e^0.1."""
    rows = transition(math.exp(-0.1), math.exp(-30.2), math.exp(-0.2), 1.0)
    policy = appo_loss(**rows).policy
    policy.backward()
    gradient = rows["log_probs_TB"].grad
    assert gradient is not None
    assert policy.item() == pytest.approx(-math.exp(0.1), rel=1e-12)
    assert gradient.item() == pytest.approx(-math.exp(0.1), rel=1e-12)


@pytest.mark.parametrize(
    ("setting", "culprit"),
    [
        ({"clip": -0.1}, "clip"),
        ({"clip": math.nan}, "clip"),
        ({"is_clip": 0.0}, "is_clip"),
        ({"is_clip": math.nan}, "is_clip"),
        ({"kl_coeff": 1.0}, "kl_TB"),
    ],
)
def test_senseless_settings_are_refused(setting: dict[str, float], culprit: str) -> None:
    with pytest.raises(ValueError, match=culprit):
        appo_loss(**transition(0.5, 0.5, 0.5, 1.0), **setting)
