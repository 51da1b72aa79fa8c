"""The example trains, and its policy plays better than one that has learned nothing."""

import pytest

from examples.use_policy import main

pytestmark = pytest.mark.e2e


def test_it_trains_and_plays(tmp_path, monkeypatch, capsys, forks):
    monkeypatch.chdir(tmp_path)
    total = main({"stop.mean_return": 120})
    said = capsys.readouterr().out
    assert "mean return of each report: [" in said
    assert "Discrete(2)" in said
    # An untrained policy keeps the pole up for about 20 steps.
    assert total > 60
