"""A recorded actor stream as bytes: the format of its file, written and read.

    opening │ record │ record │ ...

    opening   magic, number of the format
    record    size of the head, size of the body, CRC-32 of both parts, CRC-32 of these three;
              the head; the body

A head is a msgpack array `[kind, field, ...]`. Only a message has a body, and that is the one it
had on the wire. The sizes have a checksum of their own: so a file that was cut in mid-write can be
told from one that is damaged, wherever the damage is.
"""

import json
import math
import os
import stat
import struct
import weakref
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgpack

from impala_async.errors import ProtocolError, RecordingError, SpacesError
from impala_async.files import open_at_once, why_unreadable
from impala_async.schema import Schema
from impala_async.wire.codec import Frame, body_sizes
from impala_async.wire.messages import Data, pack, unpack

MAGIC = b"IMPALA-REC\r\n"
FORMAT = 1
MAX_HEAD_BYTES = 1 << 24
_OPENING = struct.Struct("<12sI")
_SIZES = struct.Struct("<IQI")
_CHECK = struct.Struct("<I")
_PREFIX_BYTES = _SIZES.size + _CHECK.size
OPENING = _OPENING.pack(MAGIC, FORMAT)


class Start(NamedTuple):
    """The first record: a learner begins to take messages."""

    run_id: bytes
    epoch: int
    update: int
    """The update of the weights that the learner began with."""
    package: str
    """The version of this package."""
    began_at: float
    """Seconds since 1970."""
    schema: Schema
    settings: dict[str, Any]


class Recorded(NamedTuple):
    """A message that was admitted. `data` has no body: that is apart, both parts in one block."""

    rank: int
    arrived_s: float
    """Since its start."""
    data: Data
    body: Frame


class End(NamedTuple):
    """The learner ended in good order: why, with how many updates, and what its files then were."""

    reason: str
    update: int
    digests: dict[str, str]
    """SHA-256 of the files of its last checkpoint, by name."""


Record = Start | Recorded | End


def encode_record(record: Record) -> list[Frame]:
    """The bytes of a record, in parts."""
    body: Frame = b""
    if isinstance(record, Start):
        fields: list[Any] = [0, *record[:5], record.schema.to_json()]
        fields.append(json.dumps(record.settings).encode())
    elif isinstance(record, Recorded):
        fields = [1, record.rank, record.arrived_s, pack(record.data)]
        body = record.body
    else:
        fields = [2, *record]
    head: bytes = msgpack.packb(fields)
    sizes = _SIZES.pack(len(head), len(body), zlib.crc32(body, zlib.crc32(head)))
    return [sizes + _CHECK.pack(zlib.crc32(sizes)) + head, body]


