"""Whether a start begins a run or goes on with one, and with which settings and folder: from the
flags of a door, before anything is written."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from impala_async.config.load import by_key, load_config, sets
from impala_async.config.mistakes import shown
from impala_async.config.packaged import packaged_configs
from impala_async.config.ranks import place_in
from impala_async.config.run import RunConfig
from impala_async.errors import CheckpointError, ConfigError, InUseError, RunOver
from impala_async.files import MOST_FLOAT
from impala_async.runs.folder import UNSAVED, RunFolder, default_run_path

# A resumed run may not change these: its checkpoints and its actors' data depend on them.
FIXED_SECTIONS = ("env", "model", "policies", "trajectory")
FIXED_KEYS = tuple(
    f"algorithm.{key}" for key in ("name", "optimizer", "normalize_returns", "intrinsic_reward")
)
# How torsos are computed, and how long is waited: neither a checkpoint nor data knows of it.
LOOSE_KEYS = ("model.precision", "env.step_timeout_s")
# The keys of `stop` that end a run for good, not only this start, and what the summary calls them.
REACHED = {
    "env_steps": "env_steps_trained",
    "updates": "updates",
    "mean_return": "mean_return_100",
    "eval_return": "best_eval_return",
}


class RunFlags(NamedTuple):
    """All that a door was told of a run, and of where it is; once settled, what follows from it."""

    config: Path | None = None
    overrides: Sequence[str] = ()
    run_dir: Path | None = None
    is_resumed: bool = False
    """Whether it goes on with a run; where `is_auto` is set, `settle` decides it."""
    is_auto: bool = False
    """The command is given again and again, and others may give it at the same moment."""
    record: Path | None = None


def settle(flags: RunFlags) -> RunFlags:
    """The flags with the folder of this rank, and with the decision of `--resume auto`. Raises
    ConfigError for what goes not with it, and InUseError where the learner before still has the
    folder: on a file system of several hosts it may seem to, for a while, when its host has died.
    """
    flags = _of_rank(flags)
    if not flags.is_auto:
        return flags
    if flags.run_dir is None:
        where = "the folder of the run to begin or to continue"
        raise ConfigError(f"--resume auto needs --run-dir, {where}")
    if flags.record is not None:
        raise ConfigError(
            "--record: wants a new file at each start, and --resume auto names the same: drop one"
        )
    folder = _folder_at(flags.run_dir, flags)
    if not folder.exists():
        # A rank that the run did not have before goes on with it, too.
        return flags._replace(is_resumed=RunFolder(place_in().run_of(flags.run_dir)).exists())
    folder.hold()
    folder.let_go()
    return flags._replace(is_resumed=True)


def _of_rank(flags: RunFlags) -> RunFlags:
    """Where there are other ranks, each has a run folder of its own in that of the run."""
    place = place_in()
    if (flags.is_resumed or flags.is_auto) and flags.run_dir is not None:
        place.check_whole(flags.run_dir)
    if place.count == 1:
        return flags
    if flags.run_dir is None:
        raise ConfigError(f"--run-dir: name one: the {place.count} ranks of a run share its folder")
    if flags.record is not None:
        raise ConfigError(f"--record: does not go with {place.count} ranks")
    return flags._replace(run_dir=place.folder(flags.run_dir))


def chosen_config(flags: RunFlags) -> Path | None:
    """The file of settings of `train`: CartPole's, where nothing says what is to be trained."""
    is_open = not (flags.is_resumed or flags.config or sets(flags.overrides, "env.id"))
    return packaged_configs()["cartpole"] if is_open else flags.config


def check_run(flags: RunFlags) -> tuple[RunConfig, RunFolder]:
    """Settings and folder of a new or a resumed run, of flags that are settled. Raises ConfigError,
    CheckpointError, RunOver, or InUseError where the command is given again and again."""
    return _check_resumed(flags) if flags.is_resumed else _check_new(flags)


