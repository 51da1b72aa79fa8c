"""A run folder names the address of its learner, and another one when that has moved."""

import errno
import json
import os
import threading
import time

import pytest

from impala_async.actor import address as module
from impala_async.actor.address import OTHER_RUN, Address
from impala_async.config.learner import KEY_VARIABLE
from impala_async.errors import CheckpointError, ConfigError, UnreachableError
from impala_async.output import Wait
from impala_async.runs.folder import RunFolder
from impala_async.wire.actor_side import NO_RUN
from impala_async.wire.keys import Key

WITHIN_S = 60.0


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """Waits are told of at once, and each look is one."""
    monkeypatch.setattr(module, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(module, "Wait", lambda tell: Wait(tell, after_s=0.0))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"run_id": "ab" * 16, "config": {}}))
    return RunFolder(tmp_path)


def find(address, within_s=WITHIN_S):
    address.find(time.monotonic() + within_s, lambda: None)
    return address.url


def test_an_address_stays_and_is_of_any_run():
    address = Address("tcp://h:7")
    assert (find(address, 0.0), address.has_moved(), address.run_id) == ("tcp://h:7", False, NO_RUN)


def test_a_folder_names_the_address_as_soon_as_there_is_a_learner(folder, caplog):
    caplog.set_level("INFO")
    address = Address(str(folder.path))
    silent = f"{folder.path}: no learner has said there where it listens"
    with pytest.raises(UnreachableError, match=silent):
        find(address, 0.1)
    assert caplog.messages == [f"{silent} (0 s)"]
    folder.write_json("summary.json", {"exit_reason": "mean_return"})
    with pytest.raises(UnreachableError, match=rf"{silent}; its run has ended \(mean_return\)$"):
        find(address, 0.0)
    found = []
    thread = threading.Thread(target=lambda: found.append(find(address)))
    thread.start()
    folder.announce("tcp://h:7", "tcp://h:8", 1)
    thread.join(WITHIN_S)
    assert found == ["tcp://h:7"]
    assert address.run_id == b"\xab" * 16
    # Its settings may be nobody else's to read.
    (folder.path / "config.json").unlink()
    assert address.run_id == NO_RUN


def test_a_folder_may_be_made_later(tmp_path):
    assert not module.is_folder("run")  # by its name alone it may be a slip of an address
    address = Address(str(tmp_path / "runs" / "mine"))
    with pytest.raises(UnreachableError):
        find(address, 0.0)
    folder = RunFolder(tmp_path / "runs" / "mine")
    folder.path.mkdir(parents=True)
    folder.announce("tcp://h:7", "tcp://h:8", 1)
    assert find(address) == "tcp://h:7"
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="Not a directory"):
        find(Address(str(tmp_path / "file")))


def test_a_wait_ends_when_the_actor_is_to_end(folder):
    class Stopped(Exception):
        pass

    def stop():
        raise Stopped

    with pytest.raises(Stopped):
        Address(str(folder.path)).find(time.monotonic() + WITHIN_S, stop)


def test_a_learner_that_was_started_elsewhere_has_moved_once(folder, monkeypatch):
    folder.announce("tcp://h:7", "tcp://h:8", 1)
    address = Address(os.path.relpath(folder.path))
    find(address)
    monkeypatch.chdir("/")  # as code of a user's own may
    assert not address.has_moved()
    folder.remove("service.json")  # it has ended well
    assert (address.has_moved(), find(address, 0.0)) == (False, "tcp://h:7")
    folder.announce("tcp://other:9", "tcp://other:10", 2)
    assert (address.has_moved(), address.url, address.has_moved()) == (True, "tcp://other:9", False)
    # It is found without another look, too.
    folder.announce("tcp://h:11", "tcp://h:12", 3)
    assert find(address) == "tcp://h:11"


def test_the_key_is_that_of_the_folder_or_of_the_environment(folder, monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, "cd" * 32)
    assert Address("tcp://h:7").key == Key("cd" * 32, "")
    address = Address(str(folder.path))
    folder.announce("tcp://h:7", "tcp://h:8", 1)
    find(address)
    assert address.key is None
    folder.keep_key("ab" * 32)
    assert not address.has_moved()  # one of an earlier start
    folder.announce("tcp://h:7", "tcp://h:8", 2, is_encrypted=True)
    assert (address.has_moved(), address.key) == (True, Key("ab" * 32, ""))
    assert not address.has_moved()
    folder.keep_key("ef" * 32)
    assert (address.has_moved(), address.key) == (True, Key("ef" * 32, ""))


