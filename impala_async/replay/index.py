"""A recording as a list of messages: read and checked once, then taken in any order.

Nothing of it is held in memory but where each message begins; the rest is read from the file.
"""

import logging
import time
from pathlib import Path

from impala_async.errors import RecordingError
from impala_async.schema import Schema
from impala_async.wire.recording import End, Reader, Recorded, Start, has_body_of

logger = logging.getLogger(__name__)

NEWS_EVERY_S = 5.0


class RecordingIndex:
    """Where each message of a recording begins, and what is said of the run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.end: End | None = None
        """None if the learner did not end in good order."""
        self.most_columns = 0
        self._start: Start | None = None
        self._offsets: list[int] = []
        self._reader = Reader(path)
        whole = self._read_all(self._reader.num_bytes)
        if not self._offsets:
            raise RecordingError(f"{path}: holds no message")
        if whole < self._reader.num_bytes:
            logger.warning("%s: its last record is cut off, and left out", path)

    def __len__(self) -> int:
        return len(self._offsets)

    @property
    def start(self) -> Start:
        """The run, with its settings as this release has them."""
        assert self._start is not None, "a recording with messages has one"
        return self._start

    @property
    def schema(self) -> Schema:
        """All messages have it."""
        return self.start.schema

    @property
    def num_updates(self) -> int | None:
        """How many the learner made, if it ended in good order."""
        return None if self.end is None else self.end.update

    def message(self, number: int) -> Recorded:
        """A message, by its place in the order of admission."""
        found = self._reader.read(self._offsets[number], is_checked=False)
        assert found is not None
        assert isinstance(found[0], Recorded)
        return found[0]

    def _read_all(self, size: int) -> int:
        """Note where messages begin; up to where the file is whole."""
        say_at, end = time.monotonic() + NEWS_EVERY_S, 0
        for begin, record, end in self._reader.records():
            if isinstance(record, Start):
                self._begin(record)
            elif self._start is None:
                raise RecordingError(f"{self.path}: its first record says nothing of its run")
            elif isinstance(record, End):
                self.end = record
            else:
                self._add(begin, record)
            if time.monotonic() > say_at:
                say_at += NEWS_EVERY_S
                logger.info("%s: %.0f %% checked", self.path, 100 * end / size)
        return end

    def _begin(self, start: Start) -> None:
        if self._start is not None:
            raise RecordingError(f"{self.path}: holds more than one start of a learner")
        self._start = start

    def _add(self, offset: int, message: Recorded) -> None:
        if not has_body_of(self.schema, message):
            raise RecordingError(
                f"{self.path}: the message at byte {offset} does not fit its environment"
            )
        self._offsets.append(offset)
        self.most_columns = max(self.most_columns, message.data.columns)
