"""All doors share this: flags, logging, and the way errors leave a process.

A door imports modules that take long behind `run_door`, where Ctrl-C is taken care of.
"""

import argparse
import difflib
import errno
import logging
import os
import re
import select
import shlex
import sys
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from io import TextIOWrapper
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn

from impala_async import __version__, errors
from impala_async.config.packaged import find_config, packaged_configs
from impala_async.files import FULL
from impala_async.output import flush_output, told_of, write_unhurried
from impala_async.processes import Interrupted, begin, inherited_fds, last_word, quit_at_once
from impala_async.user_code import one_line

if TYPE_CHECKING:
    from rich.console import Console

    from impala_async.runs.folder import RunFolder
    from impala_async.runs.start import RunFlags

# The value of `--resume` that begins a run, or goes on with it.
AUTO = "auto"
MOST_SEEDS = 1000
# The system has no more disk, open files or memory. ZeroMQ has errors of its own.
SCARCE = (*FULL, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
PACKAGE = __name__.partition(".")[0]
OUR_BUG = "error: this is a bug of impala-async; please report it with the lines above\n"

logger = logging.getLogger(__name__)


class DoorParser(argparse.ArgumentParser):
    """Knows what settings are meant by flags that do not exist, and prints for whoever listens."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        given = [word.partition("=")[0] for word in (sys.argv[1:] if args is None else args)]
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            meant = map(_meant, unknown if "--set" in self._option_string_actions else ())
            hint = next((f"; did you mean {flag}?" for flag in meant if flag), "")
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        for flag in given:
            # argparse would drop the first value without a word.
            if flag.startswith("--") and flag != "--set" and given.count(flag) > 1:
                self.error(f"argument {flag}: is given {given.count(flag)} times")
        return parsed

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        self._print_message(message or "", sys.stderr)
        flush_output()
        sys.exit(status)


def _meant(word: str) -> str:
    """The flag that may be meant by one that there is not, or by a word where none belongs."""
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
    is_console = Path(sys.argv[0]).name == "impala-async"
    return f"impala-async {door}" if is_console else f"python -m impala_async.{door}"


def new_parser(door: str, description: str) -> argparse.ArgumentParser:
    """A parser that also knows the version, and the command that was typed."""
    parser = DoorParser(prog=command_of(door), description=description, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"impala-async {__version__}")
    return parser


def add_settings_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that say what a run is, and where: those of `launch` too."""
    parser.add_argument(
        "--config",
        type=_config_file,
        metavar="FILE",
        help="settings: a TOML file, a run's config.json, or the name of one that is packaged: "
        + ", ".join(packaged_configs()),
    )
    change = "change one setting; may be repeated (config.json in a run folder has them all)"
    add_common_flags(parser, change, "the run folder")


def add_run_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `learner` and `train`."""
    add_settings_flags(parser)
    parser.add_argument(
        "--resume",
        nargs="?",
        const=True,
        default=False,
        choices=[AUTO],
        metavar=AUTO,
        help="continue the run in --run-dir from its checkpoint; with auto begin it there if it "
        "has not begun, for a command that is run again and again",
    )
    parser.add_argument(
        "--record",
        type=typed_path,
        metavar="FILE",
        help="write all that actors send to this new file, for replay",
    )


def run_flags_of(args: argparse.Namespace) -> "RunFlags":
    """The flags of `learner` and `train`, as they were given."""
    from impala_async.runs.start import RunFlags

    return RunFlags(
        args.config,
        tuple(args.overrides),
        args.run_dir,
        is_resumed=args.resume is True,
        is_auto=args.resume == AUTO,
        record=args.record,
    )


def add_common_flags(parser: argparse.ArgumentParser, change: str, folder: str) -> None:
    """`--set`, with this help, and `--run-dir`, which is this folder."""
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        dest="overrides",
        help=change,
    )
    told = f"{folder} (default: a new one in runs/)"
    parser.add_argument("--run-dir", type=typed_path, metavar="DIR", help=told)


def typed_path(text: str) -> Path:
    """A path as it was typed, `~` included: a shell leaves that behind a `=` as it is."""
    if not text:
        raise argparse.ArgumentTypeError("wants a path, got nothing")
    # Path.expanduser raises where there is no such user.
    return Path(os.path.expanduser(text))


def seeds_of(text: str) -> list[int]:
    """The seeds of a flag: `0-4` for five of them, or a list of numbers and ranges, by commas."""
    seeds: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part.strip())
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if not first <= last < first + MOST_SEEDS - len(seeds):
            raise argparse.ArgumentTypeError(
                f"wants whole numbers such as 0-4 or 0,2,5, {MOST_SEEDS} at most, got {text[:80]!r}"
            )
        seeds += range(first, last + 1)
    return list(dict.fromkeys(seeds))


def add_learner_flag(parser: argparse.ArgumentParser) -> None:
    """The flag of `actor` and `actors`."""
    parser.add_argument(
        "--learner",
        required=True,
        metavar="URL",
        help="where the learner takes trajectories, for example tcp://127.0.0.1:5555, or its run "
        "folder, if this host has it, which names the place whenever it is looked for; the key of "
        "the run, where it has one, is that of the folder or of IMPALA_ASYNC_KEY",
    )


def check_learner(where: str) -> None:
    """Raise ConfigError for what can be neither an address of a learner nor its run folder, and for
    a key in the environment that is none."""
    from impala_async.actor.address import check_address, is_folder
    from impala_async.wire.keys import key_in_environment

    key_in_environment()
    if not is_folder(where):
        wants = "wants tcp://HOST:PORT, or a run folder that this host has"
        check_address(where, f"--learner: {wants}")


def _config_file(name: str) -> Path:
    try:
        return find_config(typed_path(name))
    except errors.ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def start_logging(who: str = "") -> "Console":
    """Log lines through the one console of this process, on stderr; each says `who` it is, where
    others write beside it."""
    from rich.console import Console
    from rich.logging import RichHandler

    write_unhurried()
    console = Console(stderr=True)
    if console.is_terminal:
        handler: logging.Handler = RichHandler(console=console, show_path=False)
        form = f"{who}%(message)s"
    else:
        handler = logging.StreamHandler(sys.stderr)
        form = f"%(asctime)s %(levelname)s {who}%(message)s"
    logging.basicConfig(level=logging.INFO, format=form, datefmt="%H:%M:%S", handlers=[handler])
    return console


def tell_death(code: int, folder: "RunFolder", door: str) -> None:
    """Say how a learner ended that left no summary, and how its run goes on behind that door."""
    from impala_async.config.ranks import place_in

    place = place_in()
    run = shlex.quote(str(place.run_of(folder.path)))
    resume = f"{command_of(door)} --resume --run-dir {run}"
    if place.count > 1:
        resume = f"torchrun as before, with --resume --run-dir {run}"
    lost = "there was no checkpoint yet"
    if folder.has_checkpoint():
        lost = "what it trained since its last checkpoint is lost"
    go_on = f"; {lost}; to go on: {resume}" if folder.exists() else ""
    logger.error("the learner %s%s", errors.how_it_ended(code), go_on)


def start_told_of(
    what: str, tell: Callable[[str], None] = logger.info
) -> AbstractContextManager[None]:
    """Tell of what this process does to start, unless one of ours that has started it tells."""
    return nullcontext() if inherited_fds() else told_of(f"starting: {what}", tell)


def run_door(body: Callable[[], int]) -> int:
    """The exit code of a door. A user's mistake is told in a line, our bug by its traceback."""
    said, stderr = "", sys.stderr
    try:
        begin()
        stderr = sys.stderr
        _check_current_folder()
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, TextIOWrapper):
                # A character that an encoding does not have is written as an escape.
                stream.reconfigure(errors="backslashreplace")
        with quit_at_once():
            code = body()
    except errors.ImpalaAsyncError as error:
        from impala_async.config.ranks import prefix_here

        code = error.exit_code
        # An environment that hangs is no bug of ours, and its stack was told.
        if code == errors.Exit.BUG and not isinstance(error, errors.EnvHangsError):
            said = traceback.format_exc()
        prefix = "" if code == errors.Exit.DONE else f"error: {prefix_here()}"
        said += "".join(f"{prefix}{errors.plain(line)}\n" for line in str(error).splitlines())
    except KeyboardInterrupt as error:
        said, code = last_word(*error.args if isinstance(error, Interrupted) else ())
    except Exception as error:
        said, code = f"{traceback.format_exc()}{OUR_BUG}", errors.Exit.BUG
        # torch may not be loaded here: its errors of a GPU are known by their words.
        is_of_gpu = isinstance(error, RuntimeError) and "out of memory" in str(error)
        is_scarce = isinstance(error, MemoryError) or is_of_gpu
        is_scarce |= getattr(error, "errno", None) in SCARCE
        # A fork that is refused; a descriptor that is not ready would be a bug of ours.
        is_scarce |= isinstance(error, BlockingIOError) and "_execute_child" in said
        if isinstance(error, BrokenPipeError) and not _has_reader(sys.stdout):
            said, code = "", errors.Exit.DONE
        elif is_scarce or str(error) == "can't start new thread":
            what = " ".join(str(error).split()) or "no memory is left"
            what += " (standard output)" if _is_full(sys.stdout) else ""
            said, code = f"error: {what}\n", errors.Exit.TRY_AGAIN
        elif isinstance(error, ImportError) and (error.name or "").split(".")[0] != PACKAGE:
            # A user's own code has said so before. Under a small ulimit -v torch fails like this.
            said = f"error: a package that this needs cannot be loaded: {one_line(error)}\n"
            code = errors.Exit.CONFIG
    # An environment may have taken the streams away, or closed what is beneath them.
    # One that took the place of the first, and never waits for its reader, stays.
    sys.stderr = sys.stderr or stderr
    with suppress(OSError, ValueError):
        sys.stderr.write(said)
    flush_output()
    return code


def _check_current_folder() -> None:
    try:
        os.getcwd()
    except FileNotFoundError:  # paths lead nowhere, and torch ends the process when it is imported
        gone = "the current folder was removed: change to one that is there"
        raise errors.ConfigError(gone) from None


def _is_full(stream: IO[str] | None) -> bool:
    """Whether it still holds what it could not write."""
    try:
        if stream is not None and not stream.closed:
            stream.flush()
    except OSError as error:
        return error.errno in FULL
    return False


def _has_reader(stream: IO[str] | None) -> bool:
    if stream is None or stream.closed:  # then no pipe of it is broken
        return True
    poll = select.poll()
    # For nothing: that there is nobody at the other end is told in any case.
    poll.register(stream.fileno(), 0)
    return not poll.poll(0)
