"""The word of the ranks: before each update they agree that all are ready, or that one ends.

Runs on: learner thread
"""

from collections.abc import Iterable
from typing import NamedTuple

from impala_async.config.run import StopSection
from impala_async.errors import CheckpointError
from impala_async.learner.handoff import ACTOR_LOST, NOT_FINITE, Captured
from impala_async.learner.loop.saver import load_newest
from impala_async.metrics.report import RETURN_EPISODES
from impala_async.runs.folder import UNSAVED, RunFolder
from impala_async.training.checkpoint import TrainingState, whole_checkpoints
from impala_async.training.ranks import Ranks, digest_of
from impala_async.wire.local_link import new_nonce

REASONS = (
    *(NOT_FINITE, UNSAVED, ACTOR_LOST, "actor_failed", "interrupted", "terminated"),
    *StopSection.model_fields,
)
"""Those of an end. Where several ranks end at once, the first of these holds for all."""
# Beside the update in 64 bits.
DIGEST_BITS = 24


class Word(NamedTuple):
    """It is one rank's, before an update, or that of all together."""

    is_ready: bool = True
    """It has a batch to learn from."""
    num_rows: int = 0
    """The valid rows in it."""
    is_capture_due: bool = False
    is_save_due: bool = False
    """Every rank saves it."""
    reason: str | None = None
    """The reason of its end."""
    returns: tuple[float, float] = 0.0, 0.0
    """The sum of those of its last episodes, and their number."""
    is_report_due: bool = False
    """Every rank says what it has reported last."""
    num_actors: tuple[int, ...] = (0,)
    """Its sessions; those of each rank."""

    @property
    def mean_return(self) -> float | None:
        total, count = self.returns
        return total / count if count >= RETURN_EPISODES else None


def agree(ranks: Ranks, own: Word) -> Word:
    """The word of all. Each rank says one, even if it waits: nobody waits for it in silence."""
    is_reason = [float(own.reason == reason) for reason in REASONS]
    are_due = own.is_capture_due, own.is_save_due, own.is_report_due
    actors = [0] * ranks.place.count
    (actors[ranks.place.number],) = own.num_actors
    said = ranks.totals(own.is_ready, own.num_rows, *are_due, *own.returns, *is_reason, *actors)
    num_ready, num_rows, num_captures, num_saves, num_reports, total, count, *more = said
    of_reasons, actors_of_all = more[: len(REASONS)], more[len(REASONS) :]
    return Word(
        num_ready == ranks.place.count,
        round(num_rows),
        num_captures > 0,
        num_saves > 0,
        next((reason for reason, n in zip(REASONS, of_reasons, strict=True) if n), None),
        (total, count),
        num_reports > 0,
        tuple(map(round, actors_of_all)),
    )


def join_run(ranks: Ranks, folder: RunFolder, settings: str) -> bytes:
    """Give the folder of this rank the run of all, and return the nonce of this start: actors know
    all ranks by the same, and go from one to another. ConfigError where ranks do not belong
    together."""
    ranks.check_settings(settings)
    ranks.place.check_shared(folder.path)
    said = ranks.gather(folder.run_id + new_nonce() + folder.last_epoch.to_bytes(8))
    first = said[0]
    folder.join_run(first[:16], max(int.from_bytes(each[32:]) for each in said))
    return first[16:32]


def newest_of_all(ranks: Ranks, numbers: Iterable[int]) -> int | None:
    """The highest of the numbers of checkpoints that all ranks have: one that was killed may lack
    some."""
    own = sorted(numbers)
    while True:
        newest = own[-1] if own else -1
        least = ranks.least(newest)
        if least == -ranks.least(-newest):
            return None if newest < 0 else newest
        own = [number for number in own if number <= least]


def restore(ranks: Ranks, folder: RunFolder) -> Captured | None:
    """The newest checkpoint that all ranks have, or None before the first one; CheckpointError
    where only some have any, as those of a run that had fewer ranks."""
    if not ranks.are_many:
        return load_newest(folder)
    own = {_number_of(each): each.version for each in whole_checkpoints(folder.checkpoints)}
    newest = newest_of_all(ranks, own)
    if newest is None and own:
        raise CheckpointError(
            f"{folder.checkpoints}: not all of the {ranks.place.count} ranks have one of these: "
            "resume with as many ranks as the run had, or start a new run"
        )
    return None if newest is None else load_newest(folder, own[newest])


def _number_of(checkpoint: TrainingState) -> int:
    """By its update, and then by its weights: behind an older checkpoint that they went on from,
    ranks may come to an update once more."""
    model = checkpoint.tensors.get("model", {})
    return checkpoint.version.update << DIGEST_BITS | digest_of(model, DIGEST_BITS)
