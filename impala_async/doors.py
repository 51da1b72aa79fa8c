"""What all doors share: flags, settings from flags, logging, and the way errors leave a process.

What takes long to import, a door imports behind `run_door`, where Ctrl-C is taken care of.
"""

import argparse
import json
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from impala_async import __version__
from impala_async.errors import (
    EXIT_BUG,
    EXIT_INTERRUPTED,
    CheckpointError,
    ConfigError,
    ImpalaAsyncError,
)
from impala_async.interrupts import quit_at_once

if TYPE_CHECKING:
    from rich.console import Console

    from impala_async.config import RunConfig
    from impala_async.config_ingest import BindSection
    from impala_async.learner.run_folder import RunFolder

# What a resumed run may not change: its checkpoints and its actors' data depend on them.
FIXED_SECTIONS = ("env", "model", "policies", "trajectory")
FIXED_KEYS = ("algorithm.name", "algorithm.optimizer", "algorithm.normalize_returns")
# How torsos are computed: neither a checkpoint nor data knows of it.
LOOSE_KEYS = ("model.precision",)
# Where `train` tells its learner which ports it has chosen. They hold for one start, so they are
# no settings: those are written down, and a resumed run would insist on ports long taken.
BIND_VARIABLE = "IMPALA_ASYNC_BIND"
CONSOLE_COMMAND = "impala-async"


def new_parser(door: str, description: str) -> argparse.ArgumentParser:
    """A parser that also knows the version, and the command that was typed."""
    is_console = Path(sys.argv[0]).name == CONSOLE_COMMAND
    prog = f"{CONSOLE_COMMAND} {door}" if is_console else f"python -m impala_async.{door}"
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("--version", action="version", version=f"impala-async {__version__}")
    return parser


def add_run_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `learner` and `train`."""
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="settings: a TOML file, or a run's config.json"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        dest="overrides",
        help="change one setting; may be repeated (docs/configuration.md lists them all)",
    )
    parser.add_argument(
        "--run-dir", type=Path, metavar="DIR", help="the run folder (default: a new one in runs/)"
    )
    parser.add_argument(
        "--resume", action="store_true", help="continue the run in --run-dir from its checkpoint"
    )


def check_learner_url(url: str) -> None:
    """Raise ConfigError for what no learner can be reached at."""
    found = re.fullmatch(r"tcp://(?:[^:/]+|\[[0-9a-fA-F:]+\]):(\d{1,5})", url)
    if found is None or not 0 < int(found[1]) < 65536:
        raise ConfigError(f"--learner: wants tcp://HOST:PORT, got {url!r}")


def names_an_env(args: argparse.Namespace) -> bool:
    """Whether the flags say what to run, by a file or by env.id."""
    from impala_async.config_load import merge_overrides

    env = merge_overrides({}, args.overrides).settings.get("env")
    return args.config is not None or (isinstance(env, dict) and "id" in env)


def default_config_path() -> Path:
    """The config of `train` without arguments: in the package, or beside it in a checkout."""
    package = Path(__file__).parent
    inside = package / "configs" / "cartpole.toml"
    return inside if inside.exists() else package.parent / "configs" / "cartpole.toml"


def check_run(args: argparse.Namespace, default: Path | None) -> "tuple[RunConfig, RunFolder]":
    """Settings and folder of a new or a resumed run, before anything is written."""
    from impala_async.config_load import load_config
    from impala_async.learner.run_folder import RunFolder, default_run_path

    if args.resume:
        return _check_resumed(args)
    config = load_config(args.config if names_an_env(args) else default, args.overrides)
    folder = RunFolder(args.run_dir or default_run_path(config))
    folder.check_new()
    return config, folder


def _check_resumed(args: argparse.Namespace) -> "tuple[RunConfig, RunFolder]":
    from impala_async.config_load import merge_overrides, validate_config
    from impala_async.learner.run_folder import RunFolder

    if args.config is not None:
        raise ConfigError("--resume: a run keeps its settings; drop --config and use --set")
    folder = RunFolder.open(args.run_dir)
    before = _fixed(folder.load_config())
    config = validate_config(*merge_overrides(folder.load_settings(), args.overrides))
    changed = [
        f"--set: {key}: cannot change in a resumed run, from {_shown(before[key])} to "
        f"{_shown(value)}: start a new one"
        for key, value in _fixed(config).items()
        if value != before[key]
    ]
    if changed:
        raise ConfigError("\n".join(changed))
    _check_not_over(config, folder.read_json("summary.json"))
    return config, folder


def _fixed(config: "RunConfig") -> dict[str, Any]:
    """What a resumed run may not change, by its key."""
    sections = config.model_dump(mode="json", by_alias=True)
    settings = {
        f"{section}.{key}": value
        for section, keys in sections.items()
        if isinstance(keys, dict)
        for key, value in keys.items()
    }
    return {
        key: value
        for key, value in settings.items()
        if (key in FIXED_KEYS or key.partition(".")[0] in FIXED_SECTIONS) and key not in LOOSE_KEYS
    }


def _shown(value: Any) -> str:
    """As it is written after `--set`."""
    return "none" if value is None else json.dumps(value)


def _check_not_over(config: "RunConfig", summary: dict[str, Any] | None) -> None:
    """A run that has had all it was to have would only write its summary again, and worse."""
    for key, done in (("env_steps", "env_steps_trained"), ("updates", "updates")):
        limit, made = getattr(config.stop, key), summary.get(done, 0) if summary else 0
        if not isinstance(made, int):
            raise CheckpointError(f"summary.json: {done}: wants a number, got {made!r}: remove it")
        if limit is not None and made >= limit:
            raise ConfigError(
                f"stop.{key}: {made:,} of {limit:,} are trained already: raise it, as with "
                f"--set stop.{key}={2 * max(limit, made):_}, or evaluate the run"
            )


def bind_of_this_start(bind: "BindSection") -> dict[str, str]:
    """The environment that tells a learner where to listen in this start."""
    return {BIND_VARIABLE: bind.model_dump_json()}


def with_bind_of_this_start(config: "RunConfig") -> "RunConfig":
    """The settings for this start, with the ports that `train` has chosen if it has."""
    from impala_async.config_ingest import BindSection

    chosen = os.environ.get(BIND_VARIABLE)
    if chosen is None:
        return config
    return config.model_copy(update={"bind": BindSection.model_validate_json(chosen)})


def start_logging() -> "Console":
    """Log lines through the one console of this process, on stderr."""
    from rich.console import Console
    from rich.logging import RichHandler

    console = Console(stderr=True)
    if console.is_terminal:
        handler: logging.Handler = RichHandler(console=console, show_path=False)
        form = "%(message)s"
    else:
        handler = logging.StreamHandler(sys.stderr)
        form = "%(asctime)s %(levelname)s %(message)s"
    logging.basicConfig(level=logging.INFO, format=form, datefmt="%H:%M:%S", handlers=[handler])
    return console


def run_door(body: Callable[[], int]) -> int:
    """The exit code of a door. What a user can mend is one line; a bug of ours is a traceback.

    Ctrl-C ends it at once, until the body takes that over.
    """
    try:
        with quit_at_once():
            return body()
    except ImpalaAsyncError as error:
        if error.exit_code == EXIT_BUG:
            traceback.print_exc()
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except Exception:
        traceback.print_exc()
        print(
            "error: this is a bug of impala-async; please report it with the lines above",
            file=sys.stderr,
        )
        return EXIT_BUG
