"""What all losses share: normal advantages, the clip, an infinite KL that weighs nothing."""

import math

import pytest
import torch
from torch import Tensor

from impala_async.algo.losses import a2c_loss, appo_loss, clipped_surrogate, impala_loss, ppo_loss
from impala_async.algo.terms import ValidRows

nan = math.nan


def rows(mask_TB: Tensor | None = None, shape: tuple[int, int] = (3, 2)) -> ValidRows:
    return ValidRows(torch.zeros(shape[0] + 1, shape[1]), mask_TB, "mean", None)


def test_advantages_of_valid_rows_have_mean_0_and_deviation_1() -> None:
    mask_TB = torch.tensor([[True, False], [True, True], [False, True]])
    advantages_TB = torch.tensor([[1.0, nan], [3.0, 5.0], [1e9, 7.0]])
    got_TB = rows(mask_TB).normalize(advantages_TB)
    # 1, 3, 5, 7: mean 4, deviation sqrt(5).
    want_TB = torch.tensor([[-3.0, 0.0], [-1.0, 1.0], [0.0, 3.0]]) / math.sqrt(5)
    torch.testing.assert_close(got_TB, want_TB, rtol=1e-6, atol=0)
    assert got_TB.dtype == torch.float32
    assert not got_TB[~mask_TB].any()


@pytest.mark.parametrize("number", [0.0, 5.0, 1 / 3, -1e8, 1e-8])
def test_equal_advantages_become_0(number: float) -> None:
    assert not rows(shape=(50, 41)).normalize(torch.full((50, 41), number)).any()


def test_no_valid_row_is_no_nan() -> None:
    nothing = torch.zeros(3, 2, dtype=torch.bool)
    assert not rows(nothing).normalize(torch.full((3, 2), nan)).any()


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(num_rows: int = 6) -> Tensor:
        return torch.randn(num_rows, 4, dtype=torch.float64, generator=generator)

    return {
        "log_probs_TB": -normal().abs(),
        "behaviour_log_probs_TB": -normal().abs(),
        "entropies_TB": normal().abs(),
        "rewards_TB": normal(),
        "discounts_TB": torch.full((6, 4), 0.9, dtype=torch.float64),
        "values_SB": normal(7),
        "mask_TB": torch.rand(6, 4, generator=generator) > 0.3,
    }


@pytest.mark.parametrize("name", ["impala", "appo", "ppo", "a2c"])
def test_normal_advantages_make_the_policy_loss_blind_to_the_scale_of_rewards(name: str) -> None:
    """With values of 0, ten times the rewards are ten times the advantages."""
    tensors = batch() | {"values_SB": torch.zeros(7, 4, dtype=torch.float64)}
    if name == "a2c":
        del tensors["behaviour_log_probs_TB"]
    if name == "appo":
        tensors["target_log_probs_TB"] = tensors["behaviour_log_probs_TB"]
    losses = {"impala": impala_loss, "appo": appo_loss, "ppo": ppo_loss, "a2c": a2c_loss}

    def policy(factor: float, is_normal: bool) -> Tensor:
        scaled = tensors | {"rewards_TB": factor * tensors["rewards_TB"]}
        return losses[name](**scaled, normalize_advantages=is_normal).policy  # type: ignore[operator]

    torch.testing.assert_close(policy(10, True), policy(1, True), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(policy(10, False), 10 * policy(1, False))
    assert not torch.isclose(policy(1, True), policy(1, False))


def test_surrogate_takes_the_worse_of_both() -> None:
    ratios = torch.tensor([0.5, 0.9, 1.1, 2.0])
    up, down = torch.ones(4), -torch.ones(4)
    assert clipped_surrogate(ratios, up, 0.2).tolist() == pytest.approx([-0.5, -0.9, -1.1, -1.2])
    assert clipped_surrogate(ratios, down, 0.2).tolist() == pytest.approx([0.8, 0.9, 1.1, 2.0])
    with pytest.raises(ValueError, match="clip must be at least 0"):
        clipped_surrogate(ratios, up, -0.1)


def test_an_infinite_kl_that_weighs_nothing_leaves_the_loss_finite() -> None:
    tensors = batch()
    target = {"target_log_probs_TB": tensors["log_probs_TB"], "kl_TB": torch.full((6, 4), math.inf)}
    got = appo_loss(**tensors, **target, kl_coeff=0.0)
    assert got.kl == math.inf
    assert got.total.isfinite()
    assert appo_loss(**tensors, **target, kl_coeff=1e-9).total == math.inf
