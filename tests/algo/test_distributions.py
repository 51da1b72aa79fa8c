"""Categorical against torch.distributions, and its draws against their probabilities."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from impala_async.algo.distributions import Categorical, Distribution

LEADING = st.sampled_from([(), (1,), (7,), (3, 4)])


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_fits_the_protocol() -> None:
    def num_actions(distribution: Distribution) -> int:
        return distribution.sample().numel()

    assert num_actions(Categorical(torch.zeros(5, 3))) == 5


@settings(deadline=None, max_examples=60)
@given(
    leading=LEADING,
    num_actions=st.integers(1, 6),
    scale=st.sampled_from([0.0, 1.0, 30.0]),
    seed=st.integers(0, 10**6),
)
def test_agrees_with_torch(
    leading: tuple[int, ...], num_actions: int, scale: float, seed: int
) -> None:
    logits_A, other_A = scale * normal(2, *leading, num_actions, seed=seed)
    ours, theirs = Categorical(logits_A), torch.distributions.Categorical(logits=logits_A)
    actions = normal(*leading, num_actions, seed=seed + 1).argmax(-1)
    torch.testing.assert_close(ours.log_prob(actions), theirs.log_prob(actions))
    torch.testing.assert_close(ours.entropy(), theirs.entropy())
    assert torch.equal(ours.mode(), logits_A.argmax(-1))
    kl = torch.distributions.kl_divergence(theirs, torch.distributions.Categorical(logits=other_A))
    torch.testing.assert_close(ours.kl(Categorical(other_A)), kl)


@pytest.mark.parametrize("num_actions", [2, 5])
def test_literal_uniform(num_actions: int) -> None:
    uniform = Categorical(torch.full((3, num_actions), 7.0))
    certain = Categorical(torch.eye(num_actions)[:1].mul(1e4).expand(3, -1))
    n = torch.full((3,), float(num_actions))
    torch.testing.assert_close(uniform.log_prob(torch.tensor([0, 1, 1])), -n.log())
    torch.testing.assert_close(uniform.entropy(), n.log())
    assert certain.entropy().tolist() == [0, 0, 0]
    torch.testing.assert_close(certain.kl(uniform), n.log())
    torch.testing.assert_close(uniform.kl(certain), 1e4 * (1 - 1 / n) - n.log())


def test_samples_have_their_probabilities() -> None:
    probs_A = torch.tensor([0.5, 0.3, 0.15, 0.05])
    num_draws = 40_000
    draws = Categorical(probs_A.log().expand(num_draws, 4)).sample(torch.Generator().manual_seed(3))
    counts = torch.bincount(draws, minlength=4)
    deviation = (num_draws * probs_A * (1 - probs_A)).sqrt()
    assert ((counts - num_draws * probs_A).abs() < 4 * deviation).all()


def test_samples_of_different_rows_are_independent() -> None:
    draws = Categorical(torch.zeros(20_000, 2, 2)).sample(torch.Generator().manual_seed(4))
    assert abs((draws[:, 0] == draws[:, 1]).float().mean().item() - 0.5) < 4 * 0.5 / 20_000**0.5


def test_the_generator_alone_drives_sampling() -> None:
    distribution = Categorical(normal(64, 6))
    before = torch.get_rng_state()
    first = distribution.sample(torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(1)
    assert torch.equal(distribution.sample(generator), first)
    assert not torch.equal(distribution.sample(generator), first)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert torch.equal(distribution.sample(), first)


def test_impossible_actions_are_never_drawn() -> None:
    logits_A = torch.tensor([-math.inf, 0.0, -math.inf, -8.0, -1e30])
    draws = Categorical(logits_A.expand(50_000, 5)).sample(torch.Generator().manual_seed(5))
    assert set(draws.tolist()) == {1, 3}


@pytest.mark.parametrize("excluded", [-math.inf, -1e30])
def test_impossible_actions_cost_nothing(excluded: float) -> None:
    logits_A = torch.tensor([0.3, excluded, -1.2], dtype=torch.float64, requires_grad=True)
    other_A = torch.tensor([0.1, excluded, 0.9], dtype=torch.float64, requires_grad=True)
    allowed = torch.tensor([0, 2])
    masked, other = Categorical(logits_A), Categorical(other_A)
    plain, plain_other = Categorical(logits_A[allowed]), Categorical(other_A[allowed])
    for got, want in (
        (masked.entropy(), plain.entropy()),
        (masked.kl(other), plain.kl(plain_other)),
        (masked.log_prob(torch.tensor(2)), plain.log_prob(torch.tensor(1))),
    ):
        torch.testing.assert_close(got, want)
        gradients = [
            torch.autograd.grad(term, (logits_A, other_A), retain_graph=True, allow_unused=True)
            for term in (got, want)
        ]
        for one, reference in zip(*gradients, strict=True):
            assert (one is None) == (reference is None)
            if one is not None:
                torch.testing.assert_close(one, reference)
                assert one[1] == 0


def test_kl_to_an_excluding_distribution_is_infinite() -> None:
    wide, narrow = Categorical(torch.zeros(2)), Categorical(torch.tensor([0.0, -math.inf]))
    assert wide.kl(narrow).item() == math.inf
    assert narrow.kl(wide).item() == pytest.approx(math.log(2))


def test_gradients_are_those_of_the_functions() -> None:
    logits_A = normal(3, 4, seed=1).requires_grad_()
    other_A = normal(3, 4, seed=2).requires_grad_()
    actions = torch.tensor([0, 3, 1])
    torch.autograd.gradcheck(lambda x: Categorical(x).log_prob(actions), logits_A)
    torch.autograd.gradcheck(lambda x: Categorical(x).entropy(), logits_A)
    torch.autograd.gradcheck(lambda x, y: Categorical(x).kl(Categorical(y)), (logits_A, other_A))


def test_sampling_and_the_mode_leave_the_graph_alone() -> None:
    distribution = Categorical(normal(5, 3).requires_grad_())
    assert not distribution.sample().requires_grad
    assert not distribution.mode().requires_grad
    distribution.entropy().sum().backward()


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_low_precision_logits_are_upcast_before_anything(low: torch.dtype) -> None:
    logits_A = normal(6, 5).to(low)
    actions = torch.arange(6, dtype=torch.int32) % 5
    ours, upcast = Categorical(logits_A), Categorical(logits_A.float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under_autocast = Categorical(logits_A).log_prob(actions)
    for got, want in (
        (ours.log_prob(actions), upcast.log_prob(actions)),
        (under_autocast, upcast.log_prob(actions)),
        (ours.entropy(), upcast.entropy()),
        (ours.kl(upcast), torch.zeros(6)),
    ):
        assert got.dtype == torch.float32
        assert torch.equal(got, want)


def test_log_probs_of_distant_logits_stay_finite() -> None:
    distribution = Categorical(torch.tensor([[1e4, -1e4, 0.0]]))
    assert distribution.log_prob(torch.tensor([1])).tolist() == [-2e4]
    assert distribution.log_prob(torch.tensor([0])).tolist() == [0.0]
    assert distribution.entropy().tolist() == [0.0]


def test_nan_is_not_hidden() -> None:
    broken = Categorical(torch.tensor([0.0, math.nan]))
    fine = Categorical(torch.zeros(2))
    terms = broken.entropy(), broken.log_prob(torch.tensor(0)), broken.kl(fine), fine.kl(broken)
    assert all(term.isnan() for term in terms)
