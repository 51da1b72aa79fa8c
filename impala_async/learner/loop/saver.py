"""Checkpoints of a running learner: what goes in, and what happens when the disk is full.

The learner thread clones its tensors; the loop adds accounts and watermarks, which are by then
at least as far; a worker thread writes.

Runs on: event loop; files are written on a worker thread
"""

import errno
import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from impala_async.config.evaluate import EvaluateSection
from impala_async.errors import CheckpointError
from impala_async.learner.handoff import Captured, Progress, on_thread
from impala_async.learner.loop.reporter import EpisodeStats
from impala_async.learner.slots import Ledger
from impala_async.runs.folder import RunFolder
from impala_async.training.checkpoint import (
    STATE,
    TrainingState,
    highest_epoch,
    last_good,
    prune,
    save_checkpoint,
    tell_of_skipped,
    whole_checkpoints,
)
from impala_async.weights import NO_VERSION, Lineage, Version

logger = logging.getLogger(__name__)

EVAL_RETURN, EVAL_ACTIONS = "eval_return", "eval_actions"
"""The keys of a best checkpoint's return, and of its kind, in its `state.json`."""
NUM_RANKS = "num_ranks"
"""The key of their number, where there are several."""
MOST_RANKS = 10_000
Best = tuple[float, Version]
Count = Annotated[int, Field(ge=0)]


