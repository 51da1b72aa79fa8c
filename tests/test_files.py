"""Small files as a stranger may have left them: each is one error that names it, and none hangs."""

import json
import os
import stat
from pathlib import Path

import pytest

from impala_async.errors import CheckpointError
from impala_async.files import (
    MOST_BYTES,
    beside,
    find_bytes,
    find_object,
    last_words,
    open_regular,
    write_whole,
)


def grow(path):
    path.touch()
    os.truncate(path, MOST_BYTES + 1)


DAMAGE = {
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "too long": grow,
    "empty": Path.touch,
    "cut off": lambda path: path.write_text('{"a": '),
    "no text": lambda path: path.write_bytes(b"\xff\xfe\xfd"),
    "a list": lambda path: path.write_text("[1]"),
    "a number of many digits": lambda path: path.write_text('{"a": ' + "9" * 5000 + "}"),
    "deep": lambda path: path.write_text("[" * 200_000 + "]" * 200_000),
}
NO_NUMBERS = ["NaN", "-Infinity", "1e999", "-1e101", str(2**63), '{"b": [NaN]}']


@pytest.fixture
def path(tmp_path):
    return tmp_path / "state.json"


@pytest.mark.parametrize("is_strict", [False, True])
def test_what_is_whole_is_read(path, is_strict):
    assert find_object(path, is_strict=is_strict) is None
    content = {"a": [1, -2.5, None, True, "x"], "b": {"c": 2**62, "d": 1e100}}
    path.write_text(json.dumps(content))
    assert find_object(path, is_strict=is_strict) == content


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_damage_is_one_line_that_names_the_file(path, damage):
    damage(path)
    with pytest.raises(CheckpointError) as caught:
        find_object(path)
    told = str(caught.value)
    assert told.startswith(f"{path}: cannot be read: ")
    assert not path.is_fifo() or told.endswith("it is no regular file")
    assert "\n" not in told


@pytest.mark.parametrize("text", NO_NUMBERS)
def test_numbers_that_nothing_can_be_computed_with(path, text):
    path.write_text(f'{{"a": {text}}}')
    assert find_object(path) is not None
    with pytest.raises(CheckpointError, match="no number to compute with"):
        find_object(path, is_strict=True)


def test_a_device_is_not_opened_to_see_what_it_is(path, monkeypatch):
    opened = []
    monkeypatch.setattr(os, "open", lambda *how: opened.append(how))
    path.symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match="it is no regular file"):
        find_bytes(path)
    assert opened == []


def test_no_more_is_read_than_may_be_there(path):
    path.write_bytes(b"12345")
    assert find_bytes(path, most=5) == b"12345"
    with pytest.raises(CheckpointError, match="longer than 4 bytes"):
        find_bytes(path, most=4)


def test_it_is_written_beside_and_on_the_disk_before_it_is_there(path, monkeypatch):
    seen = []
    path.write_bytes(b"before")
    beside(path).write_bytes(b"left over")
    fsync = os.fsync

    def look(descriptor):
        seen.append((stat.S_ISDIR(os.fstat(descriptor).st_mode), path.read_bytes()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", look)
    write_whole(path, b"after", 0o600)
    assert seen == [(False, b"before"), (True, b"after")]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(path.parent.iterdir()) == [path]


def test_last_words_are_an_error_or_the_last_line_since_a_process_began(tmp_path):
    log = tmp_path / "a.log"
    assert last_words(log, 0) == "it said nothing"
    os.mkfifo(tmp_path / "pipe")  # nobody writes to it
    assert last_words(tmp_path / "pipe", 0) == "it said nothing"
    log.write_text("error: of before\n")
    begin = log.stat().st_size
    assert last_words(log, begin) == "it said nothing"
    log.write_text(f"{log.read_text()}ep 7\n12:00:00 INFO at work\n")
    assert last_words(log, begin) == "the last line of its log: ep 7"
    log.write_text(f"{log.read_text()}error: no GL\nbye\n")
    assert last_words(log, begin) == "no GL"


def test_a_log_is_no_program(tmp_path):
    log, mask = tmp_path / "log", os.umask(0o022)
    try:
        open(log, "a+b", opener=open_regular).close()
    finally:
        os.umask(mask)
    assert log.stat().st_mode & 0o777 == 0o644
