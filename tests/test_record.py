"""The record door: what `train` does, with one more flag for the learner."""

import pytest

from impala_async import record, train
from tests.test_train import FakeRun, write_down


@pytest.fixture(autouse=True)
def fake_run(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(FakeRun, "made", [], raising=False)
    monkeypatch.setattr(train, "LocalRun", FakeRun)


def recorded(*flags):
    assert record.main(flags) == 0
    (run,) = FakeRun.made
    return run


def test_the_learner_is_told_where_to_record():
    run = recorded("some file", "--set", "train.num_actors=5", "--run-dir", "here")
    assert run.values("--record") == ["some file"]
    assert run.num_actors == 5
    assert run.values("--run-dir") == ["here"]


def test_train_records_nothing():
    assert train.main([]) == 0
    assert "--record" not in FakeRun.made[0].flags


@pytest.mark.parametrize("flags", [[], ["file", "more"], ["file", "--record", "x"]])
def test_it_wants_one_file(flags, capsys):
    with pytest.raises(SystemExit) as end:
        record.main(flags)
    assert end.value.code == 2
    assert "FILE" in capsys.readouterr().err


def test_settings_are_checked_first(capsys):
    assert record.main(["file", "--set", "seed=-1"]) == 2
    made = FakeRun.made
    assert made == []
    assert "seed" in capsys.readouterr().err


def test_a_run_that_was_killed_goes_on_without_its_recording(monkeypatch, caplog):
    monkeypatch.setattr("sys.argv", ["/bin/impala-async", "record"])
    monkeypatch.setattr(FakeRun, "code", 137)
    monkeypatch.setattr(FakeRun, "during", staticmethod(write_down))
    assert record.main(["file", "--run-dir", "here"]) == 137
    (told,) = caplog.messages
    assert told.endswith("to go on: impala-async train --resume --run-dir here")
