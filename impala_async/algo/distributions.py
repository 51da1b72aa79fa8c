"""Action distributions, from the outputs of a policy head (IMPALA, arXiv 1802.01561).

Shapes: A actions of a discrete space, leading axes free ([B], [T, B]), written `...`.

Everything is computed in float32 at least, whatever the network ran in: the behaviour's and
the learner's log-probabilities are divided by each other, and bf16 is too coarse for that.
"""

from typing import Protocol, Self

import torch
from torch import Tensor


class Distribution(Protocol):
    """What acting and learning need of a policy's output, one number per leading index."""

    def sample(self, generator: torch.Generator | None = None) -> Tensor: ...

    def mode(self) -> Tensor: ...

    def log_prob(self, actions: Tensor) -> Tensor: ...

    def entropy(self) -> Tensor: ...

    def kl(self, other: Self) -> Tensor:
        """KL(self || other)."""
        ...


class Categorical:
    """One of A actions. A logit of -inf makes an action impossible, at no cost to the gradient."""

    __slots__ = ("log_probs_A",)

    def __init__(self, logits_A: Tensor) -> None:
        dtype = torch.promote_types(logits_A.dtype, torch.float32)
        self.log_probs_A = logits_A.to(dtype).log_softmax(-1)

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """A draw from `generator`, which lives on the device of the logits.

        The A actions race: the first of exponential arrival times with these rates wins.
        Two to three times faster than `torch.multinomial` for up to 64 draws of a few
        actions. `exponential_` never gives 0, so an impossible action's 0 / 0 cannot arise.
        """
        rates_A = self.log_probs_A.detach().exp()
        times_A = torch.empty_like(rates_A).exponential_(generator=generator)
        return rates_A.div_(times_A).argmax(-1)

    def mode(self) -> Tensor:
        return self.log_probs_A.argmax(-1)

    def log_prob(self, actions: Tensor) -> Tensor:
        return self.log_probs_A.gather(-1, actions.long().unsqueeze(-1)).squeeze(-1)

    def entropy(self) -> Tensor:
        probs_A = self.log_probs_A.exp()
        return -(probs_A * _where_possible(probs_A, self.log_probs_A)).sum(-1)

    def kl(self, other: Self) -> Tensor:
        """KL(self || other), infinite where `other` excludes what self allows."""
        probs_A = self.log_probs_A.exp()
        gaps_A = _where_possible(probs_A, self.log_probs_A) - _where_possible(
            probs_A, other.log_probs_A
        )
        return (probs_A * gaps_A).sum(-1)


def _where_possible(probs_A: Tensor, log_probs_A: Tensor) -> Tensor:
    """0 for impossible actions, whose 0 * -inf would be NaN. NaN itself passes through."""
    return torch.where(probs_A == 0, 0.0, log_probs_A)
