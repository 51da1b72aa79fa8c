"""The actor stream to a file: every message that is admitted, in the order of admission. Where the
disk is slower, no credit is given out until it has caught up. When it takes no more, the recording
ends there, loudly, and training goes on.

Runs on: event loop; the file is written on the recorder thread, and opened before there is a loop
"""

import asyncio
import contextlib
import errno
import functools
import logging
import os
import queue
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from impala_async import __version__
from impala_async.errors import RecordingError
from impala_async.learner.handoff import Inbox, on_thread
from impala_async.learner.slots import Arrival
from impala_async.output import SeldomLog
from impala_async.schema import Schema
from impala_async.weights import Version
from impala_async.wire.messages import PLAIN
from impala_async.wire.recording import OPENING, End, Reader, Record, Recorded, Start, encode_record

logger = logging.getLogger(__name__)

MOST_WAITING_BYTES = 64 << 20
BUFFER_BYTES = 1 << 20
PAUSE_S = 0.05


class Recorder:
    """Owns the file of a recording, which it makes at once."""

    def __init__(self, path: Path, run_id: bytes) -> None:
        # Code of the user's own, imported later, may change the current folder.
        self._path, self._run_id = path.absolute(), run_id
        # A new file, to append to: whatever somebody does to it then shows in its size.
        how = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        try:
            self._fd = os.open(path, how, 0o600)
        except OSError as error:
            why = f"cannot be written: {error.strerror}"
            if isinstance(error, FileExistsError):
                one = "a recording is of one start of a learner"
                why = f"is there already, and {one}: name another file"
            raise RecordingError(f"{path}: {why}") from None
        # None is the end. Each of the two counts has one thread that adds to it.
        self._queue = queue.SimpleQueue[Record | None]()
        self._queued_bytes = self._written_bytes = 0
        self._writing: asyncio.Task[None] | None = None
        self._num_messages = self._num_bytes = 0
        self._behind_since: float | None = None
        self._behind_total_s = 0.0
        self._log = SeldomLog(logger)
        self._has_failed = False
        self.is_empty = False
        """Whether it has failed, and there is not one message of it."""

    @property
    def is_behind(self) -> bool:
        """Whether the disk must catch up before more may come: until half of it has left."""
        if self._has_failed:
            return False
        waiting_bytes = self._queued_bytes - self._written_bytes
        if waiting_bytes <= MOST_WAITING_BYTES // 2:
            # Its thread tells of that where it knows of the wait, and may have been too quick.
            self._end_wait()
        elif self._behind_since is None and waiting_bytes >= MOST_WAITING_BYTES:
            self._behind_since = time.monotonic()
            self._log.warning(
                "the recording is behind: %s takes less than the actors send, and they wait for it "
                "(%.1f s so far)",
                *(self._path, self._behind_total_s),
            )
        return self._behind_since is not None

    def begin(
        self, first: Version, schema: Schema, settings: dict[str, Any], has_room: Callable[[], None]
    ) -> None:
        """Write down what follows, and start the thread. `has_room`: credit may flow again."""
        loop = asyncio.get_running_loop()
        self._has_room = has_room
        write_all = functools.partial(self._write_all, Inbox(loop, self._note_room))
        self._began_at = time.monotonic()
        self._queue.put(Start(self._run_id, *first, __version__, time.time(), schema, settings))
        self._writing = loop.create_task(on_thread("recorder", write_all), name="recorder")
        self._writing.add_done_callback(self._note_end)
        logger.info("recording to %s", self._path)

    def take(self, arrival: Arrival) -> None:
        """Keep an admitted message, of which everything is copied."""
        if self._writing is None or self._has_failed:
            return
        tail = b"" if arrival.episodes is None else arrival.episodes.tobytes()
        body = b"".join((arrival.obs.data.cast("B"), arrival.small.data.cast("B"), tail))
        arrived_s = time.monotonic() - self._began_at
        # It is recorded as it was before it was compressed for the network.
        plain = arrival.data._replace(body=None, codec=PLAIN)
        self._queue.put(Recorded(arrival.peer.number, arrived_s, plain, body))
        self._queued_bytes += len(body)
        self._num_messages += 1

    async def finish(self, reason: str, update: int, digests: dict[str, str]) -> None:
        """Write the end, and wait until all is on the disk."""
        if self._writing is None:
            return
        self._queue.put(End(reason, update, digests))
        self.close()
        await asyncio.wait([self._writing])
        if not self._has_failed:
            logger.info("recorded %d messages in %s", self._num_messages, self._path)

    def close(self) -> None:
        """Take no more messages; twice does no harm. Those that are waiting are still written."""
        self._queue.put(None)

    def withdraw(self) -> None:
        """Leave no empty file where the run never began."""
        if self._writing is None:
            self._path.unlink(missing_ok=True)
            os.close(self._fd)

    def report(self) -> dict[str, object]:
        since = self._behind_since
        behind_s = 0.0 if since is None else time.monotonic() - since
        return {
            "recording/messages": self._num_messages,
            "recording/bytes": self._num_bytes,
            "recording/waiting_bytes": self._queued_bytes - self._written_bytes,
            "recording/behind_total_s": self._behind_total_s + behind_s,
        }

    def _write_all(self, has_room: Inbox[None]) -> None:
        with os.fdopen(self._fd, "ab", BUFFER_BYTES) as file:
            file.write(OPENING)
            while (record := self._queue.get()) is not None:
                for part in encode_record(record):
                    file.write(part)
                    self._num_bytes += len(part)
                if isinstance(record, Recorded):
                    self._written_bytes += len(record.body)
                waiting_bytes = self._queued_bytes - self._written_bytes
                if self._behind_since is not None and waiting_bytes <= MOST_WAITING_BYTES // 2:
                    has_room.post(None)
                if self._queue.empty():
                    file.flush()
                    # Each time that a thread wakes, it takes the others from their work.
                    time.sleep(PAUSE_S)
            file.flush()
            os.fsync(file.fileno())
            found = os.fstat(file.fileno())
            is_whole = found.st_size == len(OPENING) + self._num_bytes
            if not is_whole or not os.path.samestat(found, self._path.stat()):
                what = "somebody else has cut or replaced it, or written to it"
                raise FileNotFoundError(errno.ENOENT, what)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        self._has_failed = True
        # Nobody writes those that wait.
        self._queue, self._written_bytes = queue.SimpleQueue(), self._queued_bytes
        self.is_empty = True
        if not isinstance(error, FileNotFoundError):
            with contextlib.suppress(RecordingError):
                records = Reader(self._path).records()
                self.is_empty = not any(isinstance(record, Recorded) for _, record, _ in records)
        logger.error(
            "the recording has ended, and training goes on without it: %s: %s. %s can be replayed",
            self._path,
            error.strerror if isinstance(error, OSError) else repr(error),
            "Nothing there" if self.is_empty else "All that is in the file",
        )
        self._note_room()
        if not isinstance(error, OSError):
            # A bug of ours: the loop's handler ends the run.
            raise error

    def _note_room(self, _: None = None) -> None:
        if self._end_wait():
            self._has_room()

    def _end_wait(self) -> bool:
        """Whether there was a wait."""
        since, self._behind_since = self._behind_since, None
        if since is not None:
            self._behind_total_s += time.monotonic() - since
        return since is not None
