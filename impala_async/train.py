"""The train door: one learner and its actors on this machine."""

import logging
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from impala_async import doors
from impala_async.config.packaged import packaged_configs
from impala_async.errors import CheckpointError, ConfigError, Exit, RunOver
from impala_async.launch.local import LocalRun
from impala_async.processes import hold, last_word, leave

if TYPE_CHECKING:
    from impala_async.runs.folder import RunFolder
    from impala_async.runs.start import RunFlags

logger = logging.getLogger(__name__)


class _Ended(NamedTuple):
    """How a training ended: its exit code, and the signals that told it to."""

    code: int
    heard: list[int]


def main(argv: Sequence[str] | None = None) -> int:
    parser = doors.new_parser(
        "train",
        "Train on this machine: one learner and train.num_actors actors. Without arguments: "
        "CartPole-v1, until the mean return of 100 episodes is 475.",
    )
    doors.add_run_flags(parser)
    told = "train with each seed, one after the other, in a folder of its own: 0-4, or a list"
    parser.add_argument("--seeds", type=doors.seeds_of, metavar="SEEDS", help=told)
    words = list(sys.argv[1:] if argv is None else argv)
    args = parser.parse_args(words)
    hold()  # `impala_async.run` starts us

    def body() -> int:
        flags = doors.run_flags_of(args)
        return _train_each(flags, args.seeds) if args.seeds else _train(flags, words).code

    return doors.run_door(body)


def _train_each(flags: "RunFlags", seeds: Sequence[int]) -> int:
    """Train with one seed after the other; the first that does not end by itself is the last."""
    from impala_async.config.load import load_config
    from impala_async.config.ranks import place_in
    from impala_async.runs.folder import RunFolder, default_run_path
    from impala_async.runs.seeds import read_ended
    from impala_async.runs.start import RunFlags, check_run, settle

    if (count := place_in().count) > 1:
        raise ConfigError(f"--seeds: does not go with {count} ranks: start them for each seed")
    if flags.is_resumed or flags.record is not None:
        fix = "say --resume auto to go on with those that have begun, and drop --record"
        raise ConfigError(f"--seeds: wants no single run to resume and no recording: {fix}")
    if flags.is_auto and flags.run_dir is None:
        raise ConfigError("--resume auto needs --run-dir, the folder of all seeds")
    if given := [each for each in flags.overrides if each.partition("=")[0].strip() == "seed"]:
        raise ConfigError(f"--set: {given[-1]}: --seeds names the seeds: drop either")
    words = [] if flags.config is None else ["--config", str(flags.config)]
    words += [part for override in flags.overrides for part in ("--set", override)]
    base = flags.run_dir or default_run_path(load_config(_choose_config(flags), flags.overrides))
    if (there := RunFolder(base)).exists():  # its picture would be lost
        there.check_new("name another folder for several seeds")
    runs = {
        seed: RunFlags(
            flags.config,
            (*flags.overrides, f"seed={seed}"),
            _folder(base, seed),
            is_auto=flags.is_auto,
        )
        for seed in seeds
    }
    for seed, one in runs.items():
        folder = RunFolder(_folder(base, seed))
        with suppress(RunOver):
            settled = settle(one)
            check_run(settled._replace(config=_choose_config(settled)))
        if folder.exists() and (other := folder.load_config().seed) != seed:
            raise ConfigError(f"{folder.path} holds a run of seed {other}: name another folder")
        read_ended(folder)
    ended_seeds = set[int]()
    try:
        return _train_these(base, runs, words, ended_seeds)
    finally:
        _tell_rest(base, seeds, words, ended_seeds)


def _train_these(
    base: Path, runs: "dict[int, RunFlags]", words: list[str], ended_seeds: set[int]
) -> int:
    """Train them in turn, and note in `ended_seeds` those that have come to their end."""
    from impala_async.runs.folder import RunFolder
    from impala_async.runs.seeds import read_ended

    code: int = Exit.DONE
    ended, heard = dict[Path, dict[str, Any]](), list[int]()
    for number, (seed, flags) in enumerate(runs.items(), 1):
        if heard:  # by a run that was over
            code = last_word(*heard)[1]
            break
        print(f"seed {seed} ({number} of {len(runs)})", flush=True)
        where = _folder(base, seed)
        own = [*words, "--set", f"seed={seed}", "--run-dir", str(where)]
        own += ["--resume", doors.AUTO] if flags.is_auto else []
        try:
            _check_wall(RunFolder(where))
            code, heard = _train(flags, own)
            is_over = False
        except RunOver as over:
            code, is_over = Exit.DONE, True
            print(str(over).partition(";")[0], flush=True)
        try:
            summary = read_ended(RunFolder(where))
        except CheckpointError as error:
            logger.error("%s", error)
            summary = None
        if summary is None:  # it is not told that this one is done
            code = code or Exit.TRY_AGAIN
            break
        ended[where] = summary
        if not is_over and (code != Exit.DONE or summary["exit_reason"] == "terminated"):
            break
        ended_seeds.add(seed)
    if ended:
        _tell_seeds(base, ended)
    return code


