"""The format of a recording: what is written is read; what is cut or damaged is told apart."""

import os
import struct
import zlib
from pathlib import Path

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from impala_async.errors import RecordingError
from impala_async.wire.messages import Data, pack
from impala_async.wire.recording import (
    FORMAT,
    MAGIC,
    MAX_BODY_BYTES,
    OPENING,
    End,
    Reader,
    Recorded,
    Start,
    encode_record,
)
from tests.learner.columns import small_schema

SCHEMA = small_schema(rows=2)
COUNTS = st.integers(0, 2**40)
SECONDS = st.floats(0, 1e9)
DATA = Data(b"s" * 16, 0, 1, 0, 2, 1, 0, 0, None)
HEADERS = st.builds(lambda *of: DATA._replace(seq=of[0], update=of[1]), COUNTS, COUNTS)
MESSAGES = st.builds(Recorded, COUNTS, SECONDS, HEADERS, st.binary(max_size=300))
SETTINGS = st.dictionaries(st.text(), st.integers(-9, 9) | st.text() | st.none())
RUN, RELEASE = st.just(b"r" * 16), st.just("0.1")
STARTS = st.builds(Start, RUN, COUNTS, COUNTS, RELEASE, SECONDS, st.just(SCHEMA), SETTINGS)
ENDS = st.builds(End, st.text(), COUNTS, st.dictionaries(st.text(), st.text()))
RECORDS = st.lists(MESSAGES | STARTS | ENDS, max_size=5)


def written(records):
    return OPENING + b"".join(b"".join(encode_record(record)) for record in records)


def reader_of(data):
    """Its bytes are in memory."""
    fd = os.memfd_create("recording")
    os.write(fd, data)
    try:
        return Reader(Path(f"/proc/self/fd/{fd}"))
    finally:
        os.close(fd)


def read(data):
    return list(reader_of(data).records())


def plain(record):
    """A body that is read is a view."""
    return record._replace(body=bytes(record.body)) if isinstance(record, Recorded) else record


@given(RECORDS)
def test_what_is_written_is_read(records):
    data = written(records)
    found = read(data)
    assert [plain(record) for _, record, _ in found] == records
    begins = [begin for begin, _, _ in found]
    ends = [end for _, _, end in found]
    assert [*begins, len(data)] == [len(OPENING), *ends]
    reader = reader_of(data)
    for begin, record, end in found:
        assert reader.read(begin, is_checked=False) == (record, end)


@given(RECORDS.filter(bool), st.data())
def test_of_a_file_that_was_cut_the_whole_records_are_left(records, data):
    whole = written(records)
    size = data.draw(st.integers(0, len(whole) - 1))
    found = read(whole[:size])
    assert [plain(record) for _, record, _ in found] == records[: len(found)]
    last_end = found[-1][2] if found else min(size, len(OPENING))
    assert last_end <= size
    assert len(found) < len(records)


@given(RECORDS.filter(bool), st.data())
def test_damage_is_named_with_its_place(records, data):
    whole = bytearray(written(records))
    place = data.draw(st.integers(len(OPENING), len(whole) - 1))
    whole[place] ^= 1 << data.draw(st.integers(0, 7))
    begins = [begin for begin, _, _ in read(written(records))]
    begin = max(offset for offset in begins if offset <= place)
    with pytest.raises(RecordingError, match=rf"byte {begin} is damaged.*truncate -s {begin} FILE"):
        read(bytes(whole))
    # The advice keeps what is before it.
    assert len(read(bytes(whole[:begin]))) == begins.index(begin)


def test_what_is_no_recording_of_this_format_is_refused():
    for other in (b"\x89PNG", b"{}", b"IMPALA-REC\n\n", bytes(100)):
        with pytest.raises(RecordingError, match=r"is not a recording"):
            reader_of(other)
    with pytest.raises(
        RecordingError, match=f"is a recording of format {FORMAT + 1}: use the release"
    ):
        reader_of(MAGIC + struct.pack("<I", FORMAT + 1))
    # An opening that was cut is an empty recording.
    assert [read(OPENING[:size]) for size in range(len(OPENING) + 1)] == [[]] * (len(OPENING) + 1)


def test_no_memory_is_taken_for_a_body_that_no_message_has():
    """A hole in a file takes no disk."""
    sizes = struct.pack("<IQI", 0, MAX_BODY_BYTES + 1, 0)
    fd = os.memfd_create("recording")
    os.write(fd, OPENING + sizes + struct.pack("<I", zlib.crc32(sizes)))
    os.truncate(fd, 2 * MAX_BODY_BYTES)
    reader = Reader(Path(f"/proc/self/fd/{fd}"))
    os.close(fd)
    with pytest.raises(RecordingError, match=f"is damaged: a body of {MAX_BODY_BYTES + 1} bytes"):
        reader.read(len(OPENING))


PACKED, INLINE = pack(DATA), pack(DATA._replace(body=b"body"))


def test_a_record_of_the_right_checksum_may_be_nonsense(monkeypatch):
    for head in (
        *(7, {}, [], [3], ["x"], [1], [2, "a"], [2, "a", -1, {}], [2, "a", 1, []]),
        *([1, 0, 0.0, b"no message"], [1, 0, -1.0, PACKED], [1, 0, 0, PACKED], [1, 0, 0.0, INLINE]),
        *([1, 0, float("nan"), PACKED], [1, True, 0.0, PACKED]),
        [0, b"r", 1, 0, "0.1", 0.0, b"no schema", b"{}"],
        [0, b"r", 1, 0, "0.1", 0.0, SCHEMA.to_json(), b"no settings"],
        [0, b"r", 1, 0, "0.1", 0.0, SCHEMA.to_json(), b"[1]"],
    ):
        packed = msgpack.packb(head)
        monkeypatch.setattr(
            "impala_async.wire.recording.msgpack.packb", lambda fields, packed=packed: packed
        )
        data = written([End("", 0, {})])
        monkeypatch.undo()
        with pytest.raises(RecordingError, match=f"the record at byte {len(OPENING)} is damaged"):
            read(data)
