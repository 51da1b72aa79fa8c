"""The benchmark of two checkouts trains with the package of each, and has a floor for the ratio."""

import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from bench import before
from bench.one_run import CONFIGS, one_run


def report(wall_s, updates, env_steps):
    return {"learner/wall_s": wall_s, "time_s": wall_s, "updates": updates} | {
        "env_steps_trained": env_steps
    }


def test_a_slower_checkout_misses_the_floor(monkeypatch, tmp_path):
    (tmp_path / "impala_async").mkdir()

    def trained(config, settings, checkout):
        assert config == checkout / "configs/cartpole.toml"
        assert "pace.mode=lockstep" not in settings
        steps = 9000 if checkout == before.HERE else 10_000
        reports = [report(None, 0, 0), report(1.0, 5, 1000), report(3.0, 10, 2000)]
        reports.append(report(4.0, 110, 2000 + steps))
        return nullcontext(SimpleNamespace(moments=lambda every_s: (), reports=lambda: reports))

    monkeypatch.setattr(before, "one_run", trained)
    monkeypatch.setattr(before, "CASES", {"CartPole": before.CASES["CartPole"]})
    flags = [str(tmp_path), "--rounds", "2", "--write", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["x", *flags])
    assert before.main() == 1
    figures = json.loads((tmp_path / "before.json").read_text())["figures"]
    assert [each["median"] for each in figures] == [0.9, 1.0]
    assert [each["is_held"] for each in figures] == [False, True]


def test_a_folder_that_is_no_checkout_is_named(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("sys.argv", ["x", str(tmp_path)])
    with pytest.raises(SystemExit):
        before.main()
    assert f"{tmp_path} is no checkout" in capsys.readouterr().err


@pytest.mark.e2e
def test_a_checkout_trains_with_its_own_package(tmp_path):
    package = tmp_path / "impala_async"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "train.py").write_text("raise SystemExit('another package')")
    other = pytest.raises(RuntimeError, match="another package")
    with one_run(CONFIGS / "cartpole.toml", [], checkout=tmp_path) as run, other:
        list(run.moments(0.05))
