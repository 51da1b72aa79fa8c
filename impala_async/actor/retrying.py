"""How an actor deals with a learner with which it gets nowhere: it says little, and finds out
why, as far as a plain connection can tell.

Runs on: sampler thread; `SeldomLog` on the link thread too; `Inquiry._ask` on the inquiry thread
"""

import contextlib
import logging
import math
import socket
import threading
import time
from collections.abc import Callable

from impala_async.output import EVERY_S

CONNECT_S = 3.0
UNKNOWN = "it is not known yet why"


class SeldomLog:
    """Says of each kind of line, which is its text before any arguments, one in ten seconds."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._said_at: dict[str, float] = {}

    def info(self, text: str, *args: object) -> None:
        self._say(logging.INFO, text, args)

    def warning(self, text: str, *args: object) -> None:
        self._say(logging.WARNING, text, args)

    def _say(self, level: int, text: str, args: tuple[object, ...]) -> None:
        now = self._clock()
        if now - self._said_at.get(text, -math.inf) >= EVERY_S:
            self._said_at[text] = now
            self._logger.log(level, text, *args)


Log = logging.Logger | SeldomLog


class Inquiry:
    """Asks in a thread, since to look up a name may take long; anew whenever it is asked."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._found = UNKNOWN
        self._thread: threading.Thread | None = None

    def why(self, wait_s: float = 0.2) -> str:
        """Return what is known now; a later call returns what is found out after this one."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._ask, name="inquiry", daemon=True)
            self._thread.start()
        self._thread.join(wait_s)
        return self._found

    def _ask(self) -> None:
        self._found = why_silent(self._url)


def why_silent(url: str) -> str:
    """One clause; takes up to `CONNECT_S`, and what it takes to look up the name."""
    host, _, port = url.removeprefix("tcp://").rpartition(":")
    try:
        connection = socket.create_connection((host.strip("[]"), int(port)), CONNECT_S)
    except socket.gaierror:
        return f"the name {host} does not resolve"
    except ConnectionRefusedError:
        return "the connection is refused, nothing listens there"
    except TimeoutError:
        return "there is no answer at all from that host"
    except OSError as error:
        return f"there is no way to it ({error.strerror or error})"
    except (ValueError, UnicodeError):
        return "that is no address"
    with contextlib.closing(connection):
        return "something listens there, but has said nothing: it may be starting, or no learner"
