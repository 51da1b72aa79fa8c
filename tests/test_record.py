"""The record door: as `train` does it, with one more flag for the learner."""

import pytest

from impala_async import record
from tests.test_train import FakeRun, fake_run, started, write_down

__all__ = ["fake_run"]


def test_the_learner_alone_is_told_where_to_record():
    flags = ("some file", "--set", "train.num_actors=5", "--run-dir", "here")
    run = started(*flags, main=record.main)
    assert run.values("--record") == ["some file"]
    assert run.num_actors == 5
    assert run.values("--run-dir") == ["here"]
    assert "--record" not in started().flags


@pytest.mark.parametrize("flags", [[], ["file", "more"], ["file", "--record", "x"]])
def test_it_wants_one_file(flags, capsys):
    with pytest.raises(SystemExit) as end:
        record.main(flags)
    assert end.value.code == 2
    assert "FILE" in capsys.readouterr().err


def test_a_run_that_was_killed_goes_on_without_its_recording(monkeypatch, caplog):
    monkeypatch.setattr("sys.argv", ["/bin/impala-async", "record"])
    monkeypatch.setattr(FakeRun, "code", 137)
    monkeypatch.setattr(FakeRun, "during", staticmethod(write_down))
    started("file", "--run-dir", "here", code=137, main=record.main)
    assert caplog.messages[0].endswith("to go on: impala-async train --resume --run-dir here")
