"""Trains one case with one seed, through the door that users take, and reads what came of it."""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.learning.cases import Case
from bench.one_run import CONFIGS, OneRun

TIME_LIMIT_S = 3600.0
LOOK_EVERY_S = 1.0


@dataclass(frozen=True)
class Outcome:
    """One training."""

    seed: int
    best_return: float | None
    env_steps: int
    wall_s: float
    lag_median: int | None
    has_passed: bool


def train(case: Case, seed: int, folder: Path) -> Outcome:
    """Run it to its goal or to the end of its steps; what it says goes to `train.log`."""
    folder.mkdir(parents=True)
    settings = [
        *case.overrides,
        f"seed={seed}",
        f"stop.env_steps={case.env_steps}",
        f"stop.mean_return={'none' if case.is_control or case.trial else case.goal}",
    ]
    config = CONFIGS / case.config if case.config else None
    began = time.monotonic()
    run = OneRun(config, settings, folder, case.num_ranks)
    try:
        for _ in run.moments(LOOK_EVERY_S, TIME_LIMIT_S):
            pass
    except RuntimeError as error:
        where = f"{case.name}, seed {seed}"
        raise RuntimeError(f"{where}: {error}; see {folder}/train.log") from None
    finally:
        run.end()
    return read(case, seed, run.run_dir, time.monotonic() - began)


def read(case: Case, seed: int, run: Path, wall_s: float) -> Outcome:
    """The outcome of a training that is over, from its run folder."""
    summary = json.loads((run / "summary.json").read_text())
    best = _best_mean(run, summary) if case.trial is None else case.trial(run)
    if case.is_control:
        has_passed = best is None or best < case.goal
    elif case.trial is not None:
        has_passed = best is not None and best >= case.goal
    else:
        has_passed = summary["exit_reason"] == "mean_return"
    lag = summary["lag_quantiles"]
    return Outcome(
        seed=seed,
        best_return=best,
        env_steps=summary["env_steps_trained"],
        wall_s=round(wall_s, 1),
        lag_median=lag[2] if lag else None,
        has_passed=has_passed,
    )


def _best_mean(run: Path, summary: dict[str, Any]) -> float | None:
    """The highest mean return of 100 episodes on the way."""
    reports = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    means = [report["mean_return_100"] for report in reports] + [summary["mean_return_100"]]
    return max((mean for mean in means if mean is not None), default=None)
