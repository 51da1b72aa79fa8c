"""Gaussian and squashed numbers against torch.distributions, integrals and their own draws."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from impala_async.algo.distributions import Gaussian, _quadrature
from tests.algo.test_distributions import normal

squashed = partial(Gaussian, is_squashed=True)
Kind = Callable[[Tensor, tuple[int, ...]], Gaussian]
SHAPES = pytest.mark.parametrize("shape", [(), (3,), (2, 3)])


def gaussian_of(
    kind: Kind, leading: tuple[int, ...], shape: tuple[int, ...], seed: int = 0
) -> tuple[Gaussian, Tensor, Tensor]:
    """One, with its means and deviations."""
    num_items = math.prod(shape)
    mean, log_std = 2 * normal(*leading, num_items, seed=seed), normal(*leading, num_items, seed=9)
    log_std = log_std.clamp(-2, 1)
    parameters = torch.cat([mean, log_std], -1)
    return kind(parameters, shape), mean, log_std.exp()


@SHAPES
@pytest.mark.parametrize("leading", [(), (7,), (3, 4)])
def test_numbers_agree_with_torch(leading: tuple[int, ...], shape: tuple[int, ...]) -> None:
    ours, mean, std = gaussian_of(Gaussian, leading, shape)
    other, other_mean, other_std = gaussian_of(Gaussian, leading, shape, seed=5)
    theirs = torch.distributions.Normal(mean, std)
    actions_D = theirs.sample()
    actions = actions_D.reshape(leading + shape)
    torch.testing.assert_close(ours.log_prob(actions), theirs.log_prob(actions_D).sum(-1))
    torch.testing.assert_close(ours.entropy(), theirs.entropy().sum(-1))
    kl = torch.distributions.kl_divergence(
        theirs, torch.distributions.Normal(other_mean, other_std)
    )
    torch.testing.assert_close(ours.kl(other), kl.sum(-1))
    assert torch.equal(ours.mode(), mean.reshape(leading + shape))
    assert ours.sample().shape == actions.shape
    assert not ours.kl(ours).any()


@SHAPES
@pytest.mark.parametrize("leading", [(), (7,), (3, 4)])
def test_squashed_numbers_are_those_of_a_transformed_normal(
    leading: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    ours, mean, std = gaussian_of(squashed, leading, shape)
    theirs = torch.distributions.TransformedDistribution(
        torch.distributions.Normal(mean, std), torch.distributions.TanhTransform(cache_size=1)
    )
    squashed_D = theirs.rsample()
    # What they were before the tanh; an action here is that.
    actions_D = theirs.transforms[0].inv(squashed_D)
    log_probs = theirs.log_prob(squashed_D).sum(-1)
    torch.testing.assert_close(ours.log_prob(actions_D.reshape(leading + shape)), log_probs)
    assert ours.sample().shape == (*leading, *shape)
    plain = gaussian_of(Gaussian, leading, shape)[0]
    other = gaussian_of(squashed, leading, shape, seed=5)[0]
    torch.testing.assert_close(
        ours.kl(other), plain.kl(gaussian_of(Gaussian, leading, shape, 5)[0])
    )


def squashed_entropy(mean: float, std: float) -> float:
    """-∫ p(y) log p(y) dy, over what the tanh makes: numerically."""
    points = torch.linspace(mean - 12 * std, mean + 12 * std, 200_001, dtype=torch.float64)
    center, deviation = torch.tensor([mean, std], dtype=torch.float64)
    log_density = torch.distributions.Normal(center, deviation).log_prob(points)
    slope = 2 * (math.log(2) - points - torch.nn.functional.softplus(-2 * points))
    return -torch.trapezoid(log_density.exp() * (log_density - slope), points).item()


@pytest.mark.parametrize("mean", [0.0, 0.5, -2.0, 8.0])
@pytest.mark.parametrize(
    ("std", "error"), [(1e-3, 1e-9), (0.3, 1e-6), (1.0, 5e-5), (2.0, 5e-3), (7.0, 0.25)]
)
def test_the_entropy_of_squashed_numbers(mean: float, std: float, error: float) -> None:
    parameters = torch.tensor([mean, math.log(std)], dtype=torch.float64)
    entropy = squashed(parameters, ()).entropy().item()
    assert entropy == pytest.approx(squashed_entropy(mean, std), abs=error)


def test_the_entropy_of_squashed_numbers_is_the_mean_of_their_surprise() -> None:
    parameters = torch.tensor([0.7, -0.2, -0.3, 0.2], dtype=torch.float64)
    distribution = squashed(parameters.expand(200_000, 4), (2,))
    draws = distribution.sample(torch.Generator().manual_seed(2))
    surprise = -distribution.log_prob(draws)
    error = 4 * (surprise.std() / len(surprise) ** 0.5).item()
    assert surprise.mean().item() == pytest.approx(distribution.entropy()[0].item(), abs=error)


@pytest.mark.parametrize("kind", [Gaussian, squashed])
def test_draws_have_their_mean_and_deviation(kind: Kind) -> None:
    parameters = torch.tensor([1.5, -2.0, 0.5, -1.0]).expand(40_000, 4)
    draws = kind(parameters, (2,)).sample(torch.Generator().manual_seed(7))
    for item, (mean, std) in enumerate([(1.5, math.exp(0.5)), (-2.0, math.exp(-1.0))]):
        assert draws[:, item].mean().item() == pytest.approx(mean, abs=4.5 * std / 200)
        assert draws[:, item].std().item() == pytest.approx(std, rel=0.02)


@pytest.mark.parametrize("kind", [Gaussian, squashed])
def test_gradients_of_numbers_are_those_of_the_functions(kind: Kind) -> None:
    parameters = normal(3, 4, seed=1).requires_grad_()
    other = normal(3, 4, seed=2).requires_grad_()
    actions = normal(3, 2, seed=3)
    check = torch.autograd.gradcheck
    assert check(lambda x: kind(x, (2,)).log_prob(actions), parameters)
    assert check(lambda x: kind(x, (2,)).entropy(), parameters)
    assert check(lambda x, y: kind(x, (2,)).kl(kind(y, (2,))), (parameters, other))


@pytest.mark.parametrize("kind", [Gaussian, squashed])
@pytest.mark.parametrize("far", [30.0, 1e3, 1e6])
@pytest.mark.parametrize("sign", [1, -1])
def test_numbers_far_from_0_keep_finite_gradients(kind: Kind, far: float, sign: int) -> None:
    parameters = torch.tensor([sign * far, 0.0], requires_grad=True)
    distribution = kind(parameters, ())
    action = torch.tensor(sign * far + 0.5)
    (distribution.log_prob(action) + distribution.entropy()).backward()
    assert parameters.grad is not None
    assert parameters.grad.isfinite().all()


@pytest.mark.parametrize(("log_std", "bound"), [(-50.0, -10.0), (9.0, 2.0)])
def test_a_deviation_out_of_range_is_brought_back_by_its_gradient(
    log_std: float, bound: float
) -> None:
    for wish in (1.0, -1.0):
        parameters = torch.tensor([0.0, log_std], requires_grad=True)
        entropy = Gaussian(parameters, ()).entropy()
        assert entropy.item() == pytest.approx(bound + 0.5 + 0.5 * math.log(2 * math.pi))
        # A wish of 1 makes a step towards more entropy.
        (-wish * entropy).backward()
        assert parameters.grad is not None
        leads_back = wish * log_std < 0
        assert parameters.grad[1].item() == (-wish if leads_back else 0)


def test_a_density_may_be_above_one() -> None:
    assert Gaussian(torch.tensor([0.0, -3.0]), ()).log_prob(torch.tensor(0.0)) > 0


def test_an_entropy_that_was_first_asked_for_in_acting_can_be_trained_on() -> None:
    parameters = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    _quadrature.cache_clear()
    with torch.inference_mode():
        squashed(parameters.detach(), ()).entropy()
    squashed(parameters, ()).entropy().backward()
    assert parameters.grad is not None
