"""The benchmark of the update measures the ways that a device has, and says how long they take."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.learner import CARTPOLE, CONFIGS, ENDLESS, loop
from bench.learner_ends import record
from bench.update import figures_of, ways_of
from impala_async.config_load import load_config


def test_a_graph_is_measured_only_where_there_is_one() -> None:
    assert ways_of("cpu") == ["off", "inductor"]
    assert ways_of("cuda") == ["off", "inductor", "cuda_graph"]


def test_speed_is_over_the_plain_way_of_the_same_round() -> None:
    plain = [{"updates_per_s": rate, "update_ms": 1000 / rate} for rate in (100.0, 50.0, 10.0)]
    fast = [{"updates_per_s": rate, "first_s": 9.0} for rate in (200.0, 75.0, 30.0)]
    first, speed, wait = figures_of(CARTPOLE, {"off": plain, "inductor": fast})
    assert (first.median, first.unit) == (20, "ms")
    assert (speed.median, speed.smallest, speed.largest) == (2, 1.5, 3)
    assert (wait.median, wait.unit) == (9, "s")


@pytest.mark.e2e
def test_a_way_is_that_of_the_setting(tmp_path: Path) -> None:
    """Here is no GPU, or none that was asked for: a graph says so, and is measured as plain."""
    record(tmp_path / "recording", CONFIGS / CARTPOLE.config, [*ENDLESS, "stop.env_steps=2000"])
    settings = [*ENDLESS, "learner.compile=cuda_graph", "learner.device=cpu"]
    config = load_config(CONFIGS / CARTPOLE.config, settings)
    sample = loop("step", tmp_path / "recording", config, 0.1)
    assert sample["updates_per_s"] > 1
    assert sample["first_s"] > 0
    told = json.dumps(config.model_dump(mode="json", by_alias=True))
    command = [sys.executable, "-m", "bench.bare_loop", "step", str(tmp_path / "recording"), told]
    ended = subprocess.run([*command, "0.1"], capture_output=True, text=True, check=True)
    assert "no CUDA graph: the learner is on cpu" in ended.stderr
