"""PPO and A2C against plain loops in float64, and what must not reach them."""

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from impala_async.algo.losses import a2c_loss, impala_loss, ppo_loss
from impala_async.algo.terms import LossTerms

nan = math.nan
Loss = Callable[..., LossTerms]


def random_tensors(seed: int, masked_rate: float = 0.3) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(num_rows: int = 6) -> Tensor:
        return torch.randn(num_rows, 4, dtype=torch.float64, generator=generator)

    return {
        "log_probs_TB": -normal().abs(),
        "behaviour_log_probs_TB": -normal().abs(),
        "entropies_TB": normal().abs(),
        "rewards_TB": normal(),
        "discounts_TB": 0.9 * (torch.rand(6, 4, generator=generator) > 0.2).double(),
        "values_SB": normal(7),
        "mask_TB": torch.rand(6, 4, generator=generator) >= masked_rate,
    }


def returns_by_hand(
    tensors: dict[str, Tensor], kind: str, lambda_: float, bars: tuple[float, float]
) -> dict[tuple[int, int], tuple[float, float]]:
    """Target and advantage of every valid row."""
    found = {}
    for column in range(4):
        acc, next_target = 0.0, tensors["values_SB"][6, column].item()
        for row in reversed(range(6)):
            value, next_value = tensors["values_SB"][row : row + 2, column].tolist()
            if not tensors["mask_TB"][row, column]:
                acc, next_target = 0.0, value
                continue
            reward = tensors["rewards_TB"][row, column].item()
            discount = tensors["discounts_TB"][row, column].item()
            delta = reward + discount * next_value - value
            if kind == "gae":
                acc = delta + discount * lambda_ * acc
                advantage = acc
            else:
                log_rho = tensors["log_probs_TB"] - tensors["behaviour_log_probs_TB"]
                rho = math.exp(log_rho[row, column].item())
                acc = min(bars[0], rho) * delta + discount * lambda_ * min(bars[1], rho) * acc
                advantage = reward + discount * next_target - value
            next_target = value + acc
            found[row, column] = (next_target, advantage)
    return found


def loss_by_hand(
    name: str, tensors: dict[str, Tensor], kind: str, is_normal: bool, bars: tuple[float, float]
) -> tuple[float, float, float]:
    found = returns_by_hand(tensors, kind, 0.8, bars)
    count = len(found)
    mean = sum(advantage for _, advantage in found.values()) / count
    deviation = math.sqrt(sum((a - mean) ** 2 for _, a in found.values()) / count)
    policy = value = entropy = 0.0
    for (row, column), (target, advantage) in found.items():
        if is_normal:
            advantage = (advantage - mean) / deviation
        log_prob = tensors["log_probs_TB"][row, column].item()
        if name == "ppo":
            ratio = math.exp(log_prob - tensors["behaviour_log_probs_TB"][row, column].item())
            clipped = min(max(ratio, 0.7), 1.3)
            policy -= min(ratio * advantage, clipped * advantage)
        else:
            policy -= log_prob * advantage
        value += 0.5 * 0.6 * (target - tensors["values_SB"][row, column].item()) ** 2
        entropy -= 0.05 * tensors["entropies_TB"][row, column].item()
    return policy / count, value / count, entropy / count


def run(name: str, tensors: dict[str, Tensor], **settings: Any) -> LossTerms:
    if name == "ppo":
        return ppo_loss(**tensors, **settings)
    return a2c_loss(**{k: v for k, v in tensors.items() if "behaviour" not in k}, **settings)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("is_normal", [True, False])
@pytest.mark.parametrize(("name", "kind"), [("ppo", "gae"), ("ppo", "vtrace"), ("a2c", "gae")])
def test_losses_are_those_of_plain_loops(name: str, kind: str, is_normal: bool, seed: int) -> None:
    tensors, bars = random_tensors(seed), (1.3, 0.8)
    settings: dict[str, Any] = {"value_cost": 0.6, "entropy_cost": 0.05, "lambda_": 0.8}
    if name == "ppo":
        settings |= {"clip": 0.3, "returns": kind, "rho_bar": bars[0], "c_bar": bars[1]}
    got = run(name, tensors, normalize_advantages=is_normal, **settings)
    want = loss_by_hand(name, tensors, kind, is_normal, bars)
    for term, number in zip(got, want, strict=False):
        assert term.item() == pytest.approx(number, rel=1e-6)
    assert got.kl.item() == 0
    assert got.total.item() == pytest.approx(sum(want), rel=1e-6)


EACH = pytest.mark.parametrize(
    ("name", "settings"), [("ppo", {}), ("ppo", {"returns": "vtrace"}), ("a2c", {})]
)


