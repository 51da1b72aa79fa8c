"""The file of a recording: what goes in, when it begins, goes on, falls behind and fails."""

import asyncio
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from impala_async import __version__
from impala_async.errors import RecordingError
from impala_async.learner import recorder as module
from impala_async.learner.recorder import Recorder
from impala_async.learner.slots import Arrival
from impala_async.metrics.names import undeclared
from impala_async.weights import Version
from impala_async.wire.messages import EPISODE, Data
from impala_async.wire.recording import OPENING, End, Reader, Recorded, Start, encode_record
from tests.learner.columns import small_schema
from tests.learner.hand_actor import until

RUN = b"run".ljust(16, b"-")
SETTINGS = {"seed": 7, "learner": {"device": "cpu"}}
DATA = Data(b"s" * 16, 0, 1, 0, 3, 1, 0, 0, b"what was inline")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "recording"


def records(path):
    return [record for _, record, _ in Reader(path).records()]


def begin(recorder, has_room=bool):
    recorder.begin(Version(1, 0), small_schema(), SETTINGS, has_room)


def take(recorder, seq, num_bytes=8, num_episodes=0):
    obs = np.full((1, num_bytes), seq, np.uint8)
    small = np.full((1, 4), 255 - seq, np.uint8)
    episodes = np.array([(seq, 1)] * num_episodes, EPISODE) if num_episodes else None
    # Some came compressed; what is recorded is what was unpacked.
    data = DATA._replace(seq=seq, codec=seq % 2)
    peer = SimpleNamespace(number=seq % 2)
    recorder.take(Arrival(peer, data, obs, small, episodes=episodes))
    # Slots are written to again.
    obs[:] = small[:] = 99


