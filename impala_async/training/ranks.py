"""Sums over the ranks of one learner, so that all take the same step from all of their columns.

Every rank asks for the same sums in the same order. A rank without a valid row asks too: it has
zeros to add. Each adds its share of a whole, such as the gradient of a loss that is divided by the
valid rows of all: so the sum is exact, however unevenly the rows are spread.
"""

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from impala_async.config.ranks import Place, error_of, words_of
from impala_async.errors import ImpalaAsyncError, RankError, ServiceError
from impala_async.training.rank_sockets import RankSockets, open_sockets

logger = logging.getLogger(__name__)

T = TypeVar("T")
ENDING = "ending"


class Ranks:
    """This rank and the others. One alone sums nothing."""

    def __init__(self, place: Place | None = None) -> None:
        self.place = place or Place()
        self._is_apart = not self.are_many
        # Until all have met, those that build are waited for.
        self.have_met = not self.are_many
        self._group: dist.ProcessGroup | None = None
        self._sockets: RankSockets | None = None

    @property
    def are_many(self) -> bool:
        return self.place.count > 1

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Within it this rank computes for itself, and others do not."""
        before, self._is_apart = self._is_apart, True
        try:
            yield
        finally:
            self._is_apart = before

    def meet(self, patience_s: float) -> None:
        """Wait for those that still build. From now on a rank that says nothing for so long has
        failed."""
        if self._is_apart:
            return
        with lost_told():
            dist.all_reduce(torch.zeros(1))
            self._group = dist.new_group(timeout=timedelta(seconds=patience_s))
        host = os.environ["MASTER_ADDR"]
        self._sockets = open_sockets(self.place, host, self.gather, patience_s)
        if self._sockets is None and self.place.is_first:
            told = "not all ranks reach %s (MASTER_ADDR) at a free port: gloo sums all, and slower"
            logger.warning(told, host)
        self.have_met = True

    def tell_ending(self, reason: str) -> None:
        """Tell the others, before all have met, that this rank ends, and why."""
        with lost_told():
            dist.distributed_c10d._get_default_store().set(ENDING, reason)

    def find_ending(self) -> str | None:
        """Why another rank ends, where one has told that before all have met."""
        with lost_told():
            store = dist.distributed_c10d._get_default_store()
            return store.get(ENDING).decode() if store.check([ENDING]) else None

    def sum(self, shares: Tensor) -> Tensor:
        """The sum over ranks, in place."""
        if self._is_apart:
            return shares
        if self._sockets is not None and self._sockets.can_sum(shares):
            self._sockets.sum(shares)
            return shares
        with lost_told():
            dist.all_reduce(shares, group=self._group)
        return shares

    def totals(self, *shares: float) -> Sequence[float]:
        if self._is_apart:
            return shares
        found: list[float] = self.sum(torch.tensor(shares, dtype=torch.float64)).tolist()
        return found

    def gather(self, own: bytes) -> list[bytes]:
        """The words of all ranks, in their order."""
        if self._is_apart:
            return [own]
        number, sizes = self.place.number, torch.zeros(self.place.count, dtype=torch.int64)
        sizes[number] = len(own)
        lengths: list[int] = self.sum(sizes).tolist()
        # Beside zeros a sum is a copy.
        words = torch.zeros(self.place.count, max(lengths), dtype=torch.uint8)
        words[number, : len(own)] = torch.tensor(list(own), dtype=torch.uint8)
        self.sum(words)
        return [words[rank, :length].numpy().tobytes() for rank, length in enumerate(lengths)]

    def together(self, body: Callable[[], T]) -> T:
        """Do what each rank does for itself. An error of one is one of all: they would only see
        that it is gone."""
        try:
            found = body()
        except (ImpalaAsyncError, OSError) as error:
            self.gather(words_of(error))
            raise
        for number, words in enumerate(self.gather(b"")):
            if words:
                raise error_of(number, words)
        return found

    def join(self, own_N: Tensor) -> Tensor:
        """The numbers of all ranks, as many of each, one rank behind the other."""
        size, number = len(own_N), self.place.number
        all_N = torch.zeros(self.place.count * size, dtype=torch.int64)
        all_N[number * size :][:size] = own_N
        return self.sum(all_N)

    def own(self, places_N: Tensor, size: int) -> Tensor:
        """Those of these places in what `join` gives, of so many of each, that are of this rank,
        as it counts them."""
        own_N = places_N - self.place.number * size
        return own_N[(own_N >= 0) & (own_N < size)]

    def sum_gradients(
        self, parameters: Sequence[nn.Parameter], numbers: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Sum gradients in place, and numbers, in one message: its way takes longer than its bytes.
        Returns the sums of the numbers, for each parameter whether any rank has a gradient of it,
        and the norm of all gradients. The host does not wait here for a device."""
        grads = [p.new_zeros(p.shape) if p.grad is None else p.grad for p in parameters]
        has_any = torch.tensor([float(p.grad is not None) for p in parameters])
        tail = [has_any.to(grads[0].device, non_blocking=True), numbers.to(grads[0].dtype)]
        bucket = self.sum(torch.cat([*(grad.flatten() for grad in grads), *tail]))
        *summed, has_any, shares = bucket.split([*(p.numel() for p in parameters), *map(len, tail)])
        for parameter, gradient in zip(parameters, summed, strict=True):
            parameter.grad = gradient.view_as(parameter)
        norm = torch.linalg.vector_norm(bucket[: -len(has_any) - len(shares)])
        return shares, has_any, norm

    def share(self, tensors: Mapping[str, Tensor]) -> None:
        """Give all ranks those of rank 0, to the bit; ServiceError where shapes differ."""
        shapes = {name: torch.tensor(each.shape) for name, each in tensors.items()}
        self.check_equal(shapes, "shapes of what is trained")
        for each in (tensors[name] for name in sorted(tensors) if tensors[name].numel()):
            # Beside zeros a sum is a copy.
            flat = each.detach().to("cpu", copy=True).contiguous().view(-1).view(torch.uint8)
            first = self.sum(flat if self.place.is_first else torch.zeros_like(flat))
            each.copy_(first.view(each.dtype).view_as(each))

    def check_equal(self, tensors: Mapping[str, Tensor], what: str) -> None:
        """Raise ServiceError for the first tensor that is not the same to the bit at all ranks."""
        if self._is_apart:
            return
        own = {name: f"{digest_of({name: each}):x}" for name, each in sorted(tensors.items())}
        first, *others = (json.loads(each) for each in self.gather(json.dumps(own).encode()))
        for rank, theirs in enumerate(others, 1):
            for name in (*first, *theirs):
                if first.get(name) != theirs.get(name):
                    raise ServiceError(
                        f"{what} of rank {rank} differ from those of rank 0, first in {name}"
                    )


def digest_of(tensors: Mapping[str, Tensor], num_bits: int = 56) -> int:
    """A number of so many bits: the same where the tensors are, to the bit."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        flat = tensors[name].detach().cpu().contiguous().view(-1)
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return int.from_bytes(digest.digest()) >> (256 - num_bits)


@contextmanager
def lost_told() -> Iterator[None]:
    """RankError for what torch says of ranks that are gone."""
    try:
        yield
    except RuntimeError as error:
        why = str(error).partition("\n")[0][:200]
        raise RankError(f"another rank has ended, or does not answer: {why}") from None
