"""The checkpoint from which all ranks of a learner go on, and the accounts that each has of it.

A run may go on with another number of ranks. Weights are the same in every rank's checkpoint of an
update; accounts are each one's own, and none is lost: rank 0 takes those of ranks that are gone.

Runs on: main thread, before the event loop
"""

import dataclasses
import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from impala_async.config.ranks import FOLDER, Place
from impala_async.errors import CheckpointError
from impala_async.learner.handoff import Captured
from impala_async.learner.loop.saver import NUM_RANKS, load_newest, sound_checkpoints
from impala_async.learner.slots import Ledger
from impala_async.runs.folder import RunFolder
from impala_async.training.checkpoint import highest_epoch
from impala_async.training.ranks import Ranks, digest_of

logger = logging.getLogger(__name__)

# Beside the update in 64 bits.
DIGEST_BITS = 24
_NO_EPISODES: Mapping[str, Any] = {"count": 0, "returns": []}


class _Common(NamedTuple):
    """A checkpoint of a run that all of the ranks have which wrote it."""

    num_ranks: int
    number: int


def restore(ranks: Ranks, folder: RunFolder) -> Captured | None:
    """The newest checkpoint that all ranks of the run have, or None before the first one."""
    place, run = ranks.place, RunFolder(ranks.place.run_of(folder.path))
    if place.count == 1 and not (run.path / FOLDER).exists():
        return load_newest(folder)
    # The folders are on a disk of all hosts, and one rank looks into all of them.
    found = ranks.together(lambda: _newest_common(run) if place.is_first else None)
    said, *_ = ranks.gather(json.dumps(found).encode())
    if json.loads(said) is None:
        return None
    common = _Common(*json.loads(said))
    is_new = place.number >= common.num_ranks
    own = _folder_of(0 if is_new else place.number, run.path)
    restored = ranks.together(lambda: _numbered(own, common.number))
    training = restored.training
    state = dict(training.state)
    if is_new:
        state |= {"ledger": Ledger().save(), "watermarks": {}, "episodes": _NO_EPISODES}
    # Nobody else looks after the accounts of ranks that are gone.
    for gone in range(place.count, common.num_ranks) if place.is_first else ():
        _add(state, _numbered(_folder_of(gone, run.path), common.number).training.state)
    # An actor may come to another rank now.
    of_ranks = ranks.gather(json.dumps(state["watermarks"]).encode())
    state["watermarks"] = merge_watermarks(json.loads(each) for each in of_ranks)
    logger.info("resuming from %s", training.path.name)
    return restored._replace(training=dataclasses.replace(training, state=state))


def _newest_common(run: RunFolder) -> _Common | None:
    """The newest that is sound at all ranks that wrote it: when a start was killed, some may lack
    what others have, or the first that had another number of ranks."""
    found = False
    others: dict[int, set[int]] = {}
    for each in sound_checkpoints(run.checkpoints):
        found, number = True, _number_of(each)
        count = each.training.state.get(NUM_RANKS, 1)
        for rank in range(1, count):
            if rank not in others:
                folder = RunFolder(_folder_of(rank, run.path))
                others[rank] = {*map(_number_of, sound_checkpoints(folder.checkpoints))}
        lacking = [rank for rank in range(1, count) if number not in others[rank]]
        if not lacking:
            return _Common(count, number)
        where = ", ".join(map(str, lacking))
        logger.warning("%s is passed over: not the same at rank %s", each.training.path.name, where)
    if found or highest_epoch(run.checkpoints):
        raise CheckpointError(
            f"{run.checkpoints}: none of these is whole at all ranks that wrote it: put back those "
            "that are missing, or start a new run"
        )
    return None


def _numbered(folder: Path, number: int) -> Captured:
    """The newest with this number: an end without an update writes its start once more."""
    for each in sound_checkpoints(RunFolder(folder).checkpoints):
        if _number_of(each) == number:
            return each
    raise CheckpointError(
        f"{folder}: rank 0 has found a checkpoint here that this rank does not: is --run-dir on a "
        "disk that all hosts have?"
    )


def merge_watermarks(of_ranks: Iterable[Mapping[str, list[int]]]) -> dict[str, list[int]]:
    """All that any rank has settled, by actor: its number, its mark, and the seqs above it."""
    merged: dict[str, list[int]] = {}
    for marks in of_ranks:
        for actor, (number, below, *above) in marks.items():
            known, lowest, *more = merged.get(actor, [number, below])
            below = max(below, lowest)
            merged[actor] = [known, below, *sorted({n for n in (*above, *more) if n >= below})]
    return merged


def _add(state: dict[str, Any], left: Mapping[str, Any]) -> None:
    """Add the accounts of a rank that is gone."""
    state["ledger"] = {
        group: {name: n + left["ledger"][group].get(name, 0) for name, n in counts.items()}
        for group, counts in state["ledger"].items()
    }
    state["watermarks"] = merge_watermarks((state["watermarks"], left["watermarks"]))
    episodes = dict(state["episodes"])
    episodes["count"] += left["episodes"]["count"]
    state["episodes"] = episodes


def _folder_of(number: int, run: Path) -> Path:
    return Place(number, number + 1).folder(run)


def _number_of(checkpoint: Captured) -> int:
    """By its update, and then by its weights: behind an older checkpoint that they went on from,
    ranks may come to an update once more."""
    model = checkpoint.training.tensors.get("model", {})
    return checkpoint.progress.update << DIGEST_BITS | digest_of(model, DIGEST_BITS)