class _Episodes(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    count: Count
    returns: list[float]


class _Saved(BaseModel):
    """The content of a `state.json`; its numbers are finite, as its reader has seen."""

    model_config = ConfigDict(strict=True)
    env_steps_trained: Count
    run_s: float = Field(ge=0)
    ledger: dict[str, dict[str, Count]]
    watermarks: dict[
        Annotated[str, Field(pattern="^[0-9a-f]{32}$")], Annotated[list[Count], Field(min_length=2)]
    ]
    forks: dict[Annotated[str, Field(pattern="^[0-9]{1,9}$")], Count]
    episodes: _Episodes
    optimizer: dict[str, Any]
    algorithm: dict[str, Any]
    best: Annotated[list[float], Field(min_length=3, max_length=3)] | None = None
    num_ranks: int = Field(1, ge=1, le=MOST_RANKS)


def load_newest(folder: RunFolder) -> Captured | None:
    """The newest checkpoint of a run that is sound, or None if it died before its first; or
    CheckpointError where there are some, and not one of them is sound."""
    last = folder.last_saved()
    if last is not None and last not in {path.name for path in folder.checkpoints.glob("ckpt-*")}:
        text = "%s/last_checkpoint: names %r, which is not there: the newest that is will do"
        logger.warning(text, folder.path, last)
    restored = next(sound_checkpoints(folder.checkpoints), None)
    if restored is not None:
        logger.info("resuming from %s", restored.training.path.name)
        return restored
    if highest_epoch(folder.checkpoints):
        raise CheckpointError(
            f"{folder.checkpoints}: no checkpoint there is whole: restore one, or start anew in "
            "another folder"
        )
    text = "%s holds no checkpoint, as the run ended before its first: training starts at step 0"
    logger.warning(text, folder.path)
    return None


def sound_checkpoints(directory: Path) -> Iterator[Captured]:
    """Those that a learner can go on with, from the newest on; the others are told of."""
    for checkpoint in whole_checkpoints(directory):
        try:
            restored = restored_from(checkpoint)
        except CheckpointError as error:
            tell_of_skipped(error)
        else:
            yield restored


def restored_from(checkpoint: TrainingState) -> Captured:
    """A checkpoint as a learner goes on with it; CheckpointError where its state is none."""
    path = checkpoint.path / STATE
    try:
        saved = _Saved.model_validate(dict(checkpoint.state))
        Ledger().restore(saved.ledger)
        _check_numbers("algorithm", saved.algorithm)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise CheckpointError(f"{path}: {where}: {first['msg']}") from None
    except (CheckpointError, KeyError, RecursionError) as error:
        raise CheckpointError(f"{path}: {error}") from None
    return Captured(Progress(*checkpoint.version, saved.env_steps_trained), checkpoint)


def _check_numbers(where: str, value: object) -> None:
    """Raise CheckpointError for what is no number. Lists hold settings, which are only compared."""
    if isinstance(value, dict):
        for key, each in value.items():
            _check_numbers(f"{where}.{key}", each)
    elif isinstance(value, bool) or not isinstance(value, int | float | list):
        raise CheckpointError(f"{where}: wants a number, got {value!r}")


def begin_epoch(folder: RunFolder, restored: Captured | None) -> tuple[Progress, Lineage]:
    epoch = folder.next_epoch(highest_epoch(folder.checkpoints))
    if restored is None:
        # A start before this one, if there was any, had the same first weights and no more.
        return Progress(epoch), Lineage(epoch - 1).resumed(epoch, 0)
    past = restored.progress
    forks = {int(before): at for before, at in restored.training.state["forks"].items()}
    lineage = Lineage(past.epoch, forks).resumed(epoch, past.update)
    return Progress(epoch, past.update, past.env_steps_trained), lineage


@dataclass(eq=False, kw_only=True)
class Saver:
    folder: RunFolder
    keep: int
    accounts: Callable[[], dict[str, Any]]
    lineage: Lineage
    episodes: EpisodeStats
    run_s: Callable[[], float]
    evaluate: EvaluateSection
    num_ranks: int = 1
    saved: list[Version] = field(default_factory=lambda: [NO_VERSION])
    """The newest that this start has written, of which the other ranks are told."""
    _common: Version | None = field(default=None, init=False)
    """The newest that all ranks have. Each spares it, as some may write no more, while others go on
    and remove what is old."""
    _best: Best | None = field(default=None, init=False)
    _best_evaluated: tuple[float, str, str] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        # A start that finds no checkpoint begins anew, but not with the best of the run.
        found, kind = next(whole_checkpoints(self.folder.best), None), self.evaluate.kinds[0]
        if found is None or not isinstance(score := found.state.get(EVAL_RETURN), float):
            return
        # A greedy return is not to be compared with one of sampled actions.
        of = str(found.state.get(EVAL_ACTIONS, kind))
        if self.evaluate.every_s is None or of == kind:
            self._best_evaluated = score, self._name_of(found.path), of

    @property
    def best_evaluated(self) -> tuple[float, str, str] | None:
        """The largest return of an evaluation, where its weights are in the run folder, and of
        which actions it is. Somebody may remove them: the next one takes their place."""
        if self._best_evaluated is not None:
            try:
                (self.folder.absolute / self._best_evaluated[1]).stat()
            except (FileNotFoundError, NotADirectoryError):
                return None
            except OSError:  # a disk that fails for a while has not lost them
                pass
        return self._best_evaluated

    def restore(self, training: TrainingState) -> None:
        state = training.state
        if self.num_ranks > 1:
            self._common = training.version
        self.episodes.restore(**state["episodes"])
        if state.get("best"):
            score, epoch, update = state["best"]
            self._best = (score, Version(epoch, update))

    def note_common(self, version: Version) -> None:
        self._common = version

    def state_of(self, captured: Captured) -> dict[str, Any]:
        """The content of a `state.json`, with the accounts of now."""
        return {
            **captured.training.state,
            **captured.progress._asdict(),
            "run_s": self.run_s(),
            "forks": self.lineage.forks,
            "episodes": self.episodes.save(),
            **({NUM_RANKS: self.num_ranks} if self.num_ranks > 1 else {}),
            **self.accounts(),
        }

    async def save(self, captured: Captured) -> bool:
        """Write a checkpoint; False, with a log line, if the disk does not take it."""
        if self.folder.is_gone():
            return False
        score, best = self.episodes.mean_return, self._best
        if score is not None and (best is None or score > best[0]):
            best = (score, captured.progress.version)
        state = {**self.state_of(captured), "best": [best[0], *best[1]] if best else None}
        self.folder.checkpoint_bytes = sum(
            each.nbytes for group in captured.training.tensors.values() for each in group.values()
        )
        try:
            await on_thread("save", functools.partial(self._write, captured, state, best))
        except (CheckpointError, OSError) as error:
            if self.folder.is_gone():  # it has said so, and another run may lie there
                return False
            good = last_good(self.folder.checkpoints)
            stays = f"the last good one is {good.name}" if good else "no other one can be read"
            what = "" if isinstance(error, CheckpointError) else "cannot write a checkpoint: "
            logger.error("%s%s; %s", what, error, stays)
            return False
        # Only now: until it is on the disk, the former best must stay there.
        self._best = best
        return True

    async def save_best(self, captured: Captured, state: dict[str, Any], score: float) -> None:
        """Let these take the place of the best so far, with what `state_of` said of them."""
        if self.folder.is_gone():
            return
        state = {**state, EVAL_RETURN: score, EVAL_ACTIONS: self.evaluate.kinds[0]}

        def write() -> None:
            version, tensors = captured.progress.version, captured.training.tensors
            path = save_checkpoint(self.folder.best, version, tensors, state)
            if self.folder.is_gone():
                return
            self._best_evaluated = score, self._name_of(path), self.evaluate.kinds[0]
            self._prune(self.folder.best, 1)

        try:
            await on_thread("save best", write)
        except (CheckpointError, OSError) as error:
            logger.error("the best weights so far are not kept: %s", error)

    def _name_of(self, path: Path) -> str:
        return f"{self.folder.best.name}/{path.name}"

    def _write(self, captured: Captured, state: dict[str, Any], best: Best | None) -> None:
        directory = self.folder.checkpoints
        version, tensors = captured.progress.version, captured.training.tensors
        path = save_checkpoint(directory, version, tensors, state)
        # A disk may take long, and another run be there by now: its checkpoints are not ours.
        if self.folder.is_gone():
            raise FileNotFoundError(errno.ENOENT, "its folder is gone", str(path))
        self.folder.note_saved(path.name)
        # Before the next save begins, which may remove the one before: no rank says that it has
        # what it has not any more.
        self.saved[0] = version
        self._prune(directory, self.keep, best[1] if best else None, self._common)

    def _prune(self, directory: Path, keep: int, *spared: Version | None) -> None:
        """Remove old ones; the new one is kept, even if that fails."""
        try:
            prune(directory, keep, *spared)
        except CheckpointError as error:
            logger.error("%s", error)
