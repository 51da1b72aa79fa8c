"""Ends an actor or `evaluate` that was told to end, though its environment does not come back: a
handler would never run. But the interpreter writes the number of a signal into a pipe, and a thread
reads that. It ends an actor that builds its network for long, too.

Runs on: stopper thread; `start` and `close` on the main thread
"""

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass

from impala_async.envs.faults import RUNNING, WAITED_FOR, tell_stderr
from impala_async.output import Wait
from impala_async.processes import REQUESTS, last_word, without_echo

LOOK_EVERY_S = 0.5
# A step, a reset or the network gets so long, that the actor may close what it has and say goodbye.
END_AFTER_S = 10.0


@dataclass(eq=False)
class Stopper:
    """Owns the thread. `whose` says who has the environments."""

    tell: Callable[[str], None]
    whose: Callable[[], str]
    _: KW_ONLY
    leave: Callable[[int], object] = os._exit
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._numbers: list[int] = []
        self._is_building = False
        self.take = without_echo(self._take, self.clock)

    def start(self) -> "Stopper":
        heard, self._wakeup = os.pipe()
        os.set_blocking(self._wakeup, False)
        self._before = signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        threading.Thread(target=self._run, args=(heard,), name="stopper", daemon=True).start()
        return self

    def close(self) -> None:
        # An environment that becomes a daemon closes all that is open.
        with suppress(OSError, ValueError):
            signal.set_wakeup_fd(self._before)
        with suppress(OSError):
            os.close(self._wakeup)

    @contextmanager
    def building(self) -> Iterator[None]:
        """The network is built in here: whoever is told to end waits for it no longer than for a
        step."""
        self._is_building = True
        try:
            yield
        finally:
            self._is_building = False

    def _take(self, number: int) -> None:
        """The second signal ends this process at once."""
        self._numbers.append(number)
        if len(self._numbers) > 1:
            self._end()
        self._told_at = self.clock()
        self._wait = Wait(self.tell, clock=self.clock)

    def look(self) -> None:
        """Tell of an environment that is waited for; end this process if that takes too long."""
        now = self.clock()
        call = RUNNING.look(now)
        if self._numbers and self._is_building and now >= self._told_at + END_AFTER_S:
            self.tell("the network is still being built, and is not waited for any longer")
            self._end()
            return
        if not self._numbers or call is None or not call[0].is_here:
            return  # nobody has told it to end, or it is about to
        blame, since = call
        hang = blame.describe(now - since, self.whose())
        left_s = self._told_at + END_AFTER_S - now
        if blame.where not in WAITED_FOR:
            self._end()  # it only starts
        elif left_s <= 0:
            self.tell(f"{hang}, and is not waited for any longer")
            self._end()
        else:
            another = "another signal ends it at once"
            self._wait.look(lambda _: f"ending within {left_s:.0f} s: {hang}; {another}")

    def _end(self) -> None:
        word, code = last_word(*self._numbers)
        tell_stderr(word.rstrip())
        self.leave(code)

    def _run(self, heard: int) -> None:
        while True:
            if select.select([heard], [], [], LOOK_EVERY_S if self._numbers else None)[0]:
                numbers = os.read(heard, 64)
                if not numbers:
                    os.close(heard)
                    return
                for number in REQUESTS:
                    for _ in range(numbers.count(number)):
                        self.take(number)
            else:
                self.look()
