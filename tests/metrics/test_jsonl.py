"""metrics.jsonl on real files: whole lines only, whatever the disk does."""

import contextlib
import json
import logging
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from impala_async.metrics.jsonl import JsonlSink
from impala_async.metrics.names import Value


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


@contextlib.contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """A disk that is full after so many bytes: the write that crosses the line is cut short."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def read(path: Path) -> list[dict[str, Value]]:
    text = path.read_text()
    assert text == "" or text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def test_each_report_is_a_line_at_once(path: Path) -> None:
    sink = JsonlSink(path)
    reports: list[dict[str, Value]] = [
        {"updates": 1, "mean_return_100": None, "lag/quantiles": [0.0, 1.5]},
        {"updates": 2, "bottleneck": "learner\nnicht müde"},
    ]
    for num_written, report in enumerate(reports, start=1):
        sink.write(report)
        assert read(path) == reports[:num_written]
    sink.close()
    assert read(path) == reports


def test_one_write_per_line(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bytes] = []
    real_write = os.write

    def spy(fd: int, line: bytes) -> int:
        written.append(line)
        return real_write(fd, line)

    monkeypatch.setattr(os, "write", spy)
    sink = JsonlSink(path)
    for update in range(3):
        sink.write({"updates": update})
    sink.close()
    assert written == [b'{"updates":%d}\n' % update for update in range(3)]


def test_a_second_run_appends(path: Path) -> None:
    for update in (1, 2):
        sink = JsonlSink(path)
        sink.write({"updates": update})
        sink.close()
    assert read(path) == [{"updates": 1}, {"updates": 2}]


@pytest.mark.parametrize("torn", ["x", '{"updates":', "y" * 200_000])
@pytest.mark.parametrize("whole", ["", '{"updates":1}\n', '{"updates":1}\n' * 9000])
def test_a_torn_last_line_is_cut_on_opening(path: Path, whole: str, torn: str) -> None:
    path.write_text(whole + torn)
    sink = JsonlSink(path)
    sink.write({"updates": 2})
    sink.close()
    assert path.read_text() == whole + '{"updates":2}\n'


def test_full_disk_loses_reports_and_says_so_once(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.symlink_to("/dev/full")
    sink = JsonlSink(path)
    with caplog.at_level(logging.INFO):
        for update in range(3):
            sink.write({"updates": update})
        assert [record.levelname for record in caplog.records] == ["ERROR"]
        assert "No space left" in caplog.text
        path.unlink()
        sink.write({"updates": 3})
        sink.write({"updates": 4})
    sink.close()
    assert read(path) == [{"updates": 3}, {"updates": 4}]
    assert len(caplog.records) == 2
    assert "3 reports lost" in caplog.records[1].getMessage()


def test_trouble_is_told_again_after_a_recovery(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sink = JsonlSink(path)
    for _ in range(2):
        path.symlink_to("/dev/full")
        sink.write({"updates": 0})
        path.unlink()
        sink.write({"updates": 1})
        sink.close()
        path.unlink()
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"] * 2


def test_a_file_that_is_moved_away_is_followed_by_a_new_one(path: Path) -> None:
    sink = JsonlSink(path)
    sink.write({"updates": 0})
    moved = path.rename(path.with_name("moved.jsonl"))
    for update in (1, 2):
        sink.write({"updates": update})
    path.unlink()
    path.write_text('{"updates":8}\n')  # a new file, with lines of somebody else
    sink.write({"updates": 3})
    path.unlink()
    sink.write({"updates": 4})
    sink.close()
    assert read(moved) == [{"updates": 0}]
    assert read(path) == [{"updates": 4}]


def test_a_missing_folder_is_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "later" / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.write({"updates": 0})
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    path.parent.mkdir()
    sink.write({"updates": 1})
    sink.close()
    assert read(path) == [{"updates": 1}]


def test_half_a_line_is_taken_back(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sink = JsonlSink(path)
    sink.write({"updates": 1})
    with file_size_limit(path.stat().st_size + 5):
        sink.write({"updates": 2})
        assert read(path) == [{"updates": 1}]
        assert "5 of 14 bytes" in caplog.text
    sink.write({"updates": 3})
    sink.close()
    assert read(path) == [{"updates": 1}, {"updates": 3}]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_report_that_is_not_json_is_refused(path: Path, value: float) -> None:
    sink = JsonlSink(path)
    with pytest.raises(ValueError, match="JSON"):
        sink.write({"loss/total": value})
    sink.close()
    assert not path.exists()


def test_close_twice_and_without_reports(path: Path) -> None:
    sink = JsonlSink(path)
    sink.close()
    assert not path.exists()
    sink.write({"updates": 1})
    sink.close()
    sink.close()


def test_reports_leave_room_and_come_back(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    free, size = [50], [100]
    fields = list(os.statvfs("/"))

    def fstatvfs(fd: int) -> os.statvfs_result:
        # The size of a block, and how many there are and are available.
        fields[1], fields[2], fields[4] = 1, size[0], free[0]
        return os.statvfs_result(fields)

    monkeypatch.setattr(os, "fstatvfs", fstatvfs)
    reserve = [0]
    sink = JsonlSink(path, reserve=lambda: reserve[0])
    for number, (room, kept) in enumerate([(0, 0), (60, 50), (40, 50), (49, 50), (50, 50)]):
        free[0], reserve[0] = room, kept
        sink.write({"updates": number})
    # A file system that does not know.
    size[0] = free[0] = 0
    sink.write({"updates": 5})
    sink.close()
    assert [report["updates"] for report in read(path)] == [0, 1, 4, 5]
    assert caplog.text.count("what is free is left to checkpoints") == 1
    assert "2 reports lost" in caplog.text


def test_a_pipe_that_nobody_empties_is_not_waited_for(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    sink = JsonlSink(path)
    for number in range(200):
        sink.write({"text": "x" * 1000, "updates": number})
    os.close(reader)
    assert "cannot be written" in caplog.text


def test_nothing_is_written_into_the_folder_of_somebody_else(path: Path) -> None:
    gone: list[bool] = []
    sink = JsonlSink(path, is_gone=lambda: bool(gone))
    sink.write({"updates": 1})
    gone.append(True)
    sink.write({"updates": 2})
    assert read(path) == [{"updates": 1}]