async def test_all_that_is_taken_is_in_the_file_in_order(path, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.chdir(path.parent)
    recorder = Recorder(Path(path.name), RUN)
    # As code of a user's own may.
    monkeypatch.chdir("/")
    begin(recorder)
    for seq in range(50):
        take(recorder, seq, num_episodes=seq % 3)
    await recorder.finish("env_steps", 12, {"model.safetensors": "abc"})
    assert f"recorded 50 messages in {path}" in caplog.messages
    first, *messages, last = records(path)
    assert first[:4] == (RUN, 1, 0, __version__)
    assert (first.schema, first.settings) == (small_schema(), SETTINGS)
    assert last == End("env_steps", 12, {"model.safetensors": "abc"})
    arrived = []
    for seq, message in enumerate(messages):
        assert (message.number, message.data) == (seq % 2, DATA._replace(seq=seq, body=None))
        tail = np.array([(seq, 1)] * (seq % 3), EPISODE).tobytes()
        assert bytes(message.body) == bytes([seq] * 8 + [255 - seq] * 4) + tail
        arrived.append(message.arrived_s)
    assert arrived == sorted(arrived)
    assert len(arrived) == 50
    report = recorder.report()
    assert not undeclared(report)
    assert (report["recording/messages"], report["recording/waiting_bytes"]) == (50, 0)
    assert report["recording/bytes"] == path.stat().st_size - len(OPENING)
    assert report["recording/behind_total_s"] == 0


async def test_what_was_taken_is_there_when_the_learner_is_killed(path):
    recorder = Recorder(path, RUN)
    begin(recorder)
    take(recorder, 1)
    await until(lambda: len(records(path)) == 2, "in the hands of the kernel")
    recorder.close()
    recorder.close()
    recorder.withdraw()
    assert len(records(path)) == 2


async def test_where_the_disk_is_late_it_says_so_until_it_has_caught_up(path, monkeypatch, caplog):
    may_write, room = threading.Event(), []

    def slowly(record):
        if isinstance(record, Recorded):
            assert may_write.wait(10)
        return encode_record(record)

    monkeypatch.setattr(module, "encode_record", slowly)
    caplog.set_level("INFO")
    monkeypatch.setattr(module, "MOST_WAITING_BYTES", 100)
    recorder = Recorder(path, RUN)
    begin(recorder, has_room=lambda: room.append("room"))
    take(recorder, 0, 46)
    assert not recorder.is_behind
    take(recorder, 1, 46)
    assert recorder.is_behind
    # One who does not listen loses nothing.
    take(recorder, 2, 46)
    assert recorder.report()["recording/waiting_bytes"] == 150
    assert caplog.text.count("the recording is behind") == 1
    assert room == []
    may_write.set()
    await until(lambda: room == ["room"], "room")
    assert not recorder.is_behind
    assert float(recorder.report()["recording/behind_total_s"]) > 0
    await recorder.finish("env_steps", 1, {})
    assert len(records(path)) == 5


async def test_a_disk_that_catches_up_while_it_is_looked_at_holds_nobody_up(path, monkeypatch):
    may_write, room = threading.Event(), []

    def wait(record):
        assert isinstance(record, Start) or may_write.wait(10)
        return encode_record(record)

    def late():
        # The loop loses its core between its look at the numbers and its note.
        may_write.set()
        while recorder.report()["recording/waiting_bytes"]:
            time.sleep(0.001)
        return 0.0

    monkeypatch.setattr(module, "MOST_WAITING_BYTES", 10)
    monkeypatch.setattr(module, "encode_record", wait)
    recorder = Recorder(path, RUN)
    begin(recorder, has_room=lambda: room.append("room"))
    await asyncio.sleep(0)  # its thread begins
    take(recorder, 0)
    with monkeypatch.context() as patch:
        patch.setattr(module, "time", SimpleNamespace(monotonic=late, sleep=time.sleep))
        assert recorder.is_behind
    assert not recorder.is_behind
    assert room == []
    await recorder.finish("env_steps", 1, {})


def open_full(fd, mode, size):
    """A full disk, in place of `os.fdopen`."""
    os.close(fd)
    return open("/dev/full", mode, size)


@pytest.mark.parametrize("had_messages", [True, False])
async def test_a_disk_that_takes_no_more_ends_the_recording_and_nothing_else(
    path, monkeypatch, caplog, *, had_messages
):
    room = []
    monkeypatch.setattr(module, "MOST_WAITING_BYTES", 10)
    recorder = Recorder(path, RUN)
    if had_messages:
        first = Start(RUN, 1, 0, "0.1", 0.0, small_schema(), {})
        records = first, Recorded(0, 0.0, DATA._replace(body=None), b"body")
        path.write_bytes(OPENING + b"".join(b"".join(encode_record(each)) for each in records))
    monkeypatch.setattr(os, "fdopen", open_full)
    begin(recorder, has_room=lambda: room.append("room"))
    take(recorder, 0)
    assert recorder.is_behind
    says = "the recording has ended, and training goes on without it"
    await until(lambda: says in caplog.text, "the end")
    assert room == ["room"]
    assert "No space left" in caplog.text
    assert recorder.report()["recording/waiting_bytes"] == 0
    # It claims no more than is true.
    claim = "All that is in the file can be replayed" if had_messages else "Nothing there can be"
    assert (recorder.is_empty, claim in caplog.text) == (not had_messages, True)
    take(recorder, 1)
    assert not recorder.is_behind
    await recorder.finish("env_steps", 1, {})


def replace(path):
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    other.rename(path)


@pytest.mark.parametrize(
    "spoil",
    [
        replace,
        # As logrotate's copytruncate does it, to a part.
        lambda path: os.truncate(path, path.stat().st_size * 9 // 10),
    ],
    ids=["replaced", "cut"],
)
async def test_a_file_that_somebody_spoils_is_no_recording(path, caplog, spoil):
    caplog.set_level("INFO")
    recorder = Recorder(path, RUN)
    begin(recorder)
    await until(lambda: path.stat().st_size > 0, "the first bytes")
    spoil(path)
    take(recorder, 1)
    await recorder.finish("terminated", 1, {})
    assert recorder.is_empty
    assert "Nothing there can be replayed" in caplog.text
    assert "recorded" not in caplog.text


async def test_a_bug_in_the_thread_reaches_the_loop(path, monkeypatch):
    deaths = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: deaths.append(context["exception"]))
    monkeypatch.setattr(module, "encode_record", lambda record: 1 / 0)
    recorder = Recorder(path, RUN)
    begin(recorder)
    await until(lambda: bool(deaths), "the death")
    assert isinstance(deaths[0], ZeroDivisionError)


async def test_a_recording_that_never_began_has_no_end_and_leaves_no_file(path):
    recorder = Recorder(path, RUN)
    take(recorder, 1)
    assert not recorder.is_behind
    await recorder.finish("terminated", 0, {})
    recorder.close()
    recorder.withdraw()
    assert not path.exists()


def test_what_cannot_be_recorded_to(path):
    def refused(says, file=path):
        with pytest.raises(RecordingError, match=rf"^{file}: {says}"):
            Recorder(file, RUN)

    path.write_bytes(b"precious")
    path.with_name("link").symlink_to(path.with_name("nothing"))
    os.mkfifo(path.with_name("pipe"))
    taken = (path, path.parent, Path("/dev/full"), path.with_name("link"), path.with_name("pipe"))
    for file in taken:
        refused("is there already, and a recording is of one start .*: name another file", file)
    assert path.read_bytes() == b"precious"
    refused("cannot be written: Not a directory", path / "in a file")
    refused("cannot be written: No such file", path.parent / "nowhere" / "file")
