"""The word of the ranks: before each update they agree that all are ready, or that one ends.

Runs on: learner thread; `join_run` before it, on the main thread
"""

import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from impala_async.config.learner import KEY_FILE, BindSection
from impala_async.config.ranks import check_alike, risks
from impala_async.config.run import StopSection
from impala_async.errors import ConfigError
from impala_async.files import find_bytes
from impala_async.learner.handoff import ACTOR_LOST, NOT_FINITE
from impala_async.metrics.report import RETURN_EPISODES
from impala_async.runs.folder import UNSAVED, RunFolder
from impala_async.training.checkpoint import highest_epoch
from impala_async.training.ranks import Ranks
from impala_async.training.step import UpdateStep
from impala_async.training.team_step import TeamStep
from impala_async.weights import NO_VERSION, Version
from impala_async.wire.keys import Key, key_in_environment, new_key
from impala_async.wire.local_link import new_nonce

logger = logging.getLogger(__name__)

REASONS = (
    *(NOT_FINITE, UNSAVED, ACTOR_LOST, "actor_failed", "interrupted", "terminated"),
    *StopSection.model_fields,
)
"""Those of an end. Where several ranks end at once, the first of these holds for all."""


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
    num_joined: tuple[int, ...] = (0,)
    num_sessions: tuple[int, ...] = (0,)
    """Its own; those of each rank."""
    saved: tuple[Version, ...] = (NO_VERSION,)
    """The newest checkpoint that it has written in this start; those of each rank."""
    num_ready: int = 0
    """How many ranks have a batch, in the word of all."""

    @property
    def mean_return(self) -> float | None:
        total, count = self.returns
        return total / count if count >= RETURN_EPISODES else None

    @property
    def common(self) -> Version | None:
        """The newest checkpoint of each rank, if all have the same. The oldest of them would not
        do: another rank may have failed to write it, and have a newer one."""
        first, *others = self.saved
        is_same = all(each == first for each in others)
        return first if is_same and first != NO_VERSION else None


def begin_alike(ranks: Ranks, step: UpdateStep | TeamStep) -> None:
    """All begin with what rank 0 has made: other processors make other last bits of it."""
    state = step.capture()
    ranks.share(
        {f"{group}/{name}": part[name] for group, part in state.tensors.items() for name in part}
    )
    step.restore(state)


def agree(ranks: Ranks, own: Word) -> Word:
    """The word of all. Each rank says one, even if it waits: nobody waits for it in silence."""
    is_reason = [float(own.reason == reason) for reason in REASONS]
    are_due = own.is_capture_due, own.is_save_due, own.is_report_due
    count, number = ranks.place.count, ranks.place.number
    of_own = *own.num_joined, *own.num_sessions, *own.saved[0]
    # Beside zeros a sum is a copy.
    of_each = [0] * (len(of_own) * count)
    of_each[number::count] = of_own
    said = ranks.totals(own.is_ready, own.num_rows, *are_due, *own.returns, *is_reason, *of_each)
    num_ready, num_rows, num_captures, num_saves, num_reports, *returns = said[:7]
    of_reasons, of_each = said[7 : 7 + len(REASONS)], [*map(round, said[7 + len(REASONS) :])]
    num_joined, num_sessions, epochs, updates = (
        tuple(of_each[start : start + count]) for start in range(0, len(of_each), count)
    )
    return Word(
        num_ready == count,
        round(num_rows),
        num_captures > 0,
        num_saves > 0,
        next((reason for reason, n in zip(REASONS, of_reasons, strict=True) if n), None),
        (returns[0], returns[1]),
        num_reports > 0,
        num_joined,
        num_sessions,
        tuple(map(Version, epochs, updates)),
        round(num_ready),
    )


class Start(NamedTuple):
    """Actors know all ranks by these, and go from one to another."""

    nonce: bytes
    key: Key | None
    """None: nothing is encrypted."""


def join_run(
    ranks: Ranks, folder: RunFolder, common: Mapping[str, Any], bind: BindSection
) -> Start:
    """Give the folder of this rank the run of all, and return what is the same for this start of
    all ranks. ConfigError where they do not belong together."""
    said = ranks.gather(json.dumps(common).encode())
    check_alike([json.loads(each) for each in said])
    for risk in risks(ranks.place) if ranks.place.is_first else ():
        logger.warning("%s", risk)
    ranks.together(lambda: ranks.place.check_shared(folder.path))
    last_epoch = max(folder.last_epoch, highest_epoch(folder.checkpoints))
    own = ranks.together(lambda: _find_key(folder, bind))
    key_text = own.text.encode() if own else b""
    said = ranks.gather(folder.run_id + new_nonce() + last_epoch.to_bytes(8) + key_text)
    first = said[0]
    key = Key(first[40:].decode(), "the key of rank 0") if first[40:] else None
    if key is None and (others := [n for n, each in enumerate(said) if each[40:]]):
        raise ConfigError(
            f"bind: rank {others[0]} would be encrypted, and rank 0 has no key: let the same hosts "
            "reach all of them, and give all the same bind.encrypt and IMPALA_ASYNC_KEY"
        )
    folder.join_run(first[:16], max(int.from_bytes(each[32:40]) for each in said))
    if key and ranks.place.is_first:
        _keep(key, folder, is_first_start=last_epoch == 0)
    return Start(first[16:32], key)


def _keep(key: Key, folder: RunFolder, *, is_first_start: bool) -> None:
    if folder.keep_key(key.text):
        told = "%s is new: actors of an earlier start that were given another key want this one"
        if not is_first_start:
            logger.info(told, folder.path / KEY_FILE)
        return
    with suppress(OSError):
        # Its owner may have let a group read it.
        if (folder.absolute / KEY_FILE).stat().st_mode & 0o007:
            told = "%s: every user of this host may open it: chmod o= it"
            logger.warning(told, folder.path / KEY_FILE)


def _find_key(folder: RunFolder, bind: BindSection) -> Key | None:
    """The key that is wanted: that of the environment, or else that of the run, or a new one."""
    given = key_in_environment()
    if bind.encrypt == "off" or (bind.encrypt == "auto" and not bind.open_urls and not given):
        return None
    if given is None and (kept := find_bytes(folder.absolute / KEY_FILE)) is not None:
        fix = ": remove the file, and a new one is made"
        return Key(kept.decode(errors="replace"), str(folder.path / KEY_FILE), fix)
    return given or new_key()
