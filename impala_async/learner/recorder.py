"""The actor stream to a file: every message that is admitted, in the order of admission.

The loop copies a message and goes on; a thread writes. Where the disk is slower than the stream, no
credit is given out until it has caught up, so nothing is lost and memory is bounded. When the disk
takes no more, the recording ends there, loudly, and training goes on.

Runs on: event loop; the file is written on the recorder thread, and opened before there is a loop
"""

import asyncio
import errno
import logging
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from impala_async import __version__
from impala_async.errors import RecordingError
from impala_async.learner.handoff import ByteQueue, ClosedError, Inbox, on_thread
from impala_async.learner.slots import Arrival
from impala_async.schema import Schema
from impala_async.weights import Version
from impala_async.wire.codec import PLAIN
from impala_async.wire.recording import (
    OPENING,
    End,
    Reader,
    Record,
    Recorded,
    Start,
    encode_record,
)

logger = logging.getLogger(__name__)

MOST_WAITING_BYTES = 64 << 20
BUFFER_BYTES = 1 << 20
WARN_EVERY_S = 10.0


class Recorder:
    """Owns the file of a recording, which it makes at once."""

    def __init__(
        self, path: Path, run_id: bytes, *, most_waiting_bytes: int = MOST_WAITING_BYTES
    ) -> None:
        self._path = path
        self._run_id = run_id
        self._most_waiting_bytes = most_waiting_bytes
        self._fd = _create(path)
        self._queue: ByteQueue[Record] | None = None
        self._writing: asyncio.Task[None] | None = None
        self._began_at = 0.0
        self._num_messages = 0
        self._num_bytes = 0
        self._behind_since: float | None = None
        self._behind_total_s = 0.0
        self._warn_at = -math.inf
        self._has_failed = False
        self.is_empty = False
        """Whether it could not be written, or did not stay, and there is not one message of it."""
        self._has_room: Callable[[], None] = lambda: None

    @property
    def is_behind(self) -> bool:
        """Whether the disk must catch up before more may come."""
        if self._queue is None or self._has_failed:
            return False
        if self._behind_since is None and self._queue.waiting_bytes >= self._most_waiting_bytes:
            self._behind_since = now = time.monotonic()
            if now >= self._warn_at:
                self._warn_at = now + WARN_EVERY_S
                logger.warning(
                    "the recording is behind: %s takes less than the actors send, and they wait "
                    "for it (%.1f s so far)",
                    self._path,
                    self._behind_total_s,
                )
        return self._behind_since is not None

    def begin(
        self,
        first: Version,
        schema: Schema,
        settings: dict[str, Any],
        has_room: Callable[[], None],
    ) -> None:
        """Write down what follows, and start the thread. `has_room`: credit may flow again."""
        loop = asyncio.get_running_loop()
        self._has_room = has_room
        self._queue = ByteQueue(self._most_waiting_bytes // 4, Inbox(loop, self._note_written))
        self._began_at = time.monotonic()
        self._put(Start(self._run_id, *first, __version__, time.time(), schema, settings))
        self._writing = loop.create_task(on_thread("recorder", self._write_all), name="recorder")
        self._writing.add_done_callback(self._note_end)
        logger.info("recording to %s", self._path)

    def take(self, arrival: Arrival) -> None:
        """Keep an admitted message, of which everything is copied."""
        if self._queue is None or self._has_failed:
            return
        tail = b"" if arrival.episodes is None else arrival.episodes.tobytes()
        body = b"".join((arrival.obs.data.cast("B"), arrival.small.data.cast("B"), tail))
        arrived_s = time.monotonic() - self._began_at
        # It is recorded as it was before it was compressed for the network.
        plain = arrival.data._replace(body=None, codec=PLAIN)
        self._put(Recorded(arrival.peer.rank, arrived_s, plain, body), len(body))
        self._num_messages += 1

    async def finish(self, reason: str, update: int, digests: dict[str, str]) -> None:
        """Write the end, and wait until all is on the disk."""
        if self._queue is None or self._writing is None:
            return
        self._put(End(reason, update, digests))
        self._queue.close()
        await asyncio.wait([self._writing])
        if not self._has_failed:
            logger.info("recorded %d messages in %s", self._num_messages, self._path)

    def close(self) -> None:
        """However the run ended; twice does no harm. What is waiting is written all the same."""
        if self._queue is not None:
            self._queue.close()

    def withdraw(self) -> None:
        """Where the run never began, leave no empty file."""
        if self._queue is None:
            self._path.unlink(missing_ok=True)
            os.close(self._fd)

    def report(self) -> dict[str, object]:
        since = self._behind_since
        behind_s = 0.0 if since is None else time.monotonic() - since
        return {
            "recording/messages": self._num_messages,
            "recording/bytes": self._num_bytes,
            "recording/waiting_bytes": self._queue.waiting_bytes if self._queue else 0,
            "recording/behind_total_s": self._behind_total_s + behind_s,
        }

    def _put(self, record: Record, num_bytes: int = 0) -> None:
        assert self._queue is not None
        self._queue.put(record, num_bytes)

    def _write_all(self) -> None:
        """The body of the thread. Whatever has come is in the hands of the kernel soon after."""
        assert self._queue is not None
        with os.fdopen(self._fd, "ab", BUFFER_BYTES) as file:
            try:
                file.write(OPENING)
                while True:
                    for record in self._queue.get():
                        for part in encode_record(record):
                            file.write(part)
                            self._num_bytes += len(part)
                    file.flush()
            except ClosedError:
                file.flush()
                os.fsync(file.fileno())
                found = os.fstat(file.fileno())
                if not os.path.samestat(found, self._path.stat()):
                    raise FileNotFoundError(errno.ENOENT, "another file is there") from None
                if found.st_size != len(OPENING) + self._num_bytes:
                    what = "somebody else has cut it, or written to it"
                    raise FileNotFoundError(errno.ENOENT, what) from None

    def _note_end(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        self._has_failed = True
        is_lost = isinstance(error, FileNotFoundError)
        self.is_empty = is_lost or not _holds_message(self._path)
        logger.error(
            "the recording has ended, and training goes on without it: %s: %s. %s can be replayed",
            self._path,
            error.strerror if isinstance(error, OSError) else repr(error),
            "Nothing there" if self.is_empty else "What is in the file",
        )
        self._note_written()
        if not isinstance(error, OSError):
            # A bug of ours: the loop's handler ends the run.
            raise error

    def _note_written(self, _: None = None) -> None:
        """Credit flows again when half of what should wait at most is gone."""
        assert self._queue is not None
        is_behind = self._queue.waiting_bytes > self._most_waiting_bytes // 2
        if self._behind_since is not None and (self._has_failed or not is_behind):
            self._behind_total_s += time.monotonic() - self._behind_since
            self._behind_since = None
            self._has_room()


def _create(path: Path) -> int:
    """A new file, to append to: whatever somebody does to it then shows in its size.

    Raises:
        RecordingError: there is something already, or it cannot be written.
    """
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
    except FileExistsError:
        raise RecordingError(
            f"{path}: is there already, and a recording is of one start of a learner: name "
            "another file"
        ) from None
    except OSError as error:
        raise RecordingError(f"{path}: cannot be written: {error.strerror}") from None


def _holds_message(path: Path) -> bool:
    """Whether there is anything in it for `replay`."""
    try:
        return any(isinstance(record, Recorded) for _, record, _ in Reader(path).records())
    except RecordingError:
        return False