def _check_wall(folder: "RunFolder") -> None:
    """Raise RunOver for a seed that has had its time: each start of a single run has it anew."""
    if (folder.peek_json("summary.json") or {}).get("exit_reason") == "wall_s":
        raise RunOver("the run is over: it had the seconds of stop.wall_s")


def _tell_rest(base: Path, seeds: Sequence[int], words: list[str], ended_seeds: set[int]) -> None:
    """Say how to go on, where a seed was ended or has failed after there was something to keep."""
    from impala_async.runs.folder import RunFolder

    if ended_seeds >= {*seeds} or not any(RunFolder(_folder(base, n)).exists() for n in seeds):
        return
    which = ["--seeds", ",".join(map(str, seeds)), "--run-dir", str(base), "--resume", doors.AUTO]
    command = f"{doors.command_of('train')} {shlex.join([*words, *which])}"
    logger.warning("to go on with the seeds that are left: %s", command)


def _folder(base: Path, seed: int) -> Path:
    return base / f"seed-{seed}"


def _tell_seeds(base: Path, ended: dict[Path, dict[str, Any]]) -> None:
    from impala_async.runs.folder import RunFolder
    from impala_async.runs.seeds import describe_seeds, differing, draw_seeds, is_whole
    from impala_async.runs.summary import PICTURE, save_picture

    # Those that were cut short would cut the picture short.
    whole = [where for where, summary in ended.items() if is_whole(summary)] or [*ended]
    first, *_ = summaries = [*ended.values()]
    print(f"\n{describe_seeds(summaries)}\nrun folders: {base}", flush=True)
    if keys := differing([RunFolder(each) for each in ended]):
        logger.warning("the seeds do not have the same settings: %s", ", ".join(keys))
    picture = base / PICTURE
    why_not = save_picture(
        picture, "the curves of all seeds", lambda: draw_seeds(whole, first["env_id"])
    )
    print(f"learning curves: {why_not or picture}", flush=True)


def _choose_config(flags: "RunFlags") -> Path | None:
    """The file of settings: that of CartPole, where nothing says what is to be trained."""
    from impala_async.config.load import names_an_env

    is_open = not (flags.is_resumed or flags.config or names_an_env(flags.overrides))
    return packaged_configs()["cartpole"] if is_open else flags.config


def _train(flags: "RunFlags", words: list[str]) -> _Ended:
    """Run a learner and its actors; `words` are its flags, and `flags` the same, parsed."""
    from impala_async.config.ranks import place_in, share_of
    from impala_async.learner.meeting import Meeting
    from impala_async.runs.start import check_run, settle

    words = [*words]
    with Meeting(place := place_in()):
        flags = settle(flags)
        if (chosen := _choose_config(flags)) != flags.config:
            flags = flags._replace(config=chosen)
            words += ["--config", str(chosen)]
        config, folder = check_run(flags)
        num_actors = share_of(config, place).train.num_actors
        folder.check_free()
    doors.start_logging(place.prefix)
    if flags.run_dir is None:
        words += ["--run-dir", str(folder.path)]
    # Where the settings name no port any will do, at a later resume too.
    for key in ("data", "weights"):
        if key not in config.bind.model_fields_set:
            words += ["--set", f"bind.{key}=tcp://127.0.0.1:*"]
    before = folder.read_json("summary.json")
    run = LocalRun(words, folder.path)
    code = run.run(num_actors)
    return _Ended(_code_of_end(run, code, folder, before, flags.is_resumed), run.heard)


def _code_of_end(
    run: LocalRun,
    code: int,
    folder: "RunFolder",
    before: dict[str, Any] | None,
    is_resumed: bool,
) -> int:
    """The exit code of this door, where that of the run is `code`; `before` is the summary that lay
    there at its start. Tells of a death of which nothing else tells, and withdraws a run that has
    not begun."""
    is_refused = code in (Exit.CONFIG, Exit.TRY_AGAIN)
    if is_refused and folder.path.exists() and folder.is_taken():
        return code  # by another one at the same moment, as the learner has said
    if not (run.verdict or run.has_begun or folder.exists()):
        # Actors have said no more in their logs than that they were ended.
        folder.withdraw(with_logs=True)
    if run.verdict or folder.peek_json("summary.json") not in (None, before):
        return code
    # A learner that was told to end while it started, or found a setting wrong, has lost nothing,
    # and withdrawn a new run. Code of one's own may have ended it on the spot (os._exit).
    is_left = folder.exists() and not (is_resumed or run.has_begun)
    is_cut = code == Exit.DONE and (is_left or folder.peek_json("service.json") is not None)
    is_told = code in (Exit.CONFIG, Exit.INTERRUPTED) and not (run.has_begun or is_left)
    if is_cut or not (is_told or code == Exit.DONE):
        doors.tell_death(code, folder, "train")
    return Exit.CONFIG if is_cut else code


if __name__ == "__main__":
    leave(main())
