"""What actors say went wrong with them: environments that hang, and what they died of.

Runs on: event loop
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from impala_async.envs.watch import WHERES, say_hang
from impala_async.waiting import Wait

HANG_NAMES = ("hang_s", "hang_in", "hang_first", "hang_last")


class _Hang(NamedTuple):
    since: float
    line: Callable[[float], str]
    """Of the seconds."""
    wait: Wait


class ActorTroubles:
    """Owns the last word of each actor that is in trouble. `tell` takes a line."""

    def __init__(self, tell: Callable[[str], None], clock: Callable[[], float]) -> None:
        self._tell = tell
        self._clock = clock
        self._hangs: dict[bytes, _Hang] = {}
        self._last_death: str | None = None

    def hear_beat(self, session: bytes, rank: int, timers: Mapping[str, float]) -> None:
        """Its heartbeat says so as long as an environment hangs."""
        if not timers.keys() >= {*HANG_NAMES}:
            self._hangs.pop(session, None)
            return
        seconds, where, first, last = (int(timers[name]) for name in HANG_NAMES)
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
