"""All doors share this: flags, settings from flags, logging, and the way errors leave a process.

A door imports modules that take long behind `run_door`, where Ctrl-C is taken care of.
"""

import argparse
import contextlib
import difflib
import errno
import json
import logging
import os
import re
import select
import shlex
import sys
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn

from impala_async import __version__
from impala_async.errors import (
    EXIT_BUG,
    EXIT_DONE,
    EXIT_TRY_AGAIN,
    SHELL_SIGNAL,
    CheckpointError,
    ConfigError,
    EnvHangsError,
    ImpalaAsyncError,
    RunOver,
    how_it_ended,
)
from impala_async.output import flush_output, told_of, write_any_text, write_unhurried
from impala_async.processes import Interrupted, begin, inherited_fds, last_word, quit_at_once

if TYPE_CHECKING:
    from rich.console import Console

    from impala_async.config.learner import BindSection
    from impala_async.config.run import RunConfig
    from impala_async.runs.folder import RunFolder

# A resumed run may not change these: its checkpoints and its actors' data depend on them.
FIXED_SECTIONS = ("env", "model", "policies", "trajectory")
FIXED_KEYS = ("algorithm.name", "algorithm.optimizer", "algorithm.normalize_returns")
# How torsos are computed, and how long is waited: neither a checkpoint nor data knows of it.
LOOSE_KEYS = ("model.precision", "env.step_timeout_s")
# The keys of `stop` that end a run for good, and how the summary calls what it came to.
REACHED = {
    "env_steps": "env_steps_trained",
    "updates": "updates",
    "mean_return": "mean_return_100",
}
# Where `train` tells its learner which ports it has chosen. They hold for one start, so they are
# no settings: those are written down, and a resumed run would insist on ports long taken.
BIND_VARIABLE = "IMPALA_ASYNC_BIND"
# Where `train` tells an actor its number, and how often it was started before.
ACTOR_VARIABLE = "IMPALA_ASYNC_ACTOR"
CONSOLE_COMMAND = "impala-async"

logger = logging.getLogger(__name__)


class DoorParser(argparse.ArgumentParser):
    """Knows what settings are meant by flags that do not exist, and prints for whoever listens."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        given = [word.partition("=")[0] for word in (sys.argv[1:] if args is None else args)]
        parsed, unknown = self.parse_known_args(args, namespace)
        for action in self._actions:
            name = "/".join(action.option_strings)
            # argparse would drop the first value without a word.
            if isinstance(action, argparse._StoreAction) and given.count(name) > 1:
                hint = "; change single settings with --set" if name == "--config" else ""
                self.error(f"argument {name}: takes one value, and has {given.count(name)}{hint}")
        if unknown:
            pairs = zip(["", *unknown], unknown, strict=False)
            meant = [_meant(word) for before, word in pairs if not _is_value(before, word)]
            flags = " ".join(filter(None, meant)) if "--set" in self._option_string_actions else ""
            hint = f"; did you mean {flags}?" if flags else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return parsed

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        if message:
            self._print_message(message, sys.stderr)
        flush_output()
        sys.exit(status)


def _is_value(before: str, word: str) -> bool:
    """Whether a word stands behind a flag that has no value yet."""
    return before.startswith("-") and "=" not in before and not word.startswith("-")


def _meant(word: str) -> str:
    """The flags that may be meant by a flag that there is not, or a word where none belongs."""
    from impala_async.config.mistakes import key_like

    name, equals, _ = word.partition("=")
    if word.startswith("-") or equals:
        key = key_like(name.lstrip("-").replace("-", "_"))
        return f"--set {key}=VALUE" if key else ""
    if re.fullmatch(r"[\w./:-]+(-v\d+|:\w+)", word):
        return f"--set env.id={word}"
    near = difflib.get_close_matches(Path(word).stem, packaged_configs(), n=1)
    return f"--config {word if Path(word).is_file() else near[0]}" if near else ""


def command_of(door: str) -> str:
    """How to open a door in the way in which this one was opened."""
    is_console = Path(sys.argv[0]).name == CONSOLE_COMMAND
    return f"{CONSOLE_COMMAND} {door}" if is_console else f"python -m impala_async.{door}"


def new_parser(door: str, description: str) -> argparse.ArgumentParser:
    """A parser that also knows the version, and the command that was typed."""
    parser = DoorParser(prog=command_of(door), description=description, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"impala-async {__version__}")
    return parser


def add_run_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `learner` and `train`."""
    parser.add_argument(
        "--config",
        type=_config_file,
        metavar="FILE",
        help="settings: a TOML file, a run's config.json, or the name of one that is packaged: "
        + ", ".join(packaged_configs()),
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        dest="overrides",
        help="change one setting; may be repeated (config.json in a run folder has them all)",
    )
    parser.add_argument(
        "--run-dir",
        type=typed_path,
        metavar="DIR",
        help="the run folder (default: a new one in runs/)",
    )
    parser.add_argument(
        "--resume", action="store_true", help="continue the run in --run-dir from its checkpoint"
    )
    parser.add_argument(
        "--record",
        type=typed_path,
        metavar="FILE",
        help="write all that the learner takes from its actors to this new file, for `replay`",
    )


