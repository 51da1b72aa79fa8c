"""The table of results: as markdown for people, as JSON for programs."""

import json
import math
import os
import platform
import statistics
import subprocess
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.learning.cases import Case
from bench.learning.train import Outcome

HEAD = (
    "| task | floor | seeds passed | mean return per seed | env steps, median | seconds, median |\n"
    "|---|---|---|---|---|---|"
)


def is_held(case: Case, outcomes: list[Outcome]) -> bool:
    """Whether enough seeds passed."""
    needed = math.ceil(case.num_must * len(outcomes) / case.num_seeds)
    return sum(outcome.has_passed for outcome in outcomes) >= needed


def row(case: Case, outcomes: list[Outcome]) -> str:
    """One line of the markdown table."""
    floor = f"{'below' if case.is_control else ''} {case.goal:g} in {case.env_steps:,}".strip()
    returns = ", ".join("-" if o.best_return is None else f"{o.best_return:.4g}" for o in outcomes)
    num_passed = sum(outcome.has_passed for outcome in outcomes)
    verdict = "" if is_held(case, outcomes) else " **missed**"
    steps = statistics.median(outcome.env_steps for outcome in outcomes)
    seconds = statistics.median(outcome.wall_s for outcome in outcomes)
    return (
        f"| {case.name} | {floor}, {case.num_must} of {case.num_seeds} "
        f"| {num_passed} of {len(outcomes)}{verdict} | {returns} | {steps:,.0f} | {seconds:.0f} |"
    )


def markdown(results: list[tuple[Case, list[Outcome]]], command: str) -> str:
    """The whole page."""
    machine = _machine()
    lines = [
        "# Learning",
        "",
        f"`{command}`, commit {machine['commit']}, {machine['date']}, on {machine['cores']} cores",
        f"of {machine['processor']}, torch {machine['torch']}.",
        "",
        "Returns are the best mean of 100 episodes of a seed, or a share that a trial measured",
        "after the training (`bench/learning/trials.py`); seconds are from launch to end, with the",
        "start of the processes. A control lacks what its task needs, and must stay below.",
        "",
        HEAD,
        *(row(case, outcomes) for case, outcomes in results),
    ]
    return "\n".join(lines) + "\n"


def as_json(results: list[tuple[Case, list[Outcome]]], command: str) -> str:
    content: dict[str, Any] = {"command": command, **_machine(), "results": []}
    for case, outcomes in results:
        entry = {"task": asdict(case), "held": is_held(case, outcomes)}
        content["results"].append({**entry, "seeds": [asdict(outcome) for outcome in outcomes]})
    return json.dumps(content, indent=2) + "\n"


def _machine() -> dict[str, Any]:
    import torch

    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit or "unknown",
        "cores": os.cpu_count(),
        "processor": _processor(),
        "torch": torch.__version__,
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
