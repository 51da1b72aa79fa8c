"""The words of a process: in its file, and told here behind its name."""

import errno
import io
import os
import subprocess
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from impala_async.errors import ConfigError, StartError
from impala_async.launch import logs
from impala_async.launch.logs import EchoedLog, LogFile


def say(log, text):
    """Let a process say this, in one life."""
    with log.open() as output:
        subprocess.run(["printf", "%s", text], stdout=output, check=True)
    log.follow()


@pytest.fixture(params=["file", "echoed"])
def log(request, tmp_path):
    if request.param == "file":
        return LogFile(tmp_path / "logs" / "actor-0.log", "--log-dir")
    return EchoedLog("actor 0")


def test_the_last_words_are_those_of_this_life(log):
    log.open().close()
    assert (log.has_spoken(), log.last_words()) == (False, "it said nothing")
    say(log, "error: it does not fit\n")
    assert (log.has_spoken(), log.last_words()) == (True, "it does not fit")
    say(log, "begun\nep 7")
    assert log.last_words() == "the last line of its log: ep 7"
    log.open().close()
    assert (log.has_spoken(), log.last_words()) == (False, "it said nothing")
    log.close()


def test_on_a_full_disk_it_may_have_spoken(tmp_path, monkeypatch):
    """Else each of its ends would be one that came before its first word."""
    log = LogFile(tmp_path / "actor-0.log", "--log-dir")
    log.open().close()
    assert not log.has_spoken()
    monkeypatch.setattr("os.statvfs", lambda path: SimpleNamespace(f_bavail=0))
    assert log.has_spoken()


def test_a_file_that_cannot_be_written_is_told_by_its_flag(tmp_path):
    (tmp_path / "logs").touch()
    with pytest.raises(
        ConfigError, match=r"^--log-dir: cannot write to .*logs: .*logs is a file, and"
    ):
        LogFile(tmp_path / "logs" / "actor-0.log", "--log-dir").open()


def test_a_run_folder_that_was_removed_is_not_made_anew(tmp_path):
    with pytest.raises(ConfigError, match=r"^--run-dir: cannot write to .*: No such file"):
        LogFile(tmp_path / "run" / "actors" / "actor-0.log", "--run-dir").open()
    assert [*tmp_path.glob("run")] == []


def test_each_line_is_told_behind_the_name_as_soon_as_it_is_whole(capsys):
    log = EchoedLog("actor 3")

    def told():
        log.follow()
        return capsys.readouterr().err

    with log.open() as output:
        output.write(b"one\ntw")
        assert told() == "actor 3: one\n"
        output.write(b"o\n\nbad \xff\nhal")
        assert told() == "actor 3: two\nactor 3: \nactor 3: bad \N{REPLACEMENT CHARACTER}\n"
    # It dies in a line, and another one begins its life.
    with log.open() as output:
        assert capsys.readouterr().err == "actor 3: hal\n"
        output.write(b"anew")
    log.close()
    assert capsys.readouterr().err == "actor 3: anew\n"


def test_a_line_without_end_is_told_in_pieces_and_not_kept(capsys):
    log, size = EchoedLog("actor 0"), 3 * logs.CHUNK_BYTES
    with log.open() as output:
        os.set_blocking(output.fileno(), False)
        left = memoryview(b"x" * size)
        while left:
            left = left[output.write(left) or 0 :]
            log.follow()
        assert len(log._begun) <= logs.CHUNK_BYTES
    log.close()
    assert capsys.readouterr().err.count("x") == size


def test_one_for_which_there_is_no_pipe_is_a_start_that_fails(monkeypatch):
    monkeypatch.setattr(os, "pipe", Mock(side_effect=OSError(errno.EMFILE, "Too many open files")))
    with pytest.raises(StartError, match="no pipe can be had for its words: Too many open files"):
        EchoedLog("actor 0").open()


class Gone(io.StringIO):
    def write(self, text):
        raise BrokenPipeError


def test_a_reader_that_is_gone_ends_no_actor(monkeypatch):
    monkeypatch.setattr("sys.stderr", Gone())
    log = EchoedLog("actor 0")
    with log.open() as output:
        output.write(b"a word\n")
        log.follow()
    assert log.last_words() == "the last line of its log: a word"
    log.close()
