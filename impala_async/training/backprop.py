"""From a batch to gradients: forward pass, loss, backward pass, compiled if that is asked for.

What cannot be compiled is computed as it is written, and a warning says why.

    B columns of a batch, T action rows, S = T+1 observation rows
"""

import logging
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from impala_async.algo.terms import LossTerms
from impala_async.foreign import one_line
from impala_async.policy import Policy
from impala_async.training.algorithms import Algorithm, Rows, View
from impala_async.training.batch import Batch
from impala_async.training.target import Target

logger = logging.getLogger(__name__)

Backend = str | Callable[..., Callable[..., object]]
"""What torch.compile hands a graph to."""


class Loss(NamedTuple):
    """Of a batch or a part of it, and the statistics that go with it."""

    terms: LossTerms
    stats: dict[str, Tensor]


class Backprop:
    """Leaves the gradients of a loss in the parameters. `backend` None compiles nothing."""

    def __init__(
        self,
        policy: Policy,
        target: Target | None,
        algorithm: Algorithm,
        zero_grad: Callable[[], None],
        backend: Backend | None,
    ) -> None:
        self._policy, self._target, self._algorithm = policy, target, algorithm
        self._zero_grad = zero_grad
        self._compiled = None if backend is None else torch.compile(self.loss, backend=backend)

    @property
    def is_compiled(self) -> bool:
        """Or is to be compiled by the first call."""
        return self._compiled is not None

    def run(self, batch: Batch, rows: Rows, entropy_cost: Tensor | float) -> Loss:
        """Forward and backward."""
        if self._compiled is None:
            return self._through(self.loss, batch, rows, entropy_cost)
        try:
            # As a number it would be a part of what is compiled, and a schedule changes it.
            cost = rows.num_valid.new_full((), float(entropy_cost))
            return self._through(self._compiled, batch, rows, cost)
        # Compilers fail in many ways. A fault that is not theirs comes back below.
        except Exception as error:
            # Of what a backend raised torch tells a long story. It gets no name here: its traceback
            # holds all that the failed attempt computed, and the next one needs the memory.
            logger.warning(
                "learner.compile: updates go on uncompiled: %s",
                one_line(getattr(error, "inner_exception", error)),
            )
            self._compiled = None
        return self._through(self.loss, batch, rows, entropy_cost)

    def loss(self, batch: Batch, rows: Rows, entropy_cost: Tensor | float) -> Loss:
        """Forward only."""
        view = self.view(batch, rows)
        terms = self._algorithm.loss(view, entropy_cost)
        with torch.no_grad():
            return Loss(terms, _stats(terms, view) | self._algorithm.stats(view))

    def view(self, batch: Batch, rows: Rows) -> View:
        """The batch as the weights of now see it."""
        inputs = (batch.rows_of_obs(), batch.actions, batch.mask_BT, batch.state)
        target = None if self._target is None else self._target.look(*inputs)
        return View(self._policy.evaluate(*inputs), rows, target)

    def _through(
        self,
        loss_of: Callable[[Batch, Rows, Tensor | float], Loss],
        batch: Batch,
        rows: Rows,
        entropy_cost: Tensor | float,
    ) -> Loss:
        loss = loss_of(batch, rows, entropy_cost)
        self._zero_grad()
        loss.terms.total.backward()
        return loss


def _stats(terms: LossTerms, view: View) -> dict[str, Tensor]:
    return {
        "loss/policy": terms.policy.detach(),
        "loss/value": terms.value.detach(),
        "loss/entropy": terms.entropy.detach(),
        "policy/entropy": terms.sum_entropy.detach() / view.rows.num_valid.clamp(min=1),
    }
