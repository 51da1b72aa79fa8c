"""Action distributions: policy head ─► parameters [..., P] of each part ─► one each ─► Joint

Everything is computed in float32 at least: the behaviour's and the learner's log-probabilities are
divided by each other, and bf16 is too coarse for that.

    A choices of one discrete item, D numbers of a continuous part, C columns, Q points,
    ... leading axes ([B], [T, B]), behind which an action has the part's own shape
"""

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, reduce
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from impala_async.schema import ActionPart

# Deviations beyond would be certain, or at random, for good.
LOG_STD_RANGE = (-10.0, 2.0)
# Nodes and weights, for the mean of a polynomial of degree 2 Q - 1 of a standard normal.
NODES_Q, WEIGHTS_Q = np.polynomial.hermite_e.hermegauss(16)
GAUSS_2Q = np.stack((NODES_Q, WEIGHTS_Q / WEIGHTS_Q.sum()))
HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)
ACTS_AHEAD, NUMBERS_AHEAD = 64, 1 << 18


class Joint:
    """The parts of an action, which are independent: their log-probabilities add up.

    `log_prob`, `entropy` and `kl` return one number per leading index, here and below.
    """

    def __init__(self, parts: Mapping[str, "Distribution"]) -> None:
        self.parts = parts

    def sample(self, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        return {name: part.sample(generator) for name, part in self.parts.items()}

    def mode(self) -> dict[str, Tensor]:
        return {name: part.mode() for name, part in self.parts.items()}

    def log_prob(self, actions: Mapping[str, Tensor]) -> Tensor:
        parts = [part.log_prob(actions[name]) for name, part in self.parts.items()]
        return reduce(operator.add, parts)

    def entropy(self) -> Tensor:
        return reduce(operator.add, [part.entropy() for part in self.parts.values()])

    def kl(self, other: "Joint") -> Tensor:
        """KL(self || other), of distributions of the same parts."""
        others: Mapping[str, Any] = other.parts
        return reduce(operator.add, [part.kl(others[name]) for name, part in self.parts.items()])


class Categorical:
    """Discrete items, each of its own number of choices; a logit of -inf makes one impossible."""

    def __init__(self, logits: Tensor, choices: tuple[int, ...], shape: tuple[int, ...]) -> None:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        self.log_probs_A = _side_by_side(logits, choices).to(dtype).log_softmax(-1)
        self._shape = shape

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """The A choices race: the first of exponential arrival times with these rates wins."""
        # Two to three times faster than `torch.multinomial` for up to 64 draws of a few choices.
        # `exponential_` never gives 0, so an impossible one's 0 / 0 cannot arise.
        rates_A = self.log_probs_A.detach().exp()
        times_A = torch.empty_like(rates_A).exponential_(generator=generator)
        return _shaped(rates_A.div_(times_A).argmax(-1), self._shape)

    def mode(self) -> Tensor:
        return _shaped(self.log_probs_A.argmax(-1), self._shape)

    def log_prob(self, actions: Tensor) -> Tensor:
        items_1 = _flat(actions, self._shape).long().unsqueeze(-1)
        return self.log_probs_A.gather(-1, items_1).sum((-2, -1))

    def entropy(self) -> Tensor:
        probs_A = self.log_probs_A.exp()
        # The 0 * -inf of an impossible choice would be NaN. NaN itself passes through.
        return -(probs_A * torch.where(probs_A == 0, 0.0, self.log_probs_A)).sum((-2, -1))

    def kl(self, other: Self) -> Tensor:
        """KL(self || other), infinite where `other` excludes what self allows."""
        probs_A = self.log_probs_A.exp()
        gaps_A = torch.where(probs_A == 0, 0.0, self.log_probs_A - other.log_probs_A)
        return (probs_A * gaps_A).sum((-2, -1))


class DrawsAhead(torch.Generator):
    """Draws for many acts at once, where each is of one shape: a call of torch takes as long as
    thirty draws, and lets other threads run. They are the same as one by one, but with releases of
    torch that seed each call anew."""

    _shape: tuple[int, ...] = ()
    _times: Iterator[NDArray[np.float32]] = iter(())

    def manual_seed(self, seed: int) -> Self:
        self._times = iter(())
        super().manual_seed(seed)
        return self

    def exponential(self, shape: tuple[int, ...]) -> NDArray[np.float32]:
        times = next(self._times, None) if shape == self._shape else None
        if times is None:
            num_acts = max(1, min(ACTS_AHEAD, NUMBERS_AHEAD // math.prod(shape)))
            drawn = torch.empty((num_acts, *shape)).exponential_(generator=self)
            self._shape, self._times = shape, iter(drawn.numpy())
            times = next(self._times)
        return times


def sample_by_numpy(
    logits_CA: NDArray[np.float32], generator: torch.Generator
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """A draw as `Categorical` makes it of one item, and its log-probability. Changes the logits."""
    logits_CA -= logits_CA.max(-1, keepdims=True)
    rates_CA = np.exp(logits_CA)
    logits_CA -= np.log(rates_CA.sum(-1, keepdims=True))
    if isinstance(generator, DrawsAhead):
        times_CA = generator.exponential(rates_CA.shape)
    else:
        times_CA = torch.empty(rates_CA.shape).exponential_(generator=generator).numpy()
    # The race does not ask for rates that add up to 1.
    rates_CA /= times_CA
    actions_C = rates_CA.argmax(-1)
    return actions_C, logits_CA[np.arange(len(actions_C)), actions_C]


class Gaussian:
    """D independent numbers. A log-probability is a density's: it may be positive.

    Squashed, the numbers go through a tanh before the environment sees them. An action here is
    the number before the tanh: so it has no bound at which its logarithm ends.
    """

    def __init__(
        self, parameters: Tensor, shape: tuple[int, ...], *, is_squashed: bool = False
    ) -> None:
        dtype = torch.promote_types(parameters.dtype, torch.float32)
        self.mean_D, log_std_D = parameters.to(dtype).chunk(2, -1)
        self.log_std_D: Tensor = _Bounded.apply(log_std_D)  # type: ignore[no-untyped-call]
        self._shape = shape
        self._is_squashed = is_squashed

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        noise_D = torch.empty_like(self.mean_D).normal_(generator=generator)
        numbers_D = self.mean_D.detach() + self.log_std_D.detach().exp() * noise_D
        return _shaped(numbers_D, self._shape)

    def mode(self) -> Tensor:
        return _shaped(self.mean_D, self._shape)

    def log_prob(self, actions: Tensor) -> Tensor:
        actions_D = _flat(actions, self._shape).to(self.mean_D.dtype)
        distances_D = (actions_D - self.mean_D) * torch.exp(-self.log_std_D)
        log_probs = -(0.5 * distances_D.square() + self.log_std_D + HALF_LOG_2PI).sum(-1)
        return log_probs - _log_tanh_slope(actions_D).sum(-1) if self._is_squashed else log_probs

    def entropy(self) -> Tensor:
        """Squashed: with the mean logarithm of the slope, by Gauss-Hermite, right to 0.005 for
        deviations up to 2, where actions are long at their bounds."""
        entropy = (self.log_std_D + (0.5 + HALF_LOG_2PI)).sum(-1)
        if not self._is_squashed:
            return entropy
        gauss_2Q = _gauss(self.mean_D.dtype, self.mean_D.device)
        points_DQ = self.mean_D.unsqueeze(-1) + self.log_std_D.exp().unsqueeze(-1) * gauss_2Q[0]
        return entropy + (_log_tanh_slope(points_DQ) * gauss_2Q[1]).sum((-2, -1))

    def kl(self, other: Self) -> Tensor:
        """KL(self || other), the same if both go through a tanh."""
        gaps_D = self.log_std_D - other.log_std_D
        distances_D = (self.mean_D - other.mean_D) * torch.exp(-other.log_std_D)
        return (0.5 * (torch.exp(2 * gaps_D) + distances_D.square() - 1) - gaps_D).sum(-1)


Distribution = Categorical | Gaussian


def joint_of(parts: Sequence[ActionPart], parameters_P: Tensor, legal_P: Tensor | None) -> Joint:
    """The distribution of an action. `legal_P` has a flag per choice of the discrete parts: what is
    not legal is impossible, but an item without a legal choice has them all."""
    joint: dict[str, Distribution] = {}
    num_choices = 0
    sizes = [part.num_parameters for part in parts]
    for part, parameters in zip(parts, parameters_P.split(sizes, -1), strict=True):
        if part.kind != "discrete":
            joint[part.name] = Gaussian(parameters, part.shape, is_squashed=part.kind == "squashed")
            continue
        if legal_P is not None:
            legal = legal_P[..., num_choices : num_choices + part.num_parameters] != 0
            num_choices += part.num_parameters
            items = legal.split(part.choices, -1)
            allowed = [legal_A | ~legal_A.any(-1, keepdim=True) for legal_A in items]
            parameters = parameters.masked_fill(~torch.cat(allowed, -1), -math.inf)
        joint[part.name] = Categorical(parameters, part.choices, part.shape)
    return Joint(joint)


class _Bounded(torch.autograd.Function):
    """Brings log-deviations into their range. A clamp's gradient would keep out what is outside."""

    @staticmethod
    def forward(ctx: Any, log_std_D: Tensor) -> Tensor:
        ctx.save_for_backward(log_std_D)
        return log_std_D.clamp(*LOG_STD_RANGE)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (log_std_D,) = ctx.saved_tensors
        (gradient_D,) = gradients
        low, high = LOG_STD_RANGE
        # A step goes against the gradient.
        is_outward = (log_std_D < low) & (gradient_D > 0) | (log_std_D > high) & (gradient_D < 0)
        return gradient_D.masked_fill(is_outward, 0.0)


@lru_cache
def _gauss(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The nodes and weights there. No inference tensor, whoever asks first."""
    with torch.inference_mode(False):
        return torch.as_tensor(GAUSS_2Q).to(device, dtype)


def _log_tanh_slope(values: Tensor) -> Tensor:
    """log(1 - tanh(x)^2), without loss of digits far from 0."""
    return 2 * (math.log(2) - values - torch.nn.functional.softplus(-2 * values))


def _side_by_side(logits: Tensor, choices: tuple[int, ...]) -> Tensor:
    """`[..., P]` logits as `[..., items, A]`: an item with fewer choices gets impossible ones."""
    num_most = max(choices)
    if min(choices) == num_most:
        return logits.reshape(*logits.shape[:-1], len(choices), num_most)
    items = [
        torch.nn.functional.pad(logits_A, (0, num_most - num_choices), value=-math.inf)
        for num_choices, logits_A in zip(choices, logits.split(choices, -1), strict=True)
    ]
    return torch.stack(items, -2)


def _flat(actions: Tensor, shape: tuple[int, ...]) -> Tensor:
    return actions.flatten(-len(shape)) if shape else actions.unsqueeze(-1)


def _shaped(items: Tensor, shape: tuple[int, ...]) -> Tensor:
    return items.reshape(items.shape[:-1] + shape)
