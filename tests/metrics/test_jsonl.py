"""metrics.jsonl on real files: whole lines only, whatever the disk does."""

import contextlib
import json
import logging
import os
import resource

import pytest

from impala_async.metrics.jsonl import JsonlSink


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


@contextlib.contextmanager
def file_size_limit(num_bytes):
    """A disk that is full after so many bytes: the write that crosses the line is cut short."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def write(sink, *updates):
    for update in updates:
        sink.write({"updates": update})


def read(path):
    text = path.read_text()
    assert text == "" or text.endswith("\n")
    return [json.loads(line)["updates"] for line in text.splitlines()]


def test_each_report_is_a_line_at_once_by_one_write_also_of_the_next_start(path, monkeypatch):
    written: list[bytes] = []
    real_write = os.write

    def spy(fd, line):
        written.append(line)
        return real_write(fd, line)

    monkeypatch.setattr(os, "write", spy)
    for start in (1, 2):
        sink = JsonlSink(path)
        assert path.exists() == (start == 2)
        sink.write({"lag/quantiles": [0.0, 1.5], "bottleneck": "learner\nnicht müde"})
        assert len(written) == start
        assert path.read_bytes() == b"".join(written)
        sink.close()
    assert json.loads(written[0]) == {
        "lag/quantiles": [0.0, 1.5],
        "bottleneck": "learner\nnicht müde",
    }


@pytest.mark.parametrize("torn", ["x", '{"updates":', "y" * 200_000])
@pytest.mark.parametrize("whole", ["", '{"updates":1}\n', '{"updates":1}\n' * 9000])
def test_a_torn_last_line_is_cut(path, whole, torn):
    path.write_text(whole + torn)
    write(JsonlSink(path), 2)
    assert path.read_text() == whole + '{"updates":2}\n'


def test_a_full_disk_loses_reports_and_says_so_once_each_time(path, caplog):
    sink = JsonlSink(path)
    with caplog.at_level(logging.INFO):
        for lost in ((0, 1, 2), (5,)):
            path.symlink_to("/dev/full")
            write(sink, *lost)
            path.unlink()
            write(sink, 3, 4)
            assert read(path) == [3, 4]
            path.unlink()
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"] * 2
    assert "No space left" in caplog.messages[0]
    assert "3 reports lost" in caplog.messages[1]
    assert "1 reports lost" in caplog.messages[3]


def test_half_a_line_is_taken_back(path, caplog):
    sink = JsonlSink(path)
    write(sink, 1)
    with file_size_limit(path.stat().st_size + 5):
        write(sink, 2)
        assert read(path) == [1]
        assert "5 of 14 bytes" in caplog.text
    write(sink, 3)
    assert read(path) == [1, 3]


def test_it_follows_its_path_but_not_into_what_is_somebody_elses(tmp_path):
    gone: list[bool] = []
    path = tmp_path / "later" / "metrics.jsonl"
    sink = JsonlSink(path, is_gone=lambda: bool(gone))
    write(sink, 0)
    path.parent.mkdir()
    write(sink, 1)
    moved = path.rename(path.with_name("moved.jsonl"))
    write(sink, 2)
    gone.append(True)
    write(sink, 3)
    assert (read(moved), read(path)) == ([1], [2])


def test_a_report_that_is_not_json_is_refused(path):
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="JSON"):
            JsonlSink(path).write({"loss/total": value})
    assert not path.exists()


def test_reports_leave_room_and_come_back(path, monkeypatch, caplog):
    fields = list(os.statvfs("/"))

    def fstatvfs(fd):
        return os.statvfs_result(fields)

    monkeypatch.setattr(os, "fstatvfs", fstatvfs)
    reserve = [0]
    sink = JsonlSink(path, reserve=lambda: reserve[0])
    # The last file system does not know how many blocks there are.
    for number, (size, free, kept) in enumerate(
        [(100, 0, 0), (100, 60, 50), (100, 40, 50), (100, 49, 50), (100, 50, 50), (0, 0, 50)]
    ):
        fields[1], fields[2], fields[4], reserve[0] = 1, size, free, kept
        write(sink, number)
    assert read(path) == [0, 1, 4, 5]
    assert caplog.text.count("what is free is left to checkpoints") == 1
    assert "2 reports lost" in caplog.text


def test_a_pipe_that_nobody_empties_is_not_waited_for(path, caplog):
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    sink = JsonlSink(path)
    for number in range(200):
        sink.write({"text": "x" * 1000, "updates": number})
    os.close(reader)
    assert "cannot be written" in caplog.text
