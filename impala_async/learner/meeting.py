"""The ranks meet at a start: who is missing is named, and one that cannot start tells the others.

They meet at a store of rank 0, whose address all know. torchrun starts and ends its ranks together,
and has a store of its own: there nobody is missing, and nothing needs to be told.

Runs on: main thread, before the service; a thread of its own meets the others
"""

import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from impala_async.config.ranks import Place, error_of, words_of
from impala_async.errors import ImpalaAsyncError, RankError
from impala_async.output import Wait
from impala_async.processes import TORCHRUN

if TYPE_CHECKING:
    from impala_async.training.ranks import Ranks

logger = logging.getLogger(__name__)

# Ranks may come after each other, as their hosts do.
START_S = 600.0
# One that cannot start is given so long to tell the others, and rank 0 to be heard.
TELL_S = 5.0
POLL_S = 0.05
HERE, HEARD, FAILED = "here", "heard", "failed"


class Meeting:
    """A context: an error within it, until the ranks have met, ends the others as well."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.has_begun = False
        self.missing = "the other ranks" if place.is_first else f"rank 0 at {_address()}"

    def __enter__(self) -> "Meeting":
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        is_alone = self.place.count == 1 or self.has_begun or _is_torchrun()
        if isinstance(error, ImpalaAsyncError) and not is_alone:
            words = words_of(error)
            # They may not have come, or be gone already.
            with suppress(RuntimeError, OSError):
                _beside(lambda: self._tell(words), TELL_S)

    @contextmanager
    def joined(self) -> "Iterator[Ranks]":
        """Within it the ranks of this learner can reach each other. ConfigError where one of them
        cannot start."""
        from impala_async.training.ranks import Ranks, lost_told

        self.has_begun = True
        if self.place.count == 1:
            yield Ranks(self.place)
            return
        import torch.distributed as dist

        wait = Wait(logger.info)
        with lost_told():
            _beside(self._meet, look=lambda: wait.look(self._say))
        try:
            yield Ranks(self.place)
        finally:
            dist.destroy_process_group()

    def _say(self, seconds: float) -> str:
        return f"waiting for {self.missing} ({seconds:.0f} s)"

    def _meet(self) -> None:
        import torch
        import torch.distributed as dist

        number, count = self.place.number, self.place.count
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        patience = timedelta(seconds=START_S)
        if _is_torchrun():
            dist.init_process_group(backend, timeout=patience)
            return
        store = self._open_store(START_S)
        store.set(f"{HERE}/{number}", b"")
        self._wait_for_all(store)
        self.missing = "all ranks to connect"
        dist.init_process_group(
            backend, timeout=patience, store=store, rank=number, world_size=count
        )

    def _wait_for_all(self, store: Any) -> None:
        give_up_at = time.monotonic() + START_S
        while missing := self._lacking(store, HERE):
            for number in missing:
                if store.check([f"{FAILED}/{number}"]):
                    words = store.get(f"{FAILED}/{number}")
                    store.set(f"{HEARD}/{self.place.number}", b"")
                    self._linger(store)
                    raise error_of(number, words)
            self.missing = f"{_named(missing)}, to meet at {_address()}"
            if time.monotonic() > give_up_at:
                raise RankError(f"waited {START_S:.0f} s for {self.missing}")
            time.sleep(POLL_S)

    def _tell(self, words: bytes) -> None:
        # Without an answer torch would show its stacks.
        host, _, port = _address().rpartition(":")
        while not self.place.is_first:
            with suppress(OSError), socket.create_connection((host, int(port)), TELL_S):
                break
            time.sleep(POLL_S)
        store = self._open_store(TELL_S)
        store.set(f"{FAILED}/{self.place.number}", words)
        self._linger(store)

    def _linger(self, store: Any) -> None:
        """Wait until all others know: the store is gone with rank 0."""
        until = time.monotonic() + TELL_S
        while self.place.is_first and self._lacking(store, HEARD, FAILED):
            if time.monotonic() > until:
                return
            time.sleep(POLL_S)

    def _lacking(self, store: Any, *words: str) -> list[int]:
        """The other ranks that have said none of these."""
        others = [number for number in range(self.place.count) if number != self.place.number]
        return [n for n in others if not any(store.check([f"{word}/{n}"]) for word in words)]

    def _open_store(self, patience_s: float) -> Any:
        import torch.distributed as dist

        host, _, port = _address().rpartition(":")
        patience = timedelta(seconds=patience_s)
        return dist.TCPStore(  # type: ignore[attr-defined]
            host, int(port), self.place.count, self.place.is_first, patience, wait_for_workers=False
        )


def _beside(
    work: Callable[[], None], most_s: float = math.inf, look: Callable[[], None] = lambda: None
) -> None:
    """Do it on a thread, which torch may hold for long: a signal that asks for an end is heard
    meanwhile. After `most_s` it is left alone."""
    found: list[BaseException] = []

    def body() -> None:
        try:
            work()
        except Exception as error:  # torch has errors of many kinds; none is to pass for a meeting
            found.append(error)

    thread = threading.Thread(target=body, name="meeting", daemon=True)
    thread.start()
    until = time.monotonic() + most_s
    while thread.is_alive() and time.monotonic() < until:
        thread.join(POLL_S)
        look()
    if found:
        raise found[0]


def _is_torchrun() -> bool:
    return TORCHRUN in os.environ


def _address() -> str:
    return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


def _named(numbers: list[int]) -> str:
    *first, last = map(str, numbers)
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"
