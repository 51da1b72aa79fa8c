"""Examples are run as a reader would run them."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.zygote import Forked

ROOT = Path(__file__).resolve().parents[2]

Train = Callable[..., dict[str, Any]]


@pytest.fixture
def train(tmp_path):
    """Runs an example to a good end, with a run folder, and returns the run's summary."""

    def run(name, *flags):
        run_dir = tmp_path / "run"
        log = tmp_path / "log"
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
        summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
        return summary

    return run
