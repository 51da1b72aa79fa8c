"""Ctrl-C in the first moments of a process, when nobody is there yet who knows what it means.

Modules that are being imported answer an exception from nowhere with long tracebacks, or worse. So
behind a door Ctrl-C ends the process at once, with one word, until a service takes the signal over.
And what is started as a child hears nothing before its own door is open, because an interpreter
that starts would answer with a traceback as well. Nothing is lost: the kernel keeps the signal.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from impala_async.errors import EXIT_INTERRUPTED

CTRL_C = {signal.SIGINT}


@contextmanager
def quit_at_once() -> Iterator[None]:
    """In here Ctrl-C ends this process on the spot, unless somebody else takes it over."""
    before = signal.signal(signal.SIGINT, _quit)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, CTRL_C)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


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
    try:
        os.write(2, b"interrupted\n")
    finally:
        os._exit(EXIT_INTERRUPTED)
