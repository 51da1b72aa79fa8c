"""A recording as a list of messages: read and checked once, then taken in any order.

Nothing of it is held in memory but where each message begins; the rest is a mapping of the file.
"""

import logging
import time
from dataclasses import dataclass
from pathlib import Path

from impala_async.config.former import up_to_date
from impala_async.errors import RecordingError
from impala_async.spec import Schema
from impala_async.wire.recording import End, Reader, Recorded, Start, has_body_of, map_file

logger = logging.getLogger(__name__)

NEWS_EVERY_S = 5.0


@dataclass
class Take:
    """What one start of a learner recorded: its messages are `first` to `stop`, without `stop`."""

    start: Start
    first: int
    stop: int
    began_s: float
    """Seconds of the takes before it."""
    lasts_s: float = 0.0
    end: End | None = None
    """None if it did not end in good order."""


class RecordingIndex:
    """All messages of a recording, of all its takes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.takes: list[Take] = []
        self.most_columns = 0
        self.num_bytes = 0
        self._begins: list[int] = []
        buffer = map_file(path)
        self._reader = Reader(buffer, str(path))
        whole = self._read_all(len(buffer))
        if not self._begins:
            raise RecordingError(f"{path}: holds no message")
        if whole < len(buffer):
            logger.warning("%s: its last record is cut off, and left out", path)

    def __len__(self) -> int:
        return len(self._begins)

    @property
    def schema(self) -> Schema:
        """Of all messages."""
        return self.takes[0].start.schema

    @property
    def num_updates(self) -> int | None:
        """How many the first take made, or those of them that a later one went on from."""
        first, *later = self.takes
        if later:
            return later[0].start.update
        return None if first.end is None else first.end.update

    def message(self, number: int) -> Recorded:
        """A message, by its place in the order of admission."""
        found = self._reader.read(self._begins[number], is_checked=False)
        assert found is not None
        assert isinstance(found[0], Recorded)
        return found[0]

    def _read_all(self, size: int) -> int:
        say_at, end = time.monotonic() + NEWS_EVERY_S, 0
        for begin, record, end in self._reader.records():
            if isinstance(record, Start):
                self._begin_take(record)
            elif not self.takes:
                raise RecordingError(f"{self.path}: its first record says nothing of its run")
            elif isinstance(record, End):
                self.takes[-1].end = record
            else:
                self._add(begin, record)
            if time.monotonic() > say_at:
                say_at += NEWS_EVERY_S
                logger.info("%s: %.0f %% checked", self.path, 100 * end / size)
        return end

    def _begin_take(self, start: Start) -> None:
        start = start._replace(settings=up_to_date(start.settings))
        before = self.takes[-1] if self.takes else None
        began_s = before.began_s + before.lasts_s if before else 0.0
        if before is not None and start.schema != self.schema:
            raise RecordingError(
                f"{self.path}: its environment changed from one start of the learner to the next: "
                f"{self.schema.difference(start.schema, 'before', 'then')}"
            )
        self.takes.append(Take(start, len(self._begins), len(self._begins), began_s))

    def _add(self, begin: int, message: Recorded) -> None:
        if not has_body_of(self.schema, message):
            raise RecordingError(
                f"{self.path}: the message at byte {begin} does not fit its environment"
            )
        self._begins.append(begin)
        take = self.takes[-1]
        take.stop, take.lasts_s = len(self._begins), message.arrived_s
        self.most_columns = max(self.most_columns, message.data.columns)
        self.num_bytes += len(message.body)
