"""One training for each of several seeds, one after the other, and one table of all.

Each is in a folder of its own. A command that is given again passes over those that are over.
"""

import logging
import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

from impala_async.config.load import load_config, sets
from impala_async.config.ranks import place_in
from impala_async.config.run import RunConfig, StopSection
from impala_async.errors import CheckpointError, ConfigError, Exit, RunOver
from impala_async.output import say
from impala_async.processes import last_word, undone
from impala_async.runs.folder import RunFolder, default_run_path
from impala_async.runs.seeds import describe_seeds, differing, draw_seeds, is_whole, read_ended
from impala_async.runs.start import RunFlags, check_run, chosen_config, settle
from impala_async.runs.summary import PICTURE, save_picture

logger = logging.getLogger(__name__)

TrainOne: TypeAlias = Callable[[RunFlags, Sequence[str]], tuple[int, Sequence[int]]]
"""From flags, and the same as they are typed, to an exit code and the signals that asked for it."""


class SeedRuns:
    """Owns the list of runs; `door` is the command that trains."""

    def __init__(self, flags: RunFlags, seeds: Sequence[int], door: str) -> None:
        """Check all of them before anything is written."""
        _check_flags(flags)
        self._door = door
        self._words = [] if flags.config is None else ["--config", str(flags.config)]
        self._words += [word for override in flags.overrides for word in ("--set", override)]
        self._base = flags.run_dir or default_run_path(
            load_config(chosen_config(flags), flags.overrides)
        )
        if (there := RunFolder(self._base)).exists():  # its picture would be lost
            there.check_new("name another folder for several seeds")
        self._runs = {
            seed: flags._replace(
                overrides=(*flags.overrides, f"seed={seed}"), run_dir=self._base / f"seed-{seed}"
            )
            for seed in seeds
        }
        *_, last = self._runs
        for seed, one in self._runs.items():
            _check_one(seed, one, is_last=seed == last)
        self._summaries = dict[Path, dict[str, Any]]()
        """Those of all that were trained, and of all that were over."""
        self._over = set[Path]()
        """Those that have come to an end of their own."""
        self._whole = list[Path]()
        """Those that came to an end that their settings name."""

    def train(self, train_one: TrainOne) -> int:
        """Train those that are left; the first that does not end by itself is the last."""
        try:
            # A signal ends this process at once between two seeds, and while the picture is drawn.
            with undone(self._tell_rest):
                code = self._train_each(train_one)
                if self._summaries:
                    self._tell_table()
            return code
        finally:
            self._tell_rest()

    def _train_each(self, train_one: TrainOne) -> int:
        heard: Sequence[int] = ()
        for number, (seed, flags) in enumerate(self._runs.items(), 1):
            if heard:  # by a run that was over
                return last_word(*heard)[1]
            say(f"seed {seed} ({number} of {len(self._runs)})")
            folder = _folder_of(flags)
            own = [*self._words, "--set", f"seed={seed}", "--run-dir", str(folder.path)]
            own += ["--resume", "auto"] if flags.is_auto else []
            before = folder.peek_json("summary.json")
            try:
                _check_wall(flags)
                code, heard = train_one(flags, own)
                is_over = False
            except RunOver as over:
                code, is_over = Exit.DONE, True
                say(str(over).partition(";")[0])
            try:
                summary = read_ended(folder)
            except CheckpointError as error:
                logger.error("%s", error)
                summary = None
            if summary is not None:
                self._summaries[folder.path] = summary
            if summary is None or (summary == before and not is_over):
                # Nothing says that this one is done.
                return code or (last_word(*heard)[1] if heard else Exit.TRY_AGAIN)
            if is_over or is_whole(summary):
                self._whole.append(folder.path)
            if not is_over and (code != Exit.DONE or summary["exit_reason"] == "terminated"):
                return code
            self._over.add(folder.path)
        return Exit.DONE

    def _tell_table(self) -> None:
        summaries = self._summaries
        whole = [summaries[each] for each in self._whole]
        table = describe_seeds([*summaries.values()], whole)
        say(f"\n{table}\nrun folders: {self._base}")
        if keys := differing([RunFolder(each) for each in summaries]):
            logger.warning("the seeds do not have the same settings: %s", ", ".join(keys))
        # The curve of one that was cut short would cut the picture short.
        drawn = self._whole or [*summaries]
        title = summaries[drawn[0]]["env_id"]
        picture = self._base / PICTURE
        what = "the curves of all seeds"
        why_not = save_picture(picture, what, lambda: draw_seeds(drawn, title))
        say(f"learning curves: {why_not or picture}")

    def _tell_rest(self) -> None:
        """Say how to go on, where one was ended or has failed after there was something to keep."""
        folders = [_folder_of(flags) for flags in self._runs.values()]
        if self._over >= {each.path for each in folders} or not any(f.exists() for f in folders):
            return
        which = ["--seeds", ",".join(map(str, self._runs)), "--run-dir", str(self._base)]
        command = shlex.join([*self._words, *which, "--resume", "auto"])
        logger.warning("to go on with the seeds that are left: %s %s", self._door, command)


def _check_flags(flags: RunFlags) -> None:
    """Raise ConfigError for what goes not with several seeds."""
    if (count := place_in().count) > 1:
        raise ConfigError(f"--seeds: does not go with {count} ranks: start them for each seed")
    if flags.is_resumed or flags.record is not None:
        fix = "say --resume auto to go on with those that have begun, and drop --record"
        raise ConfigError(f"--seeds: wants no single run to resume and no recording: {fix}")
    if flags.is_auto and flags.run_dir is None:
        raise ConfigError("--resume auto needs --run-dir, the folder of all seeds")
    if sets(flags.overrides, "seed"):
        raise ConfigError("--set: seed: --seeds names the seeds: drop either")


def _check_one(seed: int, flags: RunFlags, *, is_last: bool) -> None:
    """Raise for a run that could neither begin nor go on, unless it is over."""
    folder = _folder_of(flags)
    if folder.exists() and not flags.is_auto:
        folder.check_new("go on with it by --resume auto, or name another folder")
    with suppress(RunOver):
        stop = _settings_of(flags).stop
        if not is_last and all(getattr(stop, key) is None for key in StopSection.model_fields):
            fix = "say --set stop.env_steps=N"
            raise ConfigError(f"--seeds: seed {seed} would never end for the next to begin: {fix}")
    if folder.exists() and (other := folder.load_config().seed) != seed:
        raise ConfigError(f"{folder.path} holds a run of seed {other}: name another folder")
    read_ended(folder)


def _check_wall(flags: RunFlags) -> None:
    """Raise RunOver for a seed that has had its time: each start of a single run has it anew."""
    folder = _folder_of(flags)
    if (folder.peek_json("summary.json") or {}).get("exit_reason") != "wall_s":
        return
    had_s, has_s = folder.load_config().stop.wall_s, _settings_of(flags).stop.wall_s
    if had_s is not None and has_s is not None and has_s <= had_s:
        raise RunOver(
            f"the run is over: it had the {had_s:,.12g} seconds of stop.wall_s, and goes on with "
            "more, or with none"
        )


def _settings_of(flags: RunFlags) -> RunConfig:
    settled = settle(flags)
    config, _ = check_run(settled._replace(config=chosen_config(settled)))
    return config


def _folder_of(flags: RunFlags) -> RunFolder:
    assert flags.run_dir is not None
    return RunFolder(flags.run_dir)