def test_a_folder_whose_key_is_missing_is_waited_for_and_one_that_is_none_is_told(folder):
    folder.announce("tcp://h:7", "tcp://h:8", 1, is_encrypted=True)
    # A learner that was killed has said so, and the next one brings another.
    with pytest.raises(UnreachableError, match=f"{folder.path}/key: the key of the run is missing"):
        find(Address(str(folder.path)), 0.1)
    folder.keep_key("ab")
    with pytest.raises(ConfigError, match=rf"{folder.path}/key: wants 64 .* got 2 characters"):
        find(Address(str(folder.path)))


def test_the_folder_of_another_user_goes_with_the_key_of_the_environment(folder, monkeypatch):
    folder.announce("tcp://h:7", "tcp://h:8", 1, is_encrypted=True)
    (folder.path / "key").mkdir()  # as one that may not be read, by root too
    with pytest.raises(CheckpointError, match="key: cannot be read"):
        find(Address(str(folder.path)))
    monkeypatch.setenv(KEY_VARIABLE, "cd" * 32)
    address = Address(str(folder.path))
    assert (find(address), address.key) == ("tcp://h:7", Key("cd" * 32, ""))
    (folder.path / "key").rmdir()
    folder.keep_key("ab" * 32)
    assert (address.has_moved(), address.key) == (True, Key("ab" * 32, ""))


def test_a_look_at_a_disk_is_not_made_at_every_turn(folder, monkeypatch):
    monkeypatch.setattr(module, "LOOK_EVERY_S", WITHIN_S)
    folder.announce("tcp://h:7", "tcp://h:8", 1)
    address = Address(str(folder.path))
    assert address.has_moved()
    folder.announce("tcp://h:9", "tcp://h:8", 1)
    assert not address.has_moved()


@pytest.mark.parametrize("said", [None, 5, "/", ".", "tcp://*:5555", "\ud800", "x" * 10_000])
def test_a_folder_that_says_no_address_is_told_at_first_and_later_passed_over(said, folder):
    folder.write_json("service.json", {"data_url": said})
    address = Address(str(folder.path))
    with pytest.raises(ConfigError, match=r"service\.json: data_url: wants tcp://") as caught:
        find(address)
    assert len(str(caught.value)) < 500
    folder.announce("tcp://h:7", "tcp://h:8", 1)
    find(address)
    folder.write_json("service.json", {"data_url": said})
    assert (address.has_moved(), find(address)) == (False, "tcp://h:7")


def test_a_file_that_only_grows_is_not_taken_in(folder):
    folder.write_json("service.json", {"data_url": "tcp://h:7", "more": "x" * 70_000})
    with pytest.raises(CheckpointError, match=r"service\.json: cannot be read: it is longer than"):
        find(Address(str(folder.path)))


def test_a_folder_that_cannot_be_read_for_now_is_told_only_at_first(folder, monkeypatch):
    folder.announce("tcp://h:7", "tcp://h:8", 1)
    address, stale = Address(str(folder.path)), OSError(errno.ESTALE, "Stale file handle")
    find(address)

    def fail(path, most=0):
        raise CheckpointError(f"{path}: {stale}")

    monkeypatch.setattr("impala_async.files.find_bytes", fail)
    assert (address.has_moved(), find(address)) == (False, "tcp://h:7")
    with pytest.raises(CheckpointError):
        find(Address(str(folder.path)))


def test_the_address_of_another_run_is_left_when_the_folder_names_another_one(folder):
    folder.announce("tcp://h:7", "tcp://h:8", 1)
    address = Address(str(folder.path))
    find(address)
    with pytest.raises(UnreachableError, match=OTHER_RUN):
        address.leave_other(time.monotonic(), lambda: None)
    folder.announce("tcp://h:9", "tcp://h:8", 2)
    address.leave_other(time.monotonic() + WITHIN_S, lambda: None)
    assert address.url == "tcp://h:9"
