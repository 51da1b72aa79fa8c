"""Examples are trained by real processes, as a reader would run them."""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.e2e.zygote import Forked

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.e2e


def train(folder, name, *flags):
    """Runs an example to a good end, and returns the run's summary."""
    log, run_dir = folder / "log", folder / "run"
    with log.open("wb") as file:
        process = Forked(
            [sys.executable, str(ROOT / "examples" / name), *flags, "--run-dir", str(run_dir)],
            # Not in the checkout: nothing may depend on the folder that it is started from.
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=file,
            stderr=file,
        )
    try:
        assert process.wait(100) == 0, log.read_text()
    finally:
        process.kill()
    return json.loads((run_dir / "summary.json").read_text())


@pytest.mark.parametrize(
    "name", ["custom_env", "custom_model", "nested_spaces", "rnd", "tictactoe"]
)
def test_an_example_trains(tmp_path, name):
    steps = ("--set", "stop.env_steps=5_000", "--set", "stop.mean_return=none")
    summary = train(tmp_path, f"{name}.py", *steps)
    assert summary["exit_reason"] == "env_steps"
    assert summary["rejected"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "goal"), [("custom_env", 0.6), ("custom_model", 0), ("nested_spaces", 7), ("rnd", 0.8)]
)
def test_an_example_reaches_its_return(tmp_path, name, goal):
    summary = train(tmp_path, f"{name}.py")
    assert summary["exit_reason"] == "mean_return"
    assert summary["mean_return_100"] >= goal
