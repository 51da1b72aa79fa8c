"""Signals that ask a process to end, and the end itself.

Modules that are being imported answer an exception from nowhere with long tracebacks, or worse.
So behind a door a signal ends the process at once, with one word, until a service takes it over,
and what was begun by then is taken back. A process that is started as a child hears no Ctrl-C
before its own door is open, because an interpreter that starts would answer with a traceback as
well. Nothing is lost: the kernel keeps it.

Python waits at its end for threads that are no daemons, and multiprocessing for such processes.
Many a simulator leaves one that never ends, so `leave` waits no longer than a moment.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from impala_async.errors import EXIT_DONE, EXIT_INTERRUPTED
from impala_async.output import flush_output

CTRL_C = {signal.SIGINT}
# A terminal that is closed asks like SIGTERM, but where we were started to ignore it, as by nohup.
REQUESTS = (
    signal.SIGINT,
    signal.SIGTERM,
    *([] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]),
)
# To a learner that serves: its run is given up, as an actor cannot run. Nobody else sends this one,
# as schedulers send SIGUSR1.
GIVE_UP = signal.SIGRTMIN + 1
# Threads that end by themselves once Python ends, as those of an idle pool do, need much less.
GRACE_S = 2.0
_undoings: list[Callable[[], object]] = []


class Interrupted(KeyboardInterrupt):
    """One of `REQUESTS`, as our own handlers raise it with its number: foreign code may raise a
    KeyboardInterrupt too."""


def interrupt(number: int, frame: object) -> None:
    """A handler of all; Python's own of Ctrl-C raises what foreign code could have raised."""
    raise Interrupted(number)


def last_word(*numbers: int) -> tuple[str, int]:
    """The last word and the exit code of a process that such signals have ended."""
    if numbers and signal.SIGINT not in numbers:
        return "terminated\n", EXIT_DONE
    return "interrupted\n", EXIT_INTERRUPTED


def is_ctrl_c(error: BaseException) -> bool:
    """Whether a user has raised it. Where Python's own handler is left, anybody may have."""
    is_left = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return isinstance(error, KeyboardInterrupt if is_left else Interrupted)


@contextmanager
def quit_at_once() -> Iterator[None]:
    """In here a signal ends this process on the spot, unless somebody else takes it over."""
    before = {number: signal.signal(number, _quit) for number in REQUESTS}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, CTRL_C)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def undone(undo: Callable[[], object]) -> Iterator[None]:
    """When this process ends on the spot in here, this is called before."""
    _undoings.append(undo)
    try:
        yield
    finally:
        _undoings.remove(undo)


def end_silently() -> None:
    """From now on Ctrl-C ends this process without a word: it belongs to one that has heard it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, CTRL_C)


@contextmanager
def deaf_children() -> Iterator[None]:
    """A process that is started in here hears no Ctrl-C before it calls one of the others."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, CTRL_C)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _quit(number: int, frame: object) -> None:
    for each in REQUESTS:
        signal.signal(each, signal.SIG_IGN)  # another one must not cut this short
    word, code = last_word(number)
    try:
        for undo in reversed(_undoings):
            with suppress(OSError):
                undo()
        os.write(2, word.encode())
    finally:
        os._exit(code)


def leave(code: int) -> NoReturn:
    """End this process with that exit code, within `GRACE_S`; a signal ends it at once."""
    for number in REQUESTS:
        signal.signal(number, lambda *_: os._exit(code))
    if _left():
        threading.Thread(target=_insist, args=(code,), name="leave", daemon=True).start()
    sys.exit(code)


def _insist(code: int) -> None:
    time.sleep(GRACE_S)
    left = _left()
    if not left:
        return  # it ends by itself
    flush_output()
    names = ", ".join(f"{type(each).__name__} {each.name}" for each in left)
    os.write(2, f"ending without what the environment left running: {names}\n".encode())
    for each in left:
        if not isinstance(each, threading.Thread):
            each.terminate()
    os._exit(code)


def _left() -> list[Any]:
    """The threads and processes that Python waits for."""
    found: list[Any] = threading.enumerate()
    if "multiprocessing" in sys.modules:
        found += sys.modules["multiprocessing"].active_children()
    return [each for each in found if not each.daemon and each is not threading.main_thread()]
