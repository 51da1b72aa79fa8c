"""The train door: one learner and its actors on this machine."""

import argparse
import logging
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from impala_async import doors
from impala_async.config.packaged import packaged_configs
from impala_async.errors import ConfigError, Exit
from impala_async.launch.local import LocalRun
from impala_async.output import told_of
from impala_async.processes import hold, last_word, leave
from impala_async.user_code import one_line

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    parser = doors.new_parser(
        "train",
        "Train on this machine: one learner and train.num_actors actors. Without arguments: "
        "CartPole-v1, until the mean return of 100 episodes is 475.",
    )
    doors.add_run_flags(parser)
    told = "train with each seed, one after the other, in a folder of its own: 0-4, or a list"
    parser.add_argument("--seeds", type=doors.seeds_of, metavar="SEEDS", help=told)
    flags = list(sys.argv[1:] if argv is None else argv)
    args = parser.parse_args(flags)
    hold()  # `impala_async.run` starts us
    return doors.run_door(lambda: _train_each(args) if args.seeds else _train(args, flags))


def _train_each(args: argparse.Namespace) -> int:
    """Train with one seed after the other; the first that does not end by itself is the last."""
    from impala_async.config.load import load_config
    from impala_async.config.ranks import place_in
    from impala_async.runs.folder import RunFolder, default_run_path

    if (count := place_in().count) > 1:
        raise ConfigError(f"--seeds: does not go with {count} ranks: start them for each seed")
    if args.resume or args.record is not None:
        raise ConfigError("--seeds: wants new runs, without a recording: drop --resume, --record")
    flags = [] if (config := _choose_config(args)) is None else ["--config", str(config)]
    flags += [part for override in args.overrides for part in ("--set", override)]
    base = args.run_dir or default_run_path(load_config(config, args.overrides))
    runs = {}
    if (there := RunFolder(base)).exists():  # its picture would be lost
        there.check_new("name another folder for several seeds")
    for seed in args.seeds:
        own = {"config": config, "overrides": [*args.overrides, f"seed={seed}"]}
        runs[seed] = argparse.Namespace(**vars(args) | own | {"run_dir": base / f"seed-{seed}"})
        doors.check_run(runs[seed])
    ended_seeds = set[int]()
    try:
        return _train_these(base, runs, flags, ended_seeds)
    finally:
        _tell_rest(base, runs, flags, ended_seeds)


def _train_these(
    base: Path, runs: dict[int, argparse.Namespace], flags: list[str], ended_seeds: set[int]
) -> int:
    """Train them in turn, and note in `ended_seeds` those that have come to their end."""
    from impala_async.runs.folder import RunFolder

    code: int = Exit.DONE
    ended, heard = dict[Path, dict[str, Any]](), list[int]()
    for seed, one in runs.items():
        if heard:  # by a run that was over
            code = last_word(*heard)[1]
            break
        print(f"seed {seed} ({len(ended) + 1} of {len(runs)})", flush=True)
        code = _train(one, [*flags, "--set", f"seed={seed}", "--run-dir", str(one.run_dir)])
        heard = one.heard
        summary = RunFolder(one.run_dir).peek_json("summary.json")
        if summary is not None:
            ended[one.run_dir] = summary
        if code != Exit.DONE or summary is None or summary["exit_reason"] == "terminated":
            break
        ended_seeds.add(seed)
    if ended:
        _tell_seeds(base, ended)
    return code


def _tell_rest(
    base: Path, runs: dict[int, argparse.Namespace], flags: list[str], ended_seeds: set[int]
) -> None:
    """Say how to go on, where a seed was ended or has failed after there was something to keep."""
    from impala_async.runs.folder import RunFolder

    left = [seed for seed in runs if seed not in ended_seeds]
    begun = [seed for seed in left if RunFolder(runs[seed].run_dir).exists()]
    new = [str(seed) for seed in left if seed not in begun]
    words = [["--resume", "--run-dir", str(runs[seed].run_dir)] for seed in begun]
    if new:
        words.append([*flags, "--seeds", ",".join(new), "--run-dir", str(base)])
    if words and len(new) < len(runs):
        commands = [f"{doors.command_of('train')} {shlex.join(each)}" for each in words]
        logger.warning("to go on with the other seeds: %s", " && ".join(commands))


def _tell_seeds(base: Path, ended: dict[Path, dict[str, Any]]) -> None:
    from impala_async.files import write_whole
    from impala_async.runs.seeds import describe_seeds, draw_seeds

    first, *_ = summaries = [*ended.values()]
    print(f"\n{describe_seeds(summaries)}\nrun folders: {base}", flush=True)
    where = str(base / "learning_curve.png")
    try:
        with told_of("ending: drawing the curves of all seeds, with matplotlib", logger.info):
            write_whole(Path(where), draw_seeds([*ended], str(first["env_id"])))
    # matplotlib fails in its own ways, and the runs are over.
    except Exception as error:
        where = f"cannot be drawn: {one_line(error)}"
    print(f"learning curves: {where}", flush=True)


def _choose_config(args: argparse.Namespace) -> Path | None:
    """The file of settings: that of CartPole, where nothing says what is to be trained."""
    from impala_async.config.load import names_an_env

    is_open = not (args.resume or args.config or names_an_env(args.overrides))
    return packaged_configs()["cartpole"] if is_open else args.config


def _train(args: argparse.Namespace, flags: list[str]) -> int:
    from impala_async.config.ranks import place_in, share_of
    from impala_async.learner.meeting import Meeting

    with Meeting(place := place_in()):
        doors.settle_resume(args)
        if (chosen := _choose_config(args)) != args.config:
            args.config = chosen
            flags += ["--config", str(chosen)]
        config, folder = doors.check_run(args)
        num_actors = share_of(config, place).train.num_actors
        folder.check_free()
    doors.start_logging(place.prefix)
    if args.run_dir is None:
        flags += ["--run-dir", str(folder.path)]
    # Where the settings name no port any will do, at a later resume too.
    for key in ("data", "weights"):
        if key not in config.bind.model_fields_set:
            flags += ["--set", f"bind.{key}=tcp://127.0.0.1:*"]
    before = folder.read_json("summary.json")
    run = LocalRun(flags, folder.path)
    code = run.run(num_actors)
    args.heard = run.heard
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
    is_left = folder.exists() and not (args.resume or run.has_begun)
    is_cut = code == Exit.DONE and (is_left or folder.peek_json("service.json") is not None)
    is_told = code in (Exit.CONFIG, Exit.INTERRUPTED) and not (run.has_begun or is_left)
    if is_cut or not (is_told or code == Exit.DONE):
        doors.tell_death(code, folder, "train")
    return Exit.CONFIG if is_cut else code


if __name__ == "__main__":
    leave(main())
