"""A recording as a list of messages: read and checked once, then taken in any order.

Nothing of it is held in memory but where each message begins; the rest is a mapping of the file.
"""

import logging
import time
from collections.abc import Iterator
from pathlib import Path

from impala_async.config.former import up_to_date
from impala_async.errors import RecordingError
from impala_async.spec import Schema
from impala_async.wire.recording import End, Reader, Record, Recorded, Start, has_body_of, map_file

logger = logging.getLogger(__name__)

NEWS_EVERY_S = 5.0


class RecordingIndex:
    """Where each message of a recording begins, and what is said of the run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.end: End | None = None
        """None if the learner did not end in good order."""
        self.most_columns = 0
        self._offsets: list[int] = []
        buffer = map_file(path)
        self._reader = Reader(buffer, str(path))
        records = self._reader.records()
        first, whole = next(((record, end) for _, record, end in records), (None, 0))
        if first is not None and not isinstance(first, Start):
            raise RecordingError(f"{path}: its first record says nothing of its run")
        if isinstance(first, Start):
            self.start = first._replace(settings=up_to_date(first.settings))
            whole = self._read_all(records, whole, len(buffer))
        if not self._offsets:
            raise RecordingError(f"{path}: holds no message")
        if whole < len(buffer):
            logger.warning("%s: its last record is cut off, and left out", path)

    def __len__(self) -> int:
        return len(self._offsets)

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

    def _read_all(self, records: Iterator[tuple[int, Record, int]], end: int, size: int) -> int:
        """Note where messages begin; up to where the file is whole."""
        say_at = time.monotonic() + NEWS_EVERY_S
        for begin, record, end in records:
            if isinstance(record, Start):
                raise RecordingError(f"{self.path}: holds more than one start of a learner")
            if isinstance(record, End):
                self.end = record
            elif has_body_of(self.schema, record):
                self._offsets.append(begin)
                self.most_columns = max(self.most_columns, record.data.columns)
            else:
                raise RecordingError(
                    f"{self.path}: the message at byte {begin} does not fit its environment"
                )
            if time.monotonic() > say_at:
                say_at += NEWS_EVERY_S
                logger.info("%s: %.0f %% checked", self.path, 100 * end / size)
        return end
