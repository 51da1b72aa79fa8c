"""A recording as a list of messages: its order, and what is wrong with a file."""

import os

import pytest

from impala_async.errors import RecordingError
from impala_async.replay.index import RecordingIndex, settings_for
from tests.learner.columns import big_schema
from tests.replay.recordings import SCHEMA, end, message, start, write


@pytest.fixture
def path(tmp_path):
    return tmp_path / "recording"


def test_messages_come_in_the_order_of_admission(path):
    sent = [message(n, columns=1 + n % 3, update=n, arrived_s=n / 2) for n in range(9)]
    index = RecordingIndex(write(path, start(), *sent, end(7)))
    assert len(index) == 9
    for number, recorded in enumerate(sent):
        found = index.message(number)
        assert found._replace(body=bytes(found.body)) == recorded
    assert index.message(3) == index.message(3)
    assert index.most_columns == 3
    assert index.schema == SCHEMA
    assert (index.start, index.end) == (start(), end(7))


def test_what_was_cut_is_left_out_and_told(path, caplog):
    write(path, start(), message(0), message(1))
    path.write_bytes(path.read_bytes()[:-1])
    assert len(RecordingIndex(path)) == 1
    assert "its last record is cut off, and left out" in caplog.text


def test_what_is_no_recording_to_play(path):
    def refused(says):
        with pytest.raises(RecordingError, match=rf"^{path}: {says}"):
            RecordingIndex(path)

    refused("cannot be read: No such file")
    os.mkfifo(path)
    refused("cannot be read: it is no regular file")
    path.unlink()
    path.write_bytes(b"")
    refused("holds no message")
    path.write_bytes(b"something else")
    refused("is not a recording of impala-async")
    for records in ((), (start(), end(0))):
        write(path, *records)
        refused("holds no message")
    write(path, message(0))
    refused("does not begin with what is said of its run")
    for name in ("env", "pace", "algorithm", "stop"):
        write(path, start()._replace(settings={name: 5}), message(0))
        refused(f"its settings are odd: {name} is no table")
    write(path, start(), message(0), start(2, 1))
    refused(r"the record at byte \d+ is not of its run")
    write(path, start(), message(0, schema=big_schema()))
    refused(r"the record at byte \d+ is not of its run")
    damaged = bytearray(write(path, start(), message(0)).read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    refused(r"the record at byte \d+ is damaged")


def test_rates_fall_as_they_did_in_a_run_that_had_an_end(path):
    goals = {"env_steps": 1000, "mean_return": 5, "eval_return": 9}
    for algorithm in ({"lr_end": 0}, {"entropy_cost_end": 1e-3}, {}):
        first = start(algorithm=algorithm, stop=goals, evaluate={"every_s": 60})
        index = RecordingIndex(write(path, first, message(0), end(7)))
        for is_exact in (False, True):
            config = settings_for(index, [], is_exact=is_exact)
            assert config.schedule_env_steps == 1000
            assert config.stop.model_dump(exclude_none=True) == ({"updates": 7} if is_exact else {})
        overrides = ["algorithm.schedule_env_steps=50"]
        assert settings_for(index, overrides, is_exact=False).schedule_env_steps == 50
    index = RecordingIndex(write(path, start(), message(0), end(7)))
    assert settings_for(index, [], is_exact=False).schedule_env_steps is None


def test_one_that_somebody_cuts_while_it_is_played_is_told(path):
    index = RecordingIndex(write(path, start(), message(0), message(1)))
    index.message(0)
    size = path.stat().st_size
    for left in (size - 1, 7):
        os.truncate(path, left)
        with pytest.raises(RecordingError, match=f"somebody has cut it to .* bytes, of {size}"):
            index.message(1)
