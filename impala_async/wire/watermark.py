"""Which seqs of one actor are settled: everything below a mark, and a few above it."""


class Watermark:
    """Settled seqs, in memory bounded by the actor's window. Pure; used by one thread."""

    def __init__(self, below: int = 0, above: tuple[int, ...] = ()) -> None:
        self.below = below
        self._above = set(above)
        self._close_gaps()

    @property
    def above(self) -> tuple[int, ...]:
        """Settled seqs over a gap."""
        return tuple(sorted(self._above))

    def num_unsettled_below(self, seq: int) -> int:
        """How many seqs under this one are still to come."""
        # Asked for every actor whenever credit is dealt; mostly there is nothing above.
        num_settled = sum(settled < seq for settled in self._above) if self._above else 0
        return max(0, seq - self.below) - num_settled

    def is_settled(self, seq: int) -> bool:
        return seq < self.below or seq in self._above

    def settle(self, seq: int) -> None:
        """Admit or refuse a seq for good. Idempotent."""
        if seq >= self.below:
            self._above.add(seq)
            self._close_gaps()

    def raise_to(self, seq: int) -> None:
        """The actor holds nothing below this seq any more, so none of it will ever come."""
        if seq > self.below:
            self.below = seq
            self._above = {s for s in self._above if s >= seq}
            self._close_gaps()

    def _close_gaps(self) -> None:
        while self.below in self._above:
            self._above.remove(self.below)
            self.below += 1
