"""The ring from which the learner draws each batch as often as it has passes.

Runs on: learner thread
"""

from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from impala_async.errors import ConfigError

Item = TypeVar("Item")


class Draw(NamedTuple, Generic[Item]):
    """One use of an item: its `pass_index`, from 0, of the passes that the item was given."""

    item: Item
    pass_index: int
    num_passes: int

    @property
    def is_last_pass(self) -> bool:
        return self.pass_index + 1 == self.num_passes


@dataclass(eq=False)
class MinibatchBuffer(Generic[Item]):
    """A ring of `size` places over `source`; one place per `get`, in order.

    An empty place is filled when its turn comes, with one pass more than the fill before it had, up
    to `num_passes`: so the last passes, and with them the waits for the source, spread out.

        size 2, 2 passes, init 1:   A* B C B* C* D E D* E*        * is the last pass
    """

    source: Any
    """Its `get(timeout=...)` waits for the next item, as that of a `queue.Queue`."""
    size: int
    num_passes: int
    init_num_passes: int | None = None
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        first, most = self.init_num_passes, self.num_passes
        self._next_given = most if first is None else first
        if self.size < 1:
            raise ConfigError(f"size: got {self.size}, wants a place or more")
        if not 1 <= self._next_given <= most:
            got = f"got {self._next_given}, wants 1 to num_passes = {most}"
            raise ConfigError(f"init_num_passes: {got}")
        self._turn = 0
        # Each holds its next draw.
        self._places: list[Draw[Item] | None] = [None] * self.size

    def __len__(self) -> int:
        """How many items are in the ring: drawn at least once, and not for the last time."""
        return sum(place is not None for place in self._places)

    def get(self) -> Draw[Item]:
        """One pass of the item whose turn it is, waiting for the source if its place is empty. The
        error of that wait, as `queue.Empty`, changes nothing: the next call tries the same place.
        """
        draw = self._places[self._turn]
        if draw is None:
            draw = Draw(self.source.get(timeout=self.timeout_s), 0, self._next_given)
            self._next_given = min(self._next_given + 1, self.num_passes)
        after = None if draw.is_last_pass else draw._replace(pass_index=draw.pass_index + 1)
        self._places[self._turn] = after
        self._turn = (self._turn + 1) % len(self._places)
        return draw

    def end(self, item: Item) -> None:
        """Draw it no more, whatever passes it has left."""
        alive = (None if place and place.item is item else place for place in self._places)
        self._places = list(alive)

    def drain(self) -> list[Item]:
        """Empty the ring, but not the source: the items in the order of their turn."""
        order = self._places[self._turn :] + self._places[: self._turn]
        self._places = [None] * len(self._places)
        self._turn = 0
        return [draw.item for draw in order if draw is not None]
