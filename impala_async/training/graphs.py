"""Gradients on a GPU as a CUDA graph: all kernels of an update's loss and gradients in one launch.

A host takes longer to launch hundreds of kernels one by one than a GPU takes to run them, and has
to hold the interpreter's lock meanwhile, which the event loop wants. A graph reads and writes the
same memory each time: a batch is copied into it, and gradients lie in it until it runs again.

    B columns of a batch or of a part of it
"""

import logging
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from impala_async.training.batch import Batch
from impala_async.training.gradients import Coefficients, ComputeGradients, Gradients

logger = logging.getLogger(__name__)

# Each keeps the memory of an update. Parts of a batch have two sizes, more where columns are dead.
MOST_GRAPHS = 4
_Kind: TypeAlias = tuple[torch.Size, bool, bool]
"""The size of a batch, whether sums are asked for, and whether it has `before`."""


def make_graph(compute: Callable[[], Gradients]) -> tuple[Gradients, Callable[[], None]]:
    """Make a graph of what this launches; the second of the result runs it, into the first. Other
    threads may use the GPU meanwhile."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        gradients = compute()
    return gradients, graph.replay


class Graphs:
    """Computes gradients by a graph from the second time on that a size of batch comes: at the
    first, libraries load what no graph can load."""

    def __init__(self, compute: ComputeGradients, parameters: tuple[nn.Parameter, ...]) -> None:
        self._compute, self._parameters = compute, parameters
        self._seen: set[_Kind] = set()
        self._graphs: dict[_Kind, _Graph] = {}
        self._most = MOST_GRAPHS

    def __call__(self, batch: Batch, of: Coefficients, *, with_sums: bool) -> Gradients:
        key = batch.mask_BT.shape, with_sums, bool(batch.before)
        if key in self._seen and key not in self._graphs and len(self._graphs) < self._most:
            self._make(key, batch, of)
        self._seen.add(key)
        if key in self._graphs:
            return self._graphs[key].gradients_of(batch, of)
        return self._compute(batch, of, with_sums=with_sums)

    def _make(self, key: _Kind, batch: Batch, of: Coefficients) -> None:
        own = batch.take(torch.arange(len(batch.mask_BT)))
        new = batch.rewards_BT.new_tensor
        places: list[Any] = [None if number is None else new(number) for number in of]
        own_of = Coefficients(*places)
        if not of.kl_coeff:
            # A weight of 0 stays 0, as adapting multiplies it: the loss then has no such term.
            own_of = own_of._replace(kl_coeff=0.0)
        try:
            found, run = make_graph(lambda: self._compute(own, own_of, with_sums=key[1]))
        except RuntimeError as error:
            why = str(error).partition("\n")[0]
            logger.warning("updates are slower than they could be: no CUDA graph of one: %s", why)
            self._graphs.clear()
            self._most = 0
            return
        held = [(parameter, parameter.grad) for parameter in self._parameters]
        self._graphs[key] = _Graph(own, places, held, found, run)


class _Graph(NamedTuple):
    """A graph, and the memory that it reads and writes."""

    batch: Batch
    coefficients: list[Tensor | None]
    held: list[tuple[nn.Parameter, Tensor | None]]
    """The parameters, and where their gradients come to lie."""
    gradients: Gradients
    run: Callable[[], None]

    def gradients_of(self, batch: Batch, of: Coefficients) -> Gradients:
        torch._foreach_copy_([*self.batch.tensors().values()], [*batch.tensors().values()])
        for place, number in zip(self.coefficients, of, strict=True):
            if place is not None and number is not None:
                place.fill_(number)
        self.run()
        for parameter, gradient in self.held:
            parameter.grad = gradient
        return self.gradients
