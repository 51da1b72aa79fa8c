"""The benchmark of a host gives both sides as many columns, and takes ratios by rounds."""

import json
import sys

from bench import host
from impala_async.config.load import load_config


def test_both_ways_are_compared_over_the_same_columns(tmp_path, monkeypatch):
    sides = []

    def measured(case, num, name, verdicts):
        sides.append((case.name, num))
        config = load_config(case.config, [*case.settings, f"train.num_actors={num}"])
        assert config.actor.num_envs * num == config.learner.batch_columns == 24
        is_one = num == 1
        assert config.actor.num_workers == (3 if is_one else None)
        assert config.actor.sampler == ("parallel" if is_one else "serial")
        assert config.trajectory.rows == 10
        return {"per_s": 90.0 if is_one else 100.0, "weights_bytes_per_step": 2.0 * num}

    monkeypatch.setattr(host, "measure", measured)
    flags = ["--num", "3", "--rounds", "2", "--only", "computes", "--write", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["bench", *flags])
    assert host.main() == 0
    assert sides == [("computes 1 ms", num) for num in (1, 3)] * 2
    written = json.loads((tmp_path / "host.json").read_text())["figures"]
    figures = {each["name"]: each for each in written}
    assert figures["computes 1 ms, 3 actors: weights per env step"]["median"] == 6
    assert figures["computes 1 ms: env steps/s of 1 over 3 actors"]["median"] == 0.9
    assert figures["computes 1 ms: weights of 1 over 3 actors"]["median"] == 1 / 3
    assert "with {num}" not in (tmp_path / "host.md").read_text()