def typed_path(text: str) -> Path:
    """A path as it was typed, `~` included: a shell leaves that behind a `=` as it is."""
    # Path.expanduser raises where there is no such user.
    return Path(os.path.expanduser(text))


def check_learner_url(url: str) -> None:
    """Raise ConfigError for what no learner can be reached at."""
    from impala_async.config.learner import like_url

    like = like_url(url)
    is_port_known = like is not None and not like.endswith(":*")
    if like != url or not is_port_known:
        hint = f"; did you mean {like}?" if is_port_known else ""
        raise ConfigError(f"--learner: wants tcp://HOST:PORT, got {url!r}{hint}")


def names_an_env(args: argparse.Namespace) -> bool:
    """Whether the flags say what to run, by a file or by env.id."""
    from impala_async.config.load import merge_overrides

    env = merge_overrides({}, args.overrides).settings.get("env")
    return args.config is not None or (isinstance(env, dict) and "id" in env)


def packaged_configs() -> dict[str, Path]:
    """The configs by their names: they are in the package, or beside it in a checkout."""
    package = Path(__file__).parent
    folders = (package / "configs", package.parent / "configs")
    found = next((each for each in folders if (each / "cartpole.toml").exists()), folders[0])
    return {path.stem: path for path in sorted(found.glob("*.toml"))}


def default_config_path() -> Path:
    """The config of `train` without arguments."""
    return packaged_configs()["cartpole"]


def _config_file(name: str) -> Path:
    """A file by that name goes first."""
    path, packaged = typed_path(name), packaged_configs()
    if path.exists() or name in packaged:
        return path if path.exists() else packaged[name]
    near = difflib.get_close_matches(path.stem, packaged, n=1)
    if near or name == path.stem:
        hint = (
            f"; did you mean {near[0]}?" if near else f", and in the package {', '.join(packaged)}"
        )
        raise argparse.ArgumentTypeError(f"there is no file {name}{hint}")
    return path


def check_run(args: argparse.Namespace, default: Path | None) -> "tuple[RunConfig, RunFolder]":
    """Settings and folder of a new or a resumed run, before anything is written."""
    from impala_async.config.load import load_config
    from impala_async.runs.folder import RunFolder, default_run_path

    if args.resume:
        return _check_resumed(args)
    config = load_config(args.config if names_an_env(args) else default, args.overrides)
    folder = RunFolder(args.run_dir or default_run_path(config))
    folder.check_new()
    return config, folder


def _check_resumed(args: argparse.Namespace) -> "tuple[RunConfig, RunFolder]":
    from impala_async.config.load import merge_overrides, validate_config
    from impala_async.runs.folder import UNSAVED, RunFolder

    if args.config is not None:
        raise ConfigError("--resume: a run keeps its settings; drop --config and use --set")
    folder = RunFolder.open(args.run_dir)
    folder.check_resumable()
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
    summary = folder.read_json("summary.json")
    if summary is None or summary.get("exit_reason") != UNSAVED:
        check_not_over(config, summary)
    return config, folder


def _fixed(config: "RunConfig") -> dict[str, Any]:
    """The settings that a resumed run may not change, by their keys."""
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


def check_not_over(config: "RunConfig", summary: dict[str, Any] | None) -> None:
    """Raise RunOver for a run that has had all it was to have: it would only go on too long.

    `stop.wall_s` is of each start anew, and never over at the next one.
    """
    summary = summary or {}
    for key, done in REACHED.items():
        limit, made = getattr(config.stop, key), summary.get(done)
        # A mean has to be made first; it is the only one that may be null.
        if made is None and (done not in summary or key == "mean_return"):
            continue
        if not isinstance(made, int | float):
            raise CheckpointError(f"summary.json: {done}: wants a number, got {made!r}: remove it")
        if limit is None or made < limit:
            continue
        steps = 2 * max(config.stop.env_steps or 0, summary.get("env_steps_trained", 0))
        more = [f"stop.{key}={2 * max(limit, made):_}"]
        if key == "mean_return":
            more = ["stop.mean_return=none", f"stop.env_steps={steps:_}"]
        zero_at = config.algorithm.lr_is_0_at
        if key != "updates" and zero_at is not None and zero_at < steps:
            more.append(f"algorithm.schedule_env_steps={steps:_}")
        form = ",.6g" if key == "mean_return" else ","
        raise RunOver(
            f"the run is over: stop.{key} is {limit:{form}}, and it came to {made:{form}}; to go "
            f"on add {' '.join(f'--set {each}' for each in more)}, or evaluate the run"
        )


