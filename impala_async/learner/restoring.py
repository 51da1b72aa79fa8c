"""The checkpoint from which all ranks of a learner go on, and the accounts that each has of it.

A run may go on with another number of ranks. Weights are the same in every rank's checkpoint of an
update; accounts are each one's own, and none is lost: rank 0 takes those of ranks that are gone.

Runs on: main thread, before the event loop
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from impala_async.config.ranks import Place
from impala_async.errors import CheckpointError
from impala_async.files import find_object
from impala_async.learner.handoff import Captured
from impala_async.learner.loop.saver import NUM_RANKS, load_newest
from impala_async.learner.slots import Ledger
from impala_async.runs.folder import RunFolder
from impala_async.training.checkpoint import STATE, TrainingState, last_good, whole_checkpoints
from impala_async.training.ranks import Ranks, digest_of
from impala_async.weights import Version

# Beside the update in 64 bits.
DIGEST_BITS = 24
_NO_EPISODES: Mapping[str, Any] = {"count": 0, "returns": []}


def restore(ranks: Ranks, folder: RunFolder) -> Captured | None:
    """The newest checkpoint that all ranks of the run have, or None before the first one."""
    place, run = ranks.place, ranks.place.run_of(folder.path)
    first, *_ = ranks.gather(str(num_ranks_of(run)).encode())
    count = int(first)
    if count == place.count == 1:
        return load_newest(folder)
    is_new = place.number >= count
    source = RunFolder(_folder_of(0 if is_new else place.number, run))
    # Nobody else looks after the folders of ranks that are gone.
    gone = [RunFolder(_folder_of(n, run)) for n in range(place.count, count) if place.is_first]
    found, *left = _load(ranks, [source, *gone], count)
    if found is None:
        return None
    state = dict(found.training.state)
    if is_new:
        state |= {"ledger": Ledger().save(), "watermarks": {}, "episodes": _NO_EPISODES}
    for each in left:
        assert each is not None, "all or none"
        _add(state, each.training.state)
    # An actor may come to another rank now.
    said = ranks.gather(json.dumps(state["watermarks"]).encode())
    state["watermarks"] = merge_watermarks(json.loads(each) for each in said)
    return found._replace(training=dataclasses.replace(found.training, state=state))


def _load(ranks: Ranks, folders: Sequence[RunFolder], count: int) -> list[Captured | None]:
    """The newest that is in these folders, and in those of all ranks; or None for each, where there
    is none at all."""
    versions = [_versions_in(folder) for folder in folders]
    newest = newest_of_all(ranks, set.intersection(*map(set, versions)))
    if newest is not None:
        return [
            load_newest(folder, own[newest]) for folder, own in zip(folders, versions, strict=True)
        ]
    if any(ranks.gather(b"some" if any(versions) else b"")):
        raise CheckpointError(
            f"{folders[0].checkpoints}: none of these is at all {count} ranks of the run: put back "
            "those that are missing, or start a new run"
        )
    return [None for _ in folders]


def num_ranks_of(run: Path) -> int:
    """How many ranks saved the newest checkpoint of a run."""
    newest = last_good(run / "checkpoints")
    count = newest and (find_object(newest / STATE) or {}).get(NUM_RANKS)
    return count if isinstance(count, int) and count > 0 else 1


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


def merge_watermarks(of_ranks: Iterable[Mapping[str, list[int]]]) -> dict[str, list[int]]:
    """All that any rank has settled, by actor: its number, its mark, and the seqs above it."""
    merged: dict[str, list[int]] = {}
    for marks in of_ranks:
        for actor, (number, below, *above) in marks.items():
            rank, lowest, *more = merged.get(actor, [number, below])
            below = max(below, lowest)
            merged[actor] = [rank, below, *sorted({n for n in (*above, *more) if n >= below})]
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


def _versions_in(folder: RunFolder) -> dict[int, Version]:
    return {_number_of(each): each.version for each in whole_checkpoints(folder.checkpoints)}


def _number_of(checkpoint: TrainingState) -> int:
    """By its update, and then by its weights: behind an older checkpoint that they went on from,
    ranks may come to an update once more."""
    model = checkpoint.tensors.get("model", {})
    return checkpoint.version.update << DIGEST_BITS | digest_of(model, DIGEST_BITS)
