"""One session of one actor, as the learner knows it: where it is, and what it may send."""

from dataclasses import dataclass, field

from impala_async.weights import Version
from impala_async.wire.messages import Grant
from impala_async.wire.watermark import Watermark

# Messages under way of each that an actor writes: one travels while the next is unrolled.
WINDOW = 2


@dataclass(slots=True, eq=False)
class Peer:
    """One session of one actor. Without columns it has not said yet what it will send."""

    session: bytes
    actor: bytes
    rank: int
    watermark: Watermark
    last_heard: float
    data_route: bytes
    build: str = ""
    weights_route: bytes = b""
    columns: int = 0
    streams: int = 1
    granted: int = 0
    # Below this seq, room is no longer kept for what it has not sent.
    lapsed: int = 0
    # Whether it uses its credit: a newcomer has to show it first.
    has_earned: bool = False
    dealt_at: int = 0
    used_at: float = 0.0
    verdicts: list[list[int]] = field(default_factory=list)
    # In lockstep: the update of its first weights, once it is decided.
    begins_at: int | None = None

    @property
    def outstanding_messages(self) -> int:
        return self.watermark.num_unsettled_below(self.granted)

    @property
    def num_lapsed(self) -> int:
        """Messages that it may still send, and that find room or do not."""
        return self.watermark.num_unsettled_below(self.lapsed)

    @property
    def window(self) -> int:
        """Messages that may be under way at once."""
        return WINDOW * self.streams if self.has_earned else 1

    @property
    def kept_columns(self) -> int:
        """Columns for which room is kept."""
        return (self.outstanding_messages - self.num_lapsed) * self.columns

    @property
    def may_have_more(self) -> bool:
        """Whether its window has room. A seq that never comes must not let the others run away:
        what is settled above a gap is memory."""
        reach = self.granted - self.watermark.below
        return self.outstanding_messages < self.window and reach < 2 * self.window

    def extend(self) -> None:
        """Allow one more message; seqs that are settled already do not count."""
        self.granted += 1
        while self.watermark.is_settled(self.granted - 1):
            self.granted += 1

    def grant(self, version: Version) -> Grant:
        """What this peer may do now, and what became of what it sent.

        Verdicts are said once and lost with a grant that does not arrive: they are for people.
        What the actor acts on, `settled`, is said again in every grant.
        """
        verdicts, self.verdicts = self.verdicts, []
        return Grant(self.session, self.granted, self.watermark.below, *version, verdicts)
