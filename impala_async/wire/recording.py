"""A recorded actor stream as bytes, written and read; docs/recording.md has the format."""

import json
import os
import struct
import weakref
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgpack

from impala_async.errors import ProtocolError, RecordingError, SpacesError
from impala_async.files import open_regular
from impala_async.schema import Schema
from impala_async.wire.messages import Data, Frame, pack, unpack

MAGIC = b"IMPALA-REC\r\n"
FORMAT = 1
MAX_HEAD_BYTES = 1 << 24
# The system reads no more at once.
MAX_BODY_BYTES = (1 << 31) - 4096
_SIZES = struct.Struct("<IQI")
_CHECK = struct.Struct("<I")
OPENING = struct.pack("<12sI", MAGIC, FORMAT)


class Start(NamedTuple):
    """The first record: a learner begins to take messages, with the weights of this update."""

    run_id: bytes
    epoch: int
    update: int
    package: str
    began_at: float
    schema: Schema
    settings: dict[str, Any]


class Recorded(NamedTuple):
    """A message, admitted so long after the start. Its body is apart, both parts in one block."""

    number: int
    arrived_s: float
    data: Data
    body: Frame


class End(NamedTuple):
    """A learner's good end: why, at which update, the SHA-256 of its last checkpoint's files."""

    reason: str
    update: int
    digests: dict[str, str]


Record = Start | Recorded | End


def encode_record(record: Record) -> list[Frame]:
    body: Frame = b""
    if isinstance(record, Start):
        fields: list[Any] = [0, *record[:5], record.schema.to_json()]
        fields.append(json.dumps(record.settings).encode())
    elif isinstance(record, Recorded):
        fields = [1, record.number, record.arrived_s, pack(record.data)]
        body = record.body
    else:
        fields = [2, *record]
    head: bytes = msgpack.packb(fields)
    sizes = _SIZES.pack(len(head), len(body), zlib.crc32(body, zlib.crc32(head)))
    return [sizes + _CHECK.pack(zlib.crc32(sizes)) + head, body]


class Reader:
    """Reads the records of a file as it was when it was opened, each when it is asked for, or
    raises RecordingError. A mapping would end this process where somebody cuts the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            file = open(path, "rb", buffering=0, opener=open_regular)  # noqa: SIM115
        except OSError as error:
            raise self._fault(f"cannot be read: {error.strerror}") from None
        weakref.finalize(self, file.close)
        self._fd, self.num_bytes = file.fileno(), os.fstat(file.fileno()).st_size
        opening = bytes(self._bytes(0, min(self.num_bytes, len(OPENING))))
        # It may have been cut before its opening was written.
        if not opening.startswith(MAGIC[: len(opening)]):
            raise self._fault("is not a recording of impala-async")
        if not OPENING.startswith(opening):
            number = int.from_bytes(opening[len(MAGIC) :], "little")
            raise self._fault(f"is a recording of format {number}: use the release that made it")

    def records(self) -> Iterator[tuple[int, Record, int]]:
        """Each whole record, where it begins, and where it ends: what is behind them was cut."""
        offset = len(OPENING)
        while (found := self.read(offset)) is not None:
            yield offset, *found
            offset = found[1]

    def read(self, offset: int, *, is_checked: bool = True) -> tuple[Record, int] | None:
        """The record at an offset, and where it ends; None if it is not there as a whole."""
        begin = offset + _SIZES.size + _CHECK.size
        if begin > self.num_bytes:
            return None
        prefix = self._bytes(offset, begin)
        head_bytes, body_bytes, crc = _SIZES.unpack_from(prefix)
        end = begin + head_bytes + body_bytes
        try:
            if zlib.crc32(prefix[: _SIZES.size]) != _CHECK.unpack_from(prefix, _SIZES.size)[0]:
                raise ValueError("its sizes do not match their checksum")
            if head_bytes > MAX_HEAD_BYTES:
                raise ValueError(f"a head of {head_bytes} bytes")
            if body_bytes > MAX_BODY_BYTES:  # of a file with a hole, which takes no disk
                raise ValueError(f"a body of {body_bytes} bytes")
            if end > self.num_bytes:
                return None
            parts = self._bytes(begin, end)
            if is_checked and zlib.crc32(parts) != crc:
                raise ValueError("it does not match its checksum")
            return _decode(parts[:head_bytes], parts[head_bytes:]), end
        except (ValueError, TypeError, RecursionError, ProtocolError, SpacesError) as error:
            raise self._fault(
                f"the record at byte {offset} is damaged: {error}. To keep what is "
                f"before it: truncate -s {offset} FILE"
            ) from None

    def _bytes(self, begin: int, end: int) -> memoryview:
        try:
            found = os.pread(self._fd, end - begin, begin)
        except OSError as error:
            raise self._fault(f"cannot be read: {error.strerror}") from None
        if len(found) < end - begin:
            cut = f"somebody has cut it to {begin + len(found)} bytes, of {self.num_bytes}"
            raise self._fault(cut)
        return memoryview(found)

    def _fault(self, what: str) -> RecordingError:
        return RecordingError(f"{self._path}: {what}")


# The fields of a head, by its kind.
_FIELDS: tuple[tuple[type, ...], ...] = (
    (bytes, int, int, str, float, bytes, bytes),
    (int, float, bytes),
    (str, int, dict),
)


def _decode(head: memoryview, body: memoryview) -> Record:
    fields = msgpack.unpackb(head, max_ext_len=0)
    if type(fields) is not list or not fields:
        raise ValueError("its head is no array")
    kind = fields.pop(0)
    if kind not in (0, 1, 2) or [type(value) for value in fields] != [*_FIELDS[kind]]:
        raise ValueError(f"no record has the kind {kind!r} and such fields")
    if any(type(value) in (int, float) and not 0 <= value <= 2**62 for value in fields):
        raise ValueError("a number in it is out of range")
    if kind == 1:
        data = unpack(fields[2])
        if not isinstance(data, Data) or data.body is not None:
            raise ValueError("its message is no Data")
        return Recorded(fields[0], fields[1], data, body)
    if kind == 2:
        return End(*fields)
    fields[5:] = Schema.from_json(fields[5]), dict(json.loads(fields[6]))
    return Start(*fields)