@EACH
def test_nan_in_masked_rows_and_behind_ends_changes_nothing(
    name: str, settings: dict[str, Any]
) -> None:
    clean = random_tensors(7)
    mask_TB = clean["mask_TB"]
    dirty = {
        key: torch.where(mask_TB, tensor, nan) if key.endswith("_TB") else tensor.clone()
        for key, tensor in clean.items()
        if key != "mask_TB"
    } | {"mask_TB": mask_TB}
    is_seen_SB = torch.zeros(7, 4, dtype=torch.bool)
    is_seen_SB[:-1] |= mask_TB
    is_seen_SB[1:] |= mask_TB & (clean["discounts_TB"] > 0)
    dirty["values_SB"][~is_seen_SB] = nan
    for tensors in (clean, dirty):
        for key in ("log_probs_TB", "values_SB", "entropies_TB"):
            tensors[key].requires_grad_()
    got, want = run(name, dirty, **settings), run(name, clean, **settings)
    assert all(torch.equal(a, b) for a, b in zip(got[:-1], want[:-1], strict=True))
    assert torch.equal(got.targets_TB[mask_TB], want.targets_TB[mask_TB])
    got.total.backward()
    want.total.backward()
    for key in ("log_probs_TB", "values_SB", "entropies_TB"):
        assert torch.equal(dirty[key].grad, clean[key].grad)
        gradient = dirty[key].grad if key != "values_SB" else dirty[key].grad[:-1]
        assert not gradient[~mask_TB].any()
    # No gradient flows into the returns.
    assert not dirty["values_SB"].grad[-1].any()


@EACH
def test_a_batch_without_valid_rows_weighs_nothing(name: str, settings: dict[str, Any]) -> None:
    got = run(name, random_tensors(2, masked_rate=1.0), **settings)
    assert [term.item() for term in got[:-1]] == [0] * 6


def test_on_policy_ppo_and_a2c_have_the_same_gradient() -> None:
    tensors = random_tensors(3)
    tensors["behaviour_log_probs_TB"] = tensors["log_probs_TB"].clone()
    gradients = []
    for name in ("ppo", "a2c"):
        tensors["log_probs_TB"].requires_grad_()
        gradients += torch.autograd.grad(run(name, tensors).policy, tensors["log_probs_TB"])
    torch.testing.assert_close(*gradients)


def test_on_policy_returns_of_both_kinds_give_the_same_targets() -> None:
    tensors = random_tensors(4)
    tensors["behaviour_log_probs_TB"] = tensors["log_probs_TB"]
    values = [run("ppo", tensors, returns=kind, lambda_=0.9).value for kind in ("gae", "vtrace")]
    torch.testing.assert_close(*values)


def test_v_trace_advantages_of_ppo_carry_no_ratio_of_their_own() -> None:
    """IMPALA's have it: at a ratio of 1/2 within the clip both have the same policy gradient."""
    log_probs_TB = torch.full((1, 1), -1.0, dtype=torch.float64).requires_grad_()
    rows = {
        "log_probs_TB": log_probs_TB,
        "behaviour_log_probs_TB": log_probs_TB.detach() + math.log(2),
        "entropies_TB": torch.zeros(1, 1),
        "rewards_TB": torch.full((1, 1), 3.0),
        "discounts_TB": torch.zeros(1, 1),
        "values_SB": torch.zeros(2, 1),
    }
    ppo = ppo_loss(**rows, returns="vtrace", clip=0.9, normalize_advantages=False)
    (mine,) = torch.autograd.grad(ppo.policy, log_probs_TB)
    (theirs,) = torch.autograd.grad(impala_loss(**rows).policy, log_probs_TB)
    assert mine.item() == pytest.approx(-1.5)
    assert theirs.item() == pytest.approx(-1.5)


def test_what_does_not_fit_is_refused() -> None:
    tensors = random_tensors(5)
    for name in ("ppo", "a2c"):
        with pytest.raises(ValueError, match="reduction"):
            run(name, tensors, reduction="median")
        with pytest.raises(ValueError, match="lambda_"):
            run(name, tensors, lambda_=1.5)
        with pytest.raises(ValueError, match="rewards_TB"):
            run(name, tensors | {"rewards_TB": tensors["rewards_TB"][:, :1]})
    with pytest.raises(ValueError, match="clip"):
        run("ppo", tensors, clip=-1.0)


def test_signatures_are_stable() -> None:
    for function in (ppo_loss, a2c_loss):
        parameters = inspect.signature(function).parameters.values()
        assert all(p.kind is p.KEYWORD_ONLY for p in parameters)
        defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        assert (defaults["lambda_"], defaults["normalize_advantages"]) == (0.95, True)
