"""The ranks meet at a start: who is missing is named, and one that cannot start tells the others.

They meet at a store of rank 0, whose address all know. torchrun starts and ends its ranks together,
and has a store of its own: there nobody is missing, and nothing needs to be told.

Runs on: main thread, before the service; a thread of its own meets the others
"""

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from impala_async.config.ranks import Place
from impala_async.errors import ConfigError, ImpalaAsyncError
from impala_async.output import Wait

if TYPE_CHECKING:
    from impala_async.training.ranks import Ranks

logger = logging.getLogger(__name__)

# Ranks may come after each other, as their hosts do.
START_S = 600.0
# One that cannot start lets the others know, and waits no longer for them.
TELL_S = 5.0
POLL_S = 0.05
HERE, HEARD, FAILED = "here", "heard", "failed"


@contextmanager
def joined(place: Place) -> "Iterator[Ranks]":
    """Within it the ranks of this learner can reach each other. ConfigError where one of them could
    not start."""
    from impala_async.training.ranks import Ranks, lost_told

    if place.count == 1:
        yield Ranks(place)
        return
    import torch.distributed as dist

    # Not here: a signal that asks for an end is not heard within it.
    meeting = _Meeting(place)
    meeting.start()
    wait = Wait(logger.info)
    while meeting.is_alive():
        meeting.join(POLL_S)
        wait.look(lambda s: f"waiting for {meeting.missing} ({s:.0f} s)")
    with lost_told():
        if meeting.error is not None:
            raise meeting.error
    try:
        yield Ranks(place)
    finally:
        dist.destroy_process_group()


@contextmanager
def failure_told(place: Place) -> Iterator[None]:
    """An error in here ends the other ranks too, which would wait for this one."""
    try:
        yield
    except ImpalaAsyncError as error:
        if place.count > 1 and not _is_torchrun():
            # They may not have come, or be gone already.
            with suppress(RuntimeError):
                _tell(place, str(error))
        raise


class _Meeting(threading.Thread):
    def __init__(self, place: Place) -> None:
        super().__init__(name="meeting", daemon=True)
        self._place = place
        self.error: BaseException | None = None
        self.missing = f"rank 0 at {_address()}" if not place.is_first else "the other ranks"

    def run(self) -> None:
        try:
            self._meet()
        except (RuntimeError, ConfigError) as error:  # a thread has no caller
            self.error = error

    def _meet(self) -> None:
        import torch
        import torch.distributed as dist

        number, count = self._place.number, self._place.count
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        patience = timedelta(seconds=START_S)
        if _is_torchrun():
            dist.init_process_group(backend, timeout=patience)
            return
        store = _open_store(self._place, START_S)
        store.set(f"{HERE}/{number}", b"")
        self._wait_for_all(store)
        dist.init_process_group(
            backend, timeout=patience, store=store, rank=number, world_size=count
        )

    def _wait_for_all(self, store: Any) -> None:
        give_up_at = time.monotonic() + START_S
        others = [number for number in range(self._place.count) if number != self._place.number]
        while missing := [number for number in others if not store.check([f"{HERE}/{number}"])]:
            for number in missing:
                if store.check([f"{FAILED}/{number}"]):
                    text = store.get(f"{FAILED}/{number}").decode()
                    store.set(f"{HEARD}/{self._place.number}", b"")
                    raise ConfigError(f"rank {number} cannot start: {text}")
            self.missing = f"{_say(missing)}, at {_address()}"
            if time.monotonic() > give_up_at:
                raise ConfigError(f"waited {START_S:.0f} s for {self.missing}")
            time.sleep(POLL_S)


def _tell(place: Place, text: str) -> None:
    store = _open_store(place, TELL_S)
    store.set(f"{FAILED}/{place.number}", text.encode())
    others = [number for number in range(place.count) if number != place.number]
    until = time.monotonic() + TELL_S
    # The store is gone with rank 0.
    while place.is_first and others and time.monotonic() < until:
        others = [n for n in others if not any(store.check([f"{k}/{n}"]) for k in (HEARD, FAILED))]
        time.sleep(POLL_S)


def _open_store(place: Place, patience_s: float) -> Any:
    import torch.distributed as dist

    host, _, port = _address().rpartition(":")
    patience = timedelta(seconds=patience_s)
    return dist.TCPStore(  # type: ignore[attr-defined]
        host, int(port), place.count, place.is_first, patience, wait_for_workers=False
    )


def _is_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def _address() -> str:
    return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


def _say(numbers: list[int]) -> str:
    *first, last = map(str, numbers)
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"