def bind_of_this_start(bind: "BindSection") -> dict[str, str]:
    """The environment that tells a learner where to listen in this start."""
    return {BIND_VARIABLE: bind.model_dump_json()}


def number_of_this_start(number: int, life: int) -> dict[str, str]:
    """The environment that tells an actor its number, and how often it was started before."""
    return {ACTOR_VARIABLE: f"{number} {life}"}


def actor_of_this_start() -> tuple[int, int]:
    """Number and life that whoever started this actor gave it; -1 and 0 if nobody did."""
    found = re.fullmatch(r"(\d{1,4}) (\d{1,9})", os.environ.get(ACTOR_VARIABLE, ""))
    return (int(found[1]), int(found[2])) if found else (-1, 0)


def with_bind_of_this_start(config: "RunConfig") -> "RunConfig":
    """The settings for this start, with the ports that `train` has chosen if it has."""
    from impala_async.config.learner import BindSection

    chosen = os.environ.get(BIND_VARIABLE)
    if chosen is None:
        return config
    return config.model_copy(update={"bind": BindSection.model_validate_json(chosen)})


def start_logging() -> "Console":
    """Log lines through the one console of this process, on stderr."""
    from rich.console import Console
    from rich.logging import RichHandler

    write_unhurried()
    console = Console(stderr=True)
    if console.is_terminal:
        handler: logging.Handler = RichHandler(console=console, show_path=False)
        form = "%(message)s"
    else:
        handler = logging.StreamHandler(sys.stderr)
        form = "%(asctime)s %(levelname)s %(message)s"
    logging.basicConfig(level=logging.INFO, format=form, datefmt="%H:%M:%S", handlers=[handler])
    return console


def tell_death(code: int, folder: "RunFolder", door: str, how: str = "") -> None:
    """Say how a learner ended that left no summary, and how its run goes on behind that door.

    An exit code above 128 stands for a signal, as in a shell.
    """
    if not how and code <= SHELL_SIGNAL:
        how = f"ended without a summary, with exit code {code}"
    resume = f"{command_of(door)} --resume --run-dir {shlex.quote(str(folder.path))}"
    lost = "; what it trained since its last checkpoint is lost"
    is_there = folder.exists() and not folder.is_elsewhere()
    go_on = f"{lost}; to go on: {resume}" if is_there else ""
    logger.error("the learner %s%s", how or how_it_ended(SHELL_SIGNAL - code), go_on)


def start_told_of(
    what: str, tell: Callable[[str], None] = logger.info
) -> AbstractContextManager[None]:
    """Tell of what is done in here to start this process, unless a process of ours started it: that
    one tells of it."""
    return nullcontext() if inherited_fds() else told_of(f"starting: {what}", tell)


def run_door(body: Callable[[], int]) -> int:
    """The exit code of a door. A user's mistake is told in a line, a bug of ours by its traceback.

    Ctrl-C ends it at once, until the body takes that over.
    """
    begin()
    write_any_text()
    code = _run(body)
    flush_output()
    return code


def _run(body: Callable[[], int]) -> int:
    try:
        with quit_at_once():
            return body()
    except ImpalaAsyncError as error:
        # An environment that hangs is no bug of ours, and its stack was told.
        if error.exit_code == EXIT_BUG and not isinstance(error, EnvHangsError):
            _tell(traceback.format_exc())
        prefix = "" if error.exit_code == EXIT_DONE else "error: "
        _tell("".join(f"{prefix}{line}\n" for line in str(error).splitlines()))
        return error.exit_code
    except KeyboardInterrupt as error:
        word, code = last_word(*error.args if isinstance(error, Interrupted) else ())
        _tell(word)
        return code
    except Exception as error:
        if isinstance(error, BrokenPipeError) and not _has_reader(sys.stdout):
            return EXIT_DONE
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            _tell(f"error: {error}\n")
            return EXIT_TRY_AGAIN
        _tell(traceback.format_exc())
        _tell("error: this is a bug of impala-async; please report it with the lines above\n")
        return EXIT_BUG


def _tell(text: str) -> None:
    if sys.stderr is not None:  # as it is where it was closed before
        with contextlib.suppress(OSError):
            sys.stderr.write(text)


def _has_reader(stream: IO[str] | None) -> bool:
    if stream is None:
        return True
    poll = select.poll()
    # For nothing: that there is nobody at the other end is told in any case.
    poll.register(stream.fileno(), 0)
    return not poll.poll(0)
