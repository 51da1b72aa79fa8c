"""The train door: one learner and its actors on this machine.

`python -m impala_async.train` without arguments solves CartPole-v1.
"""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from impala_async.doors import (
    add_run_flags,
    check_run,
    default_config_path,
    new_parser,
    run_door,
    start_logging,
    tell_death,
)
from impala_async.errors import EXIT_CONFIG, EXIT_DONE, EXIT_INTERRUPTED
from impala_async.launch.local import LocalRun
from impala_async.processes import leave

if TYPE_CHECKING:
    from impala_async.config.learner import BindSection
    from impala_async.runs.folder import RunFolder


def main(argv: Sequence[str] | None = None) -> int:
    """Check the settings, then run the processes."""
    parser = new_parser(
        "train",
        "Train on this machine: one learner and train.num_actors actors. Without arguments: "
        "CartPole-v1, until the mean return of 100 episodes is 475.",
    )
    add_run_flags(parser)
    args = parser.parse_args(argv)
    return run_door(lambda: _train(args))


def _train(args: argparse.Namespace) -> int:
    if not args.resume and not _names_an_env(args):
        args.config = default_config_path()
    config, folder = check_run(args)
    folder.check_free()
    start_logging()
    overrides = [*args.overrides, *_any_ports(config.bind)]
    before = folder.read_json("summary.json")
    run = LocalRun(_learner_flags(args, folder, overrides), folder.path)
    code = run.run(config.train.num_actors)
    # A learner that was told to end while it started has nothing to sum up.
    is_told = run.verdict or code in (EXIT_CONFIG, EXIT_DONE)
    is_told = is_told or (code == EXIT_INTERRUPTED and not folder.exists())
    if not is_told and folder.read_json("summary.json") == before:
        tell_death(code, folder, "train")
    return code


def _names_an_env(args: argparse.Namespace) -> bool:
    """Whether the flags say what to run, by a file or by env.id."""
    from impala_async.config.load import merge_overrides

    env = merge_overrides({}, args.overrides).settings.get("env")
    return args.config is not None or (isinstance(env, dict) and "id" in env)


def _any_ports(bind: "BindSection") -> list[str]:
    """Settings for what names no port: any will do, at a later resume too."""
    unnamed = [key for key in ("data", "weights") if key not in bind.model_fields_set]
    return [f"bind.{key}=tcp://127.0.0.1:*" for key in unnamed]


def _learner_flags(
    args: argparse.Namespace, folder: "RunFolder", overrides: Sequence[str]
) -> list[str]:
    """The same flags for the learner."""
    flags = ["--run-dir", str(folder.path)]
    if args.resume:
        flags.append("--resume")
    for name, value in (("--config", args.config), ("--record", args.record)):
        flags += [] if value is None else [name, str(value)]
    return flags + [part for override in overrides for part in ("--set", override)]


if __name__ == "__main__":
    leave(main())
