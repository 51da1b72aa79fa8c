"""The launch door: a learner and actors on many hosts, where an engine starts the processes.

`launch slurm` submits a job; `launch ray` runs until the run is over.
"""

import argparse
import shutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from impala_async import doors
from impala_async.config.learner import is_loopback
from impala_async.config.load import sets
from impala_async.errors import ConfigError, Exit
from impala_async.launch import slurm
from impala_async.processes import leave

if TYPE_CHECKING:
    from impala_async.config.run import RunConfig
    from impala_async.runs.folder import RunFolder

MOST = 1024
_PORTS = ("data", "weights")


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    # argparse would lose where they begin.
    end = words.index("--") if "--" in words else len(words)
    args = _parser().parse_args(words[:end])
    return doors.run_door(lambda: int(args.launch(args, words[end + 1 :])))


def _parser() -> argparse.ArgumentParser:
    parser = doors.new_parser("launch", "Run a learner and its actors on many hosts, by an engine.")
    engines = parser.add_subparsers(required=True, metavar="ENGINE")
    told = "Write a job script and submit it by sbatch. Flags behind -- are those of sbatch."
    example = "for example: launch slurm --config cartpole --nodes 4 -- --time=24:00:00"
    how: dict[str, Any] = {"description": told, "epilog": example, "allow_abbrev": False}
    by_slurm = engines.add_parser("slurm", help="submit a job", **how)
    told = "Run a learner here, and actors on the nodes of the Ray cluster that RAY_ADDRESS names."
    how = {"description": told, "allow_abbrev": False}
    by_ray = engines.add_parser("ray", help="place actors on a cluster", **how)
    for engine, launch, each in ((by_slurm, _slurm, "on each node"), (by_ray, _ray, "in all")):
        doors.add_settings_flags(engine)
        engine.set_defaults(launch=launch)
        told = f"so many actors {each} (default: 1)"
        engine.add_argument("--actors", type=int, default=1, metavar="K", help=told)
    by_slurm.add_argument("--nodes", type=int, default=1, metavar="M", help="nodes (default: 1)")
    told = "only show the script"
    by_slurm.add_argument("--print", action="store_true", dest="is_shown", help=told)
    return parser


def _slurm(args: argparse.Namespace, sbatch_flags: list[str]) -> int:
    _check_number("--nodes", args.nodes)
    config, folder, is_resumed = _check(args, args.nodes * args.actors)
    if not (args.is_shown or shutil.which("sbatch")):
        raise ConfigError(
            "there is no sbatch here, which submits jobs: use --print to see this one"
        )
    stored = {key: getattr(config.bind, key) for key in _PORTS}
    binds = [
        f"bind.{key}={url}"
        for key, url in _binds(args, config, is_resumed).items()
        if url != stored[key]
    ]
    script = slurm.job_script(
        folder.absolute,
        _settings(args, binds),
        sbatch_flags,
        [sys.executable, "-m", "impala_async"],
        num_nodes=args.nodes,
        num_actors=args.actors,
    )
    if args.is_shown:
        print(script, end="")
        return Exit.DONE
    said, path = slurm.submit(script, folder.absolute)
    print(f"{said}\njob script: {path}\nrun folder: {folder.path}")
    return Exit.DONE


def _ray(args: argparse.Namespace, more: list[str]) -> int:
    from impala_async.launch.ray import RayRun, connect

    if more:
        raise ConfigError(f"launch ray: takes no flags behind --, got {more[0]}")
    config, folder, is_resumed = _check(args, args.actors)
    doors.start_logging()
    connect()
    folder.check_free()
    words = ["--resume", doors.AUTO, "--run-dir", str(folder.path), *_settings(args, [])]
    return RayRun(words, _binds(args, config, is_resumed), folder.path).run(args.actors)


def _check(args: argparse.Namespace, num_actors: int) -> "tuple[RunConfig, RunFolder, bool]":
    """The run that is begun, or gone on with, and which of both. Another job may be at work in its
    folder."""
    from impala_async.runs.folder import RunFolder
    from impala_async.runs.start import RunFlags, check_run

    _check_number("--actors", args.actors)
    has_run = args.run_dir is not None and RunFolder(args.run_dir).exists()
    # A file of settings may be given again for a run that is there, as the learner's own flags say.
    flags = RunFlags(args.config, args.overrides, args.run_dir, is_resumed=has_run, is_auto=has_run)
    config, folder = check_run(flags)
    if config.pace.is_lockstep and config.train.num_actors != num_actors:
        raise ConfigError(
            f"train.num_actors ({config.train.num_actors}): in lockstep the learner waits for as "
            f"many actors, and {num_actors} are to be started: set it to that"
        )
    return config, folder, has_run


def _check_number(flag: str, number: int) -> None:
    if not 1 <= number <= MOST:
        raise ConfigError(f"{flag}: wants a whole number from 1 to {MOST}, got {number}")


def _settings(args: argparse.Namespace, binds: list[str]) -> list[str]:
    """The flags of a learner that say what is trained, for any current folder."""
    config = [] if args.config is None else ["--config", str(args.config.absolute())]
    return [*config, *(word for each in (*args.overrides, *binds) for word in ("--set", each))]


def _binds(args: argparse.Namespace, config: "RunConfig", is_resumed: bool) -> dict[str, str]:
    """Where the learner listens: for all hosts at any ports, unless the settings say otherwise. A
    run that `train` began has it in its config.json that only its own host reaches it."""
    binds = {}
    is_of_run = is_resumed or (args.config is not None and args.config.suffix == ".json")
    for key in _PORTS:
        url = getattr(config.bind, key)
        is_own = is_of_run and is_loopback(url) and not sets(args.overrides, f"bind.{key}")
        is_set = key in config.bind.model_fields_set and not is_own
        binds[key] = url if is_set else "tcp://0.0.0.0:*"
    return binds


if __name__ == "__main__":
    leave(main())
