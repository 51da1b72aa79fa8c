"""Updates on a GPU: the kernels of one are recorded as a CUDA graph, and launched together after.

A host takes longer to launch hundreds of kernels one by one than a GPU takes to run them, and has
to hold the interpreter's lock meanwhile, which the event loop wants. A graph reads and writes the
same memory each time: a batch is copied into it, and gradients lie in it until the next replay.

    B columns of a batch or of a part of it
"""

import logging
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from impala_async.training.batch import Batch

logger = logging.getLogger(__name__)

# Each keeps the memory of an update. Batches have one size, their parts two.
MOST_GRAPHS = 4


class Knobs(NamedTuple):
    """The numbers of a loss that may change between updates. In a graph they are tensors."""

    entropy_cost: float
    reward_factor: float
    kl_coeff: float


class Launched(NamedTuple):
    """An update before its step. Its gradients are with the parameters."""

    numbers: Tensor
    """Loss, norm of the gradient, valid rows, and what `names` says, on their device."""
    names: tuple[str, ...]


class Launch(Protocol):
    """Computes loss and gradients of a batch; `with_sums` adds the sums of return targets."""

    def __call__(self, batch: Batch, knobs: Knobs, *, with_sums: bool) -> Launched: ...


def capture_graph(launch: Callable[[], Launched]) -> tuple[Launched, Callable[[], None]]:
    """Record what this launches; the second of the result launches that again, into the first.
    Other threads may use the GPU meanwhile."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        launched = launch()
    return launched, graph.replay


class Recorder:
    """A launch, which is recorded for a size of batch when that comes for the second time: at the
    first, libraries load what no graph can load."""

    def __init__(self, launch: Launch, parameters: tuple[nn.Parameter, ...]) -> None:
        self._launch, self._parameters = launch, parameters
        self._graphs: dict[tuple[int, bool], _Graph | None] = {}
        self._most = MOST_GRAPHS

    def __call__(self, batch: Batch, knobs: Knobs, *, with_sums: bool) -> Launched:
        key = len(batch.mask_BT), with_sums
        if key in self._graphs:
            graph = self._graphs[key] or self._record(batch, knobs, with_sums)
            if graph is not None:
                self._graphs[key] = graph
                return graph.replay(batch, knobs)
        elif len(self._graphs) < self._most:
            self._graphs[key] = None
        return self._launch(batch, knobs, with_sums=with_sums)

    def _record(self, batch: Batch, knobs: Knobs, with_sums: bool) -> "_Graph | None":
        own = batch.take(torch.arange(len(batch.mask_BT)))
        places: list[Any] = [batch.rewards_BT.new_tensor(number) for number in knobs]
        # A KL whose weight is 0 has no other later, and is left out of the loss.
        own_knobs = Knobs(places[0], places[1], places[2] if knobs.kl_coeff else 0.0)
        try:
            launched, run = capture_graph(lambda: self._launch(own, own_knobs, with_sums=with_sums))
        except RuntimeError as error:
            why = str(error).partition("\n")[0]
            logger.warning("no update is recorded as a CUDA graph, which makes it slower: %s", why)
            self._graphs.clear()
            self._most = 0
            return None
        held = [(parameter, parameter.grad) for parameter in self._parameters]
        return _Graph(own, places, held, launched, run)


class _Graph(NamedTuple):
    """A recorded launch, and the memory that it reads and writes."""

    batch: Batch
    knobs: list[Tensor]
    held: list[tuple[nn.Parameter, Tensor | None]]
    """The parameters, and where their gradients come to lie."""
    launched: Launched
    run: Callable[[], None]

    def replay(self, batch: Batch, knobs: Knobs) -> Launched:
        torch._foreach_copy_(self.batch.tensors(), batch.tensors())
        for place, number in zip(self.knobs, knobs, strict=True):
            place.fill_(number)
        self.run()
        for parameter, gradient in self.held:
            parameter.grad = gradient
        return self.launched
