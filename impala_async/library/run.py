"""A run started from a program of one's own, by the processes of the train door; and what a run
left in its folder.

Those are children of this process and end with it. Their words go to `sys.stderr`, which a notebook
shows.
"""

import codecs
import json
import math
import os
import re
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from impala_async.config.load import load_config, sets
from impala_async.config.packaged import find_config, packaged_configs
from impala_async.errors import (
    CheckpointError,
    ConfigError,
    Exit,
    ImpalaAsyncError,
    ServiceError,
    how_it_ended,
)
from impala_async.files import path_of
from impala_async.launch.children import end_in_time, exit_code, spawn
from impala_async.launch.local import LEARNER_END_S
from impala_async.processes import Lifeline
from impala_async.runs.folder import RunFolder, default_run_path, find_run
from impala_async.runs.summary import read_reports

POLL_S = 0.05
CHUNK_BYTES = 1 << 16
# So much of the end of its output is looked through for the reason of an end.
MOST_LAST = 1 << 16
ERROR = "error: "
SUMMARY = "summary.json"
# The level and the message of a line as `start_logging` writes it; any other is a message.
_LOGGED = re.compile(r"^(?:\d\d:\d\d:\d\d ([A-Z]+) )?(.*)")


class Run:
    """A run by its folder, whoever started it; all is read when it is asked for."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._files = find_run(path_of("folder", folder))[0]
        self.folder = self._files.path

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"

    @property
    def summary(self) -> dict[str, Any]:
        """The end of the run in names and values; CheckpointError before there is one."""
        summary = self._files.read_json(SUMMARY)
        if summary is None:
            raise CheckpointError(f"{self.folder} has no {SUMMARY}: the run has not ended yet")
        return summary

    @property
    def metrics(self) -> dict[str, NDArray[np.float64]]:
        """Every metric that is a number, by each of its names: one per report, NaN where it has
        none."""
        reports = read_reports(self._files.metrics)
        names = dict.fromkeys(name for report in reports for name in report)
        return {
            name: np.array([each.get(name, np.nan) for each in reports], np.float64)
            for name in names
        }


def run(
    config: str | os.PathLike[str] | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    run_dir: str | os.PathLike[str] | None = None,
) -> Run:
    """Train to the end of a run, as `python -m impala_async.train` does, and return the run.

    `config` is a file, or the name of a config that is packaged; `overrides` are settings by their
    dotted keys, as {"stop.env_steps": 20_000}; `run_dir` is the run folder. Ctrl-C, or the
    interrupt of a notebook, saves and ends the run, and is raised here as KeyboardInterrupt. One
    that somebody else tells to end is saved, and raises ServiceError.
    """
    is_named = isinstance(config, str | os.PathLike | None)
    if not is_named or not isinstance(overrides, Mapping | None):
        wants = 'a file or a name, and overrides by their keys, like {"stop.env_steps": 20_000}'
        raise ConfigError(f"config: wants {wants}; got {config!r} and {overrides!r}")
    settings = [f"{key}={_as_toml(key, value)}" for key, value in (overrides or {}).items()]
    try:
        path = None if config is None else find_config(config)
    except ConfigError as error:
        raise ConfigError(f"config: {error}") from None
    if path is None and not sets(settings, "env.id"):
        path = packaged_configs()["cartpole"]
    checked = load_config(path, settings)
    where = default_run_path(checked) if run_dir is None else path_of("run_dir", run_dir)
    folder = RunFolder(Path(os.path.expanduser(where)))
    flags = ["--run-dir", str(folder.path), *(["--config", str(path)] if path else [])]
    code, said = _train([*flags, *(word for each in settings for word in ("--set", each))])
    if code != Exit.DONE:
        raise _error_of(code, said)
    told = "somebody has told the run to end, and it had not come to its own end"
    if not folder.exists():
        raise ServiceError(f"{told}: nothing was trained yet")
    if (folder.peek_json(SUMMARY) or {}).get("exit_reason") == "terminated":
        raise ServiceError(f"{told}: it is saved in {folder.path}")
    return Run(folder.path)


def _train(flags: list[str]) -> tuple[int, str]:
    """The exit code of the train door, and the end of what it said. An interrupt is passed on to
    it, and raised again when it has ended."""
    interrupt: KeyboardInterrupt | None = None
    theirs, written = os.pipe()
    with (
        closing(Lifeline()) as lifeline,
        os.fdopen(theirs, "rb", buffering=0) as output,
        _ctrl_c_raises(),
    ):
        with os.fdopen(written, "wb") as given:
            process = spawn("train", flags, lifeline, given)
        echo = _Echo(output.fileno())
        try:
            while not echo.has_ended:
                try:
                    echo.follow(process)
                except KeyboardInterrupt as error:
                    interrupt = error
                    process.send_signal(signal.SIGINT)
        finally:
            # Another exception may have come, as of a signal's handler of the program.
            end_in_time([process], 0.0, asked_s=LEARNER_END_S)
    if interrupt is not None:
        raise interrupt
    return exit_code(process.returncode), echo.last


class _Echo:
    """Writes down what comes through a pipe, and remembers the end of it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.last = ""
        self.has_ended = False

    def follow(self, process: "subprocess.Popen[bytes]") -> None:
        """Until the process has ended: what an environment left running may hold the pipe open."""
        while not self.has_ended:
            # Asked before: its last words may come between the look and the question. They are in
            # one chunk, as a pipe holds no more.
            has_exited = process.poll() is not None
            if select.select([self._fd], [], [], 0.0 if has_exited else POLL_S)[0]:
                data = os.read(self._fd, CHUNK_BYTES)
                text = self._decoder.decode(data)
                self.last = (self.last + text)[-MOST_LAST:]
                # A disk that is full ends no run, nor does a stderr that is closed, or that has not
                # got a character.
                with suppress(OSError, AttributeError, ValueError):
                    sys.stderr.write(text)
                    sys.stderr.flush()
                if not data:
                    process.wait()
                    has_exited = True
            self.has_ended = has_exited


