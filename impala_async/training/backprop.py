"""From a batch to gradients: forward pass, loss, backward pass; compiled, or as a CUDA graph.

`Backprop` may have torch compile what it computes. `Graphs` records all that an update launches,
and replays it in one launch. A graph reads and writes the memory that it was recorded with, so
there is one for each batch whose memory is used again and again, which is a slot on the device.
What cannot be compiled or recorded is computed as it is written, and a warning says why.

    B columns of a batch, T action rows
"""

import logging
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from impala_async.algo.terms import LossTerms
from impala_async.policy import Policy
from impala_async.training.algorithms import Algorithm, Rows, View
from impala_async.training.batch import Batch
from impala_async.training.target import Target
from impala_async.user_code import one_line

logger = logging.getLogger(__name__)

Backend = str | Callable[..., Callable[..., object]]
"""The backend to which torch.compile hands a graph."""
Loss = tuple[LossTerms, dict[str, Tensor]]
"""With the statistics that go with it."""
Launch = Callable[[Batch, Tensor, Tensor], Tensor]
"""An update of a batch with this mask and entropy cost: the numbers that nobody has waited for."""

# Libraries choose their algorithms and take their memory in the first calls.
NUM_WARM_UPDATES = 3


class Backprop:
    """Leaves the gradients of a loss in the parameters. `backend` None compiles nothing."""

    def __init__(
        self,
        policy: Policy,
        target: Target | None,
        algorithm: Algorithm,
        backend: Backend | None,
    ) -> None:
        self._policy, self._target, self._algorithm = policy, target, algorithm
        self._parameters = tuple(policy.model.parameters())
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
            # torch wraps a backend's error in a long message, so the inner error is logged. No
            # variable keeps it: its traceback holds all that the failed attempt computed, and the
            # next attempt needs the memory.
            logger.warning(
                "learner.compile: updates go on uncompiled: %s",
                one_line(getattr(error, "inner_exception", error)),
            )
            self._compiled = None
        return self._through(self.loss, batch, rows, entropy_cost)

    def loss(self, batch: Batch, rows: Rows, entropy_cost: Tensor | float) -> Loss:
        """Forward only."""
        inputs = (batch.rows_of_obs(), batch.actions, batch.mask_BT, batch.state)
        target = None if self._target is None else self._target.look(*inputs)
        view = View(self._policy.evaluate(*inputs), rows, target)
        terms = self._algorithm.loss(view, entropy_cost)
        with torch.no_grad():
            return terms, _stats(terms, view) | self._algorithm.stats(view)

    def _through(
        self,
        loss_of: Callable[[Batch, Rows, Tensor | float], Loss],
        batch: Batch,
        rows: Rows,
        entropy_cost: Tensor | float,
    ) -> Loss:
        terms, stats = loss_of(batch, rows, entropy_cost)
        # As an optimizer does it, without what that tells a profiler.
        for parameter in self._parameters:
            parameter.grad = None
        terms.total.backward()
        return terms, stats


class _Graph(NamedTuple):
    """`batch` is kept, so that its memory stays where it is."""

    graph: torch.cuda.CUDAGraph
    batch: Batch
    mask_BT: Tensor
    numbers: Tensor


class Graphs:
    """A graph for each batch that comes by. Nothing in an update may depend on what it computes.

    All share the memory of the first for what they compute, as no two are ever replayed at a time.
    When a recording fails, none is used any more, and what they held is given back, as is the
    current stream. What the failed one has taken may stay taken: torch's allocator may go on as if
    something were being recorded.
    """

    def __init__(self, launch: Launch, device: torch.device) -> None:
        self._launch = launch
        self._cost = torch.zeros((), device=device)
        self._graphs: dict[int, _Graph] = {}
        self.is_given_up = False

    def run(self, batch: Batch, mask_BT: Tensor, entropy_cost: float) -> Tensor | None:
        """As `launch`, or None if this cannot be recorded.

        The numbers are overwritten by the next update.
        """
        known = self._graphs.get(id(batch)) or self._try_to_record(batch)
        if known is None:
            return None
        known.mask_BT.copy_(mask_BT)
        self._cost.fill_(entropy_cost)
        known.graph.replay()
        return known.numbers

    def _try_to_record(self, batch: Batch) -> _Graph | None:
        if self.is_given_up:
            return None
        try:
            known = self._graphs[id(batch)] = self._record(batch)
        # Anything in a network may be impossible to record. An error that does not come from
        # recording is raised again when the update is launched.
        except Exception as error:
            logger.warning("learner.compile: no CUDA graph: %s", one_line(error))
            self.is_given_up = True
            self._graphs.clear()
            return None
        return known

    def _record(self, batch: Batch) -> _Graph:
        # Without a valid row an update changes nothing: the right thing to warm up with.
        mask_BT = torch.zeros_like(batch.mask_BT)
        known = next(iter(self._graphs.values()), None)
        pool = None if known is None else known.graph.pool()
        graph = torch.cuda.CUDAGraph()
        before = torch.cuda.current_stream(mask_BT.device)
        stream = torch.cuda.Stream(mask_BT.device)
        stream.wait_stream(before)
        # A recording that fails leaves its stream the current one: only this gives it back.
        with torch.cuda.stream(stream):
            for _ in range(NUM_WARM_UPDATES):
                self._launch(batch, mask_BT, self._cost)
            # The loader's thread goes on with its own stream meanwhile.
            with torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
                numbers = self._launch(batch, mask_BT, self._cost)
        before.wait_stream(stream)
        return _Graph(graph, batch, mask_BT, numbers)


def _stats(terms: LossTerms, view: View) -> dict[str, Tensor]:
    return {
        "loss/policy": terms.policy.detach(),
        "loss/value": terms.value.detach(),
        "loss/entropy": terms.entropy.detach(),
        "policy/entropy": terms.sum_entropy.detach() / view.rows.num_valid.clamp(min=1),
    }
