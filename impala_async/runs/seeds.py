"""Several runs that differ in their seeds: one table, and one picture with bands."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from types import NoneType
from typing import Any

import numpy as np

from impala_async.config.load import by_key
from impala_async.config.run import StopSection
from impala_async.errors import CheckpointError
from impala_async.metrics.report import format_return
from impala_async.runs.folder import RunFolder
from impala_async.runs.summary import ENV_STEPS, as_png, load_pyplot, read_reports

NUM_POINTS = 200
CURVES = {
    "mean_return": "last 100 episodes",
    "evaluate/greedy_return": "evaluation, greedy",
    "evaluate/sampled_return": "evaluation, sampled",
}
_NUMBER = (int, float)
KINDS: dict[str, Any] = {
    **{"seed": int, "exit_reason": str, "env_steps_trained": int, "run_s": _NUMBER},
    **{"env_id": str, "mean_return": (*_NUMBER, NoneType)},
    "best_eval_return": (*_NUMBER, NoneType),
}
"""The kinds of all in a summary that a table makes use of."""
MEANS = ("mean_return", "best_eval_return", "env_steps_trained", "run_s")
HEAD = ("seed", "ended", "mean return", "best evaluation", "env steps", "seconds")


def describe_seeds(summaries: Sequence[dict[str, Any]], whole: Sequence[dict[str, Any]]) -> str:
    """A table: a line for each seed, and one with the means of those that were not cut short. A
    mean of fewer, as not all have one, says of how many."""
    rows = [HEAD, *map(_row, summaries)]
    if whole:
        number = "" if len(whole) == len(summaries) else f" of {len(whole)}"
        known = {name: [x for each in whole if (x := each[name]) is not None] for name in MEANS}
        means = {name: fmean(values) if values else None for name, values in known.items()}
        *cells, steps, seconds = _row({**means, "seed": f"mean{number}", "exit_reason": ""})
        for at, name in ((2, "mean_return"), (3, "best_eval_return")):
            if 0 < (num := len(known[name])) < len(whole):
                cells[at] += f" of {num}"
        rows.append((*cells, steps, seconds))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def read_ended(folder: RunFolder) -> dict[str, Any] | None:
    """The summary of a run, None before there is one; CheckpointError if it was damaged."""
    summary = folder.read_json("summary.json")
    if summary is None:
        return None
    for name, kinds in KINDS.items():
        if not isinstance(summary.get(name), kinds):
            where = folder.path / "summary.json"
            raise CheckpointError(f"{where}: {name} is odd: {summary.get(name)!r:.80}")
    return summary


def differing(folders: Sequence[RunFolder]) -> list[str]:
    """The settings in which these runs differ, besides the seed and what says where they are."""
    found = [by_key(folder.load_config()) for folder in folders]
    keys = (key for key in found[0] if key != "seed" and not key.startswith("bind."))
    return [key for key in keys if any(each[key] != found[0][key] for each in found)]


def is_whole(summary: Mapping[str, Any]) -> bool:
    """Whether the run came to an end that its settings name."""
    return summary["exit_reason"] in StopSection.model_fields


def _row(summary: dict[str, Any]) -> tuple[str, ...]:
    return (
        str(summary["seed"]),
        str(summary["exit_reason"]),
        format_return(summary["mean_return"]),
        format_return(summary["best_eval_return"]),
        f"{summary['env_steps_trained']:,.0f}",
        f"{summary['run_s']:.1f}",
    )


def band(curves: Sequence[Sequence[tuple[float, float]]]) -> np.ndarray[Any, Any]:
    """Steps, mean, smallest and largest, `[4, N]`, of curves given by their points.

    Between the points of a curve is a line. The band ends where the first curve does: beyond it
    the mean would be one of those that took longer.
    """
    steps = np.linspace(
        max(curve[0][0] for curve in curves), min(curve[-1][0] for curve in curves), NUM_POINTS
    )
    values = np.stack(
        [np.interp(steps, [x for x, _ in curve], [y for _, y in curve]) for curve in curves]
    )
    return np.stack([steps, values.mean(0), values.min(0), values.max(0)])


def draw_seeds(folders: Sequence[Path], title: str) -> bytes | None:
    """The mean return over env steps, between the smallest and the largest of all runs that have
    one, as PNG; each run by itself where short ones share no stretch. None if no run has one."""
    drawn = {*CURVES, ENV_STEPS, "evaluate/env_steps"}
    found = {folder: read_reports(folder / "metrics.jsonl", drawn) for folder in folders}
    runs = {of: run for of, run in found.items() if any(CURVES.keys() & each for each in run)}
    if not runs:
        return None
    figure, axes = load_pyplot().subplots(figsize=(8, 5), layout="constrained")
    # As text: a pair of dollar signs in a name is no formula.
    axes.set_title(title, parse_math=False)
    for name, label in CURVES.items():
        over = "evaluate/env_steps" if name.startswith("evaluate/") else ENV_STEPS
        both = {name, over}
        points = [[(r[over], r[name]) for r in run if both <= r.keys()] for run in runs.values()]
        if not (curves := [curve for curve in points if curve]):
            continue
        if max(c[0][0] for c in curves) >= min(c[-1][0] for c in curves):
            # Without a stretch in common there is no mean.
            for folder, curve in zip(runs, points, strict=True):
                if curve:
                    axes.plot(*zip(*curve, strict=True), ".-", label=f"{label}: {folder.name}")
            continue
        steps, mean, low, high = band(curves)
        many = "1 seed" if len(curves) == 1 else f"{len(curves)} seeds"
        (line,) = axes.plot(steps, mean, label=f"{label}: mean of {many}")
        axes.fill_between(steps, low, high, alpha=0.2, color=line.get_color(), label="range")
    axes.set_xlabel("env steps trained")
    axes.set_ylabel("episode return")
    if axes.lines:
        axes.legend(loc="lower right")
    axes.grid(alpha=0.3)
    return as_png(figure)