class FileBytes:
    """The bytes of a file as it was when it was opened, each read when it is asked for.

    A mapping would end this process without a word where somebody cuts the file meanwhile. A pipe
    is not waited for.

    Raises:
        RecordingError: here and by a slice, where the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            file = open(path, "rb", buffering=0, opener=open_at_once)  # noqa: SIM115
        except OSError as error:
            raise RecordingError(f"{path}: cannot be read: {error.strerror}") from None
        weakref.finalize(self, file.close)
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise RecordingError(f"{path}: cannot be read: it is no regular file")
        if not found.st_size:
            raise RecordingError(f"{path}: is empty")
        self._fd, self._size = file.fileno(), found.st_size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, part: slice) -> memoryview:
        begin, end, _ = part.indices(self._size)
        try:
            found = os.pread(self._fd, end - begin, begin)
        except OSError as error:
            raise RecordingError(f"{self._path}: cannot be read: {error.strerror}") from None
        if len(found) < end - begin:
            raise RecordingError(
                f"{self._path}: somebody has cut it to {begin + len(found)} bytes, of {self._size}"
            )
        return memoryview(found)


class Reader:
    """Reads the records in a buffer; `name` is what errors call it."""

    def __init__(self, buffer: memoryview | FileBytes, name: str) -> None:
        self._buffer = buffer
        self._name = name
        begin = bytes(buffer[: len(MAGIC)])
        # It may have been cut before its opening was written.
        if begin != MAGIC[: len(begin)]:
            raise RecordingError(f"{name}: is not a recording of impala-async")
        if len(buffer) < _OPENING.size:
            return
        _, number = _OPENING.unpack(buffer[: _OPENING.size])
        if number != FORMAT:
            raise RecordingError(
                f"{name}: is a recording of format {number}, this is impala-async of format "
                f"{FORMAT}: use the release that it was made with"
            )

    def records(self) -> Iterator[tuple[int, Record, int]]:
        """Each whole record, where it begins, and where it ends.

        What follows the last of them, if anything does, was cut in mid-write.

        Raises:
            RecordingError: a record is damaged.
        """
        offset = _OPENING.size
        while (found := self.read(offset)) is not None:
            yield offset, *found
            offset = found[1]

    def read(self, offset: int, *, is_checked: bool = True) -> tuple[Record, int] | None:
        """The record at an offset, and where it ends; None if it is not there as a whole.

        Who has checked it once may do without that later.
        """
        prefix = self._buffer[offset : offset + _PREFIX_BYTES]
        if len(prefix) < _PREFIX_BYTES:
            return None
        head_bytes, body_bytes, crc = _SIZES.unpack_from(prefix)
        if zlib.crc32(prefix[: _SIZES.size]) != _CHECK.unpack_from(prefix, _SIZES.size)[0]:
            raise self._damaged(offset, "its sizes do not match their checksum")
        if head_bytes > MAX_HEAD_BYTES:
            raise self._damaged(offset, f"a head of {head_bytes} bytes")
        begin = offset + _PREFIX_BYTES
        end = begin + head_bytes + body_bytes
        if end > len(self._buffer):
            return None
        parts = self._buffer[begin:end]
        if is_checked and zlib.crc32(parts) != crc:
            raise self._damaged(offset, "it does not match its checksum")
        try:
            return _decode(parts[:head_bytes], parts[head_bytes:]), end
        except (ValueError, TypeError, RecursionError, ProtocolError, SpacesError) as error:
            raise self._damaged(offset, why_unreadable(error)) from None

    def _damaged(self, offset: int, what: str) -> RecordingError:
        return RecordingError(
            f"{self._name}: the record at byte {offset} is damaged: {what}. To keep what is "
            f"before it: truncate -s {offset} FILE"
        )


def _decode(head: memoryview, body: memoryview) -> Record:
    fields = msgpack.unpackb(head, max_ext_len=0)
    if type(fields) is not list or not fields:
        raise ValueError("its head is no array")
    kind = fields.pop(0)
    if kind not in (0, 1, 2) or len(fields) != len(_CHECKS[kind]):
        raise ValueError(f"no record has the kind {kind!r} and {len(fields)} fields")
    for number, (check, value) in enumerate(zip(_CHECKS[kind], fields, strict=True)):
        if not check(value):
            raise ValueError(f"field {number} of kind {kind} is not what it should be")
    if kind == 1:
        data = unpack(fields[2])
        if not isinstance(data, Data) or data.body is not None:
            raise ValueError("its message is no Data")
        return Recorded(fields[0], fields[1], data, body)
    if kind == 2:
        return End(*fields)
    schema, settings = Schema.from_json(fields[5]), dict(json.loads(fields[6]))
    return Start(fields[0], fields[1], fields[2], fields[3], fields[4], schema, settings)


def has_body_of(schema: Schema, message: Recorded) -> bool:
    """Whether the body of a message has the size that a schema gives it."""
    data = message.data
    sizes = body_sizes(schema.layout, data.columns, data.num_episodes)
    return data.rows == schema.rows and len(message.body) == sizes.obs + sizes.small


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= 2**62


def _is_seconds(value: Any) -> bool:
    return type(value) is float and math.isfinite(value) and value >= 0


def _is_text(value: Any) -> bool:
    return type(value) is str


def _is_blob(value: Any) -> bool:
    return type(value) is bytes


def _are_digests(value: Any) -> bool:
    return type(value) is dict and all(
        _is_text(name) and _is_text(digest) for name, digest in value.items()
    )


_CHECKS: tuple[tuple[Callable[[Any], bool], ...], ...] = (
    (_is_blob, _is_count, _is_count, _is_text, _is_seconds, _is_blob, _is_blob),
    (_is_count, _is_seconds, _is_blob),
    (_is_text, _is_count, _are_digests),
)