@contextmanager
def _ctrl_c_raises() -> Iterator[None]:
    """A context in which Ctrl-C raises KeyboardInterrupt: the runner of an asyncio loop would only
    ask for the end of a task, which waits for us. A program that ignores the end of its children
    would never learn their exit codes."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield
        return
    ours: dict[int, Any] = {signal.SIGINT: signal.default_int_handler}
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        ours[signal.SIGCHLD] = signal.SIG_DFL
    kept = {number: signal.signal(number, handler) for number, handler in ours.items()}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def _error_of(code: int, said: str) -> BaseException:
    if code == Exit.INTERRUPTED:  # by somebody else
        return KeyboardInterrupt()
    lines = said.splitlines()
    told = [line.removeprefix(ERROR) for line in lines if line.startswith(ERROR)]
    kind: type[ImpalaAsyncError] = ConfigError if code == Exit.CONFIG else ServiceError
    level, last = _LOGGED.findall(lines[-1])[0] if lines else ("", "none")
    how = last if level == "ERROR" else f"the run {how_it_ended(code)}; its last line: {last}"
    return kind("\n".join(told) or how)


def _as_toml(key: str, value: Any) -> str:
    """A value as `--set` reads it."""
    if value is None:
        return "none"
    if isinstance(value, Mapping) and value and "." not in key:
        # As a whole it would take the place of all that the config has in that section.
        raise ConfigError(f"{key}: wants dotted keys, like {key}.{next(iter(value))}, got {value}")
    try:
        return _toml(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{key}: wants a value as TOML has it, got {value!r}: {error}") from None


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        items = (f"{json.dumps(str(key))} = {_toml(each)}" for key, each in value.items())
        return "{" + ", ".join(items) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if value is None:
        raise TypeError("None wants a dotted key of its own")
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, np.generic):
        value = value.item()
    # TOML writes what is not finite as Python does, and takes no DEL, which JSON leaves as it is.
    is_finite = not isinstance(value, float) or math.isfinite(value)
    text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return text if is_finite else repr(value)
