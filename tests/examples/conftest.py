"""Examples are run as a reader would run them."""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.e2e.zygote import Forked

ROOT = Path(__file__).resolve().parents[2]

# Enough for some updates.
FEW_STEPS = ("--set", "stop.env_steps=4000")


@pytest.fixture
def train(tmp_path):
    """Runs an example, with a run folder, to one of its ends."""

    def run(name, end):
        run_dir, log = tmp_path / "run", tmp_path / "log"
        flags = FEW_STEPS if end == "env_steps" else ()
        with log.open("wb") as file:
            process = Forked(
                [sys.executable, str(ROOT / "examples" / name), *flags, "--run-dir", str(run_dir)],
                # Not in the checkout: nothing may depend on the folder that it is started from.
                cwd=tmp_path,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdout=file,
                stderr=file,
            )
        try:
            assert process.wait(90) == 0, log.read_text()
        finally:
            process.kill()
        summary = json.loads((run_dir / "summary.json").read_text())
        assert summary["exit_reason"] == end, summary
        assert summary["rejected"] == 0
        assert summary["updates"] > 2

    return run
