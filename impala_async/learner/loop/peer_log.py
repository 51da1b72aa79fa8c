"""The log lines that peers and strangers cause: they are few, and each stays one line.

Runs on: event loop
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from impala_async.envs.faults import WHERES, say_hang
from impala_async.output import Wait
from impala_async.wire.messages import MAX_COLUMNS, plain

MAX_LINES_PER_S = 20
STRANGERS_EVERY_S = 10.0
HANG_NAMES = ("hang_s", "hang_in", "hang_first", "hang_last")


class PeerLog:
    """Says on a logger what peers make it say, and how much more there would have been."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float]) -> None:
        self._logger = logger
        self._clock = clock
        self._second = 0
        self._num_lines = 0
        self._num_left_out = 0

    def info(self, text: str, *args: object) -> None:
        self._say(logging.INFO, text, args)

    def warning(self, text: str, *args: object) -> None:
        self._say(logging.WARNING, text, args)

    def _say(self, level: int, text: str, args: tuple[object, ...]) -> None:
        second = int(self._clock())
        if second != self._second:
            self._second, self._num_lines = second, 0
        if self._num_lines >= MAX_LINES_PER_S - 1:
            self._num_left_out += 1
            return
        if self._num_left_out:
            self._logger.warning("%d more lines like these", self._num_left_out)
            self._num_lines, self._num_left_out = self._num_lines + 1, 0
        self._num_lines += 1
        quoted = [plain(arg) if isinstance(arg, str) else arg for arg in args]
        self._logger.log(level, text, *quoted)


class Strangers:
    """Tells what strangers do at both sockets: a line now and then, not one for each of them."""

    def __init__(self, tell: Callable[[str], None], clock: Callable[[], float]) -> None:
        self._tell = tell
        self._clock = clock
        self._due = clock() + STRANGERS_EVERY_S
        self._told: Counter[str] = Counter()
        self._num_told = 0

    def look(self, hellos: Counter[bytes], num_given_way: int, cut_off: Counter[str]) -> None:
        """Tell what is new, if it is time; then the hellos, by their routes, are forgotten."""
        if self._clock() < self._due:
            return
        self._due = self._clock() + STRANGERS_EVERY_S
        parts = [
            _count(n, "connection") + f" cut off that {why}"
            for why, n in (cut_off - self._told).items()
        ]
        if num_given_way > self._num_told:
            parts.append(_count(num_given_way - self._num_told, "session") + " gave way")
        if parts:
            said = ""
            if hellos:
                total, routes = _count(hellos.total(), "hello"), _count(len(hellos), "connection")
                said = f"{total} over {routes}; "
            self._tell(f"strangers in {STRANGERS_EVERY_S:.0f} s: {said}{', '.join(parts)}")
        self._told, self._num_told = cut_off, num_given_way
        hellos.clear()


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


class _Hang(NamedTuple):
    since: float
    line: Callable[[float], str]
    """It is a function of the seconds."""
    wait: Wait


class ActorFailures:
    """Hears what went wrong with actors: environments that hang, and what they died of."""

    def __init__(self, tell: Callable[[str], None], clock: Callable[[], float]) -> None:
        self._tell = tell
        self._clock = clock
        self._hangs: dict[bytes, _Hang] = {}
        self._last_death: str | None = None

    def hear_beat(
        self, session: bytes, rank: int, timers: Mapping[str, float], longest_s: float
    ) -> None:
        """Its heartbeat says so as long as an environment hangs: no longer than its session."""
        seconds, where, first, last = (int(timers.get(name, -1)) for name in HANG_NAMES)
        if seconds < 0 or not 0 <= first <= last <= MAX_COLUMNS:
            self._hangs.pop(session, None)
            return
        seconds = min(seconds, math.ceil(longest_s))
        since = self._clock() - seconds
        former = self._hangs.get(session)
        wait = former.wait if former else Wait(self._tell, after_s=0.0, clock=self._clock)
        line = partial(say_hang, WHERES[where == 1], first, last, f"actor {rank}")
        self._hangs[session] = _Hang(since, line, wait)
        wait.look(lambda _: line(seconds))

    def hear_death(self, rank: int, why: str) -> str:
        """It said goodbye, and what it died of; that as a clause."""
        self._last_death = f"actor {rank} died of {why}"
        return f"it died of {why}"

    def report(self, live: set[bytes]) -> dict[str, object]:
        """The longest hang of the sessions that live."""
        self._hangs = {session: hang for session, hang in self._hangs.items() if session in live}
        hang = min(self._hangs.values(), key=lambda hang: hang.since, default=None)
        return {
            "actor/hang": hang and hang.line(self._clock() - hang.since),
            "actor/last_death": self._last_death,
        }
