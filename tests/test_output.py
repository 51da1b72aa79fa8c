"""A terminal or a pipe that nobody reads holds up no writer; waits are told of."""

import io
import logging
import os
import re
import sys
import threading
import time

import pytest

from impala_async import output
from impala_async.doors import run_door


@pytest.fixture
def pipe():
    """A stream into a pipe, and where it comes out."""
    reads, writes = os.pipe()
    stream = os.fdopen(writes, "w")
    yield stream, reads
    os.close(reads)
    stream.close()


def read_until(reads, end):
    found = b""
    while not found.endswith(end):
        found += os.read(reads, 1 << 16)
    return found.decode()


def test_all_of_it_comes_in_order(pipe):
    stream, reads = pipe
    unhurried = output.Unhurried(stream)
    lines = [f"line {number}\n" for number in range(100)]
    for line in lines:
        assert unhurried.write(line) == len(line)
    assert read_until(reads, lines[-1].encode()) == "".join(lines)
    # As rich asks it.
    assert (unhurried.encoding, unhurried.isatty()) == (stream.encoding, False)


def test_a_reader_that_stops_holds_up_no_writer_and_is_told_how_much_it_missed(pipe):
    stream, reads = pipe
    unhurried = output.Unhurried(stream)
    line = 99 * "x" + "\n"
    num_lines = 3 * output.MOST_WAITING
    before = time.monotonic()
    for _ in range(num_lines):
        unhurried.write(line)
    unhurried.drain(0.2)
    assert time.monotonic() - before < 2.0
    found = []
    reader = threading.Thread(target=lambda: found.append(read_until(reads, b"goes\n")))
    reader.start()
    unhurried.drain(60.0)
    unhurried.write("and on it goes\n")
    reader.join(60.0)
    missing = r"\((\d+) lines are missing here: nobody read them in time\)\n"
    # The thread may have made room in between.
    num_missing = sum(map(int, re.findall(missing, found[0])))
    assert 0 < num_missing == num_lines - found[0].count(line)


def test_a_reader_that_is_gone_is_an_error_of_the_next_write(pipe):
    stream, reads = pipe
    closed = os.dup(reads)
    os.dup2(os.open(os.devnull, os.O_RDONLY), reads)
    os.close(closed)
    unhurried = output.Unhurried(stream)
    unhurried.write("to nobody\n")
    unhurried.drain(2.0)
    with pytest.raises(BrokenPipeError):
        unhurried.write("to nobody\n")
    # The text that the stream still holds has no reader either.
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def test_only_what_has_a_reader_is_written_beside(pipe, monkeypatch, tmp_path):
    stream, reads = pipe
    with (tmp_path / "log").open("w") as log:
        monkeypatch.setattr(sys, "stderr", log)
        output.write_unhurried()
        assert sys.stderr is log
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(output.os, "register_at_fork", lambda **hooks: None)
    output.write_unhurried()
    first = sys.stderr
    output.write_unhurried()
    assert sys.stderr is first
    first.write("the end\n")
    output.flush_output()
    assert os.read(reads, 99) == b"the end\n"
    monkeypatch.setattr(sys, "stdout", stream)
    output.write_unhurried("stdout")
    assert isinstance(sys.stdout, output.Unhurried)
    assert any(thread.name == output.WRITER for thread in threading.enumerate())


def test_what_an_encoding_does_not_have_is_written_as_an_escape(monkeypatch):
    kept = io.BytesIO()
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.TextIOWrapper(kept, "ascii", write_through=True))

    def body():
        for stream in (sys.stdout, sys.stderr):
            stream.write("runs/目录\n")
        return 0

    assert run_door(body) == 0
    assert kept.getvalue() == b"runs/\\u76ee\\u5f55\n" * 2
    monkeypatch.undo()


def test_a_wait_is_told_of_after_a_while_and_then_now_and_then():
    told, now = [], 100.0
    wait = output.Wait(told.append, clock=lambda: now)
    for second in range(28):
        now = 100.0 + second
        wait.look(lambda s: f"{s:.0f}")
    assert told == ["3", "13", "23"]
    earlier = output.Wait(told.append, after_s=10.0, since=90.0, clock=lambda: 101.0)
    earlier.look(lambda s: f"{s:.0f} s")
    earlier.look(lambda s: "too soon")
    assert told[3:] == ["11 s"]


def test_work_is_done_where_nobody_can_tell_of_it(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(KeyError, match="the work"), output.told_of("working", print):
        raise KeyError("the work")


def test_of_each_kind_of_line_one_is_said_in_ten_seconds(caplog):
    caplog.set_level(logging.INFO)
    now = 100.0
    log = output.SeldomLog(logging.getLogger("some"), lambda: now)
    for number in range(3):
        log.warning("refused: %d", number)
        log.info("looking")
    assert caplog.messages == ["refused: 0", "looking"]
    now += output.EVERY_S
    log.warning("refused: %d", 7)
    assert caplog.messages[2:] == ["refused: 7"]
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO", "WARNING"]