def _folder_at(path: Path, flags: RunFlags) -> RunFolder:
    folder = RunFolder(path)
    if flags.is_auto:  # others may begin it, or go on with it, at the same moment
        folder.in_use_error = InUseError
    return folder


def _check_new(flags: RunFlags) -> tuple[RunConfig, RunFolder]:
    config = load_config(flags.config, flags.overrides)
    folder = _folder_at(flags.run_dir or default_run_path(config), flags)
    folder.check_new()
    return config, folder


def _check_resumed(flags: RunFlags) -> tuple[RunConfig, RunFolder]:
    if flags.config is not None and not flags.is_auto:
        raise ConfigError("--resume: a run keeps its settings; drop --config and use --set")
    if flags.run_dir is None:
        raise ConfigError("--resume needs --run-dir, the folder of the run to continue")
    folder = _folder_at(flags.run_dir, flags)
    first = RunFolder(place_in().run_of(flags.run_dir))
    # All have those of rank 0, whatever a rank knows that was not there for a while.
    known = first if first.exists() else folder
    known.check_resumable()
    before = _fixed(known.load_config())
    config = known.change(flags.overrides)
    if flags.config is not None:
        _check_same(flags.config, load_config(flags.config, flags.overrides), config)
    changed = [
        f"--set: {key}: cannot change in a resumed run, from {shown(before[key])} to "
        f"{shown(value)}: start a new one"
        for key, value in _fixed(config).items()
        if value != before[key]
    ]
    if changed:
        raise ConfigError("\n".join(changed))
    # All do as rank 0: their returns differ, and one may have been killed at the end.
    check_not_over(config, known.read_json("summary.json") or {})
    return config, folder


def _check_same(path: Path, given: RunConfig, config: RunConfig) -> None:
    """Raise ConfigError where a file that is given again sets a key to another value than the run
    has."""
    is_set, now = by_key(given, exclude_unset=True), by_key(config)
    differing = [
        f"{key} ({shown(value)} in the file, {shown(now[key])} in the run)"
        for key, value in by_key(given).items()
        if key in is_set and value != now[key]
    ]
    if differing:
        raise ConfigError(
            f"--config: {path} is not what this run has: {', '.join(differing)}: a run keeps its "
            "settings: put the file back and use --set, or name another folder"
        )


def _fixed(config: RunConfig) -> dict[str, Any]:
    return {
        key: value
        for key, value in by_key(config).items()
        if (key.partition(".")[0] in FIXED_SECTIONS or key in FIXED_KEYS) and key not in LOOSE_KEYS
    }


def check_not_over(config: RunConfig, summary: dict[str, Any]) -> None:
    """Raise RunOver for a run that has had all it was to have: it would only go on too long."""
    if summary.get("exit_reason") == UNSAVED:
        return
    of_actions = config.evaluate.kinds[0]
    for key, done in REACHED.items():
        limit, made = getattr(config.stop, key), summary.get(done)
        if key == "eval_return" and summary.get("best_eval_actions", of_actions) != of_actions:
            continue  # greedy returns are not to be compared with those of sampled actions
        # No run comes to more; a damaged summary may say so.
        if limit is not None and isinstance(made, int | float) and limit <= made <= MOST_FLOAT:
            raise RunOver(
                f"the run is over: stop.{key} is {limit:,.12g}, and it came to {made:,.12g}; to go "
                f"on, add --set stop.{key}=none or a larger number, and where the learning rate "
                "has come to its end a larger algorithm.schedule_env_steps"
            )


def is_over(folder: RunFolder) -> bool:
    """Whether no learner serves this run, and one that is started with the settings in its folder
    would only say that it is over. One that has a later end removes the summary when it is built.
    """
    summary = folder.peek_json("summary.json")
    if summary is None or folder.peek_json("service.json") is not None:
        return False
    try:
        check_not_over(folder.load_config(), summary)
    except RunOver:
        return True
    except (CheckpointError, ConfigError):  # its learner says so
        return False
    return False
