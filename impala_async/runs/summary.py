"""The end of a run in one small file: what `train` prints and what others compare.

Runs on: event loop
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from impala_async import __version__
from impala_async.config.run import RunConfig
from impala_async.metrics.names import DROP_REASONS, Value
from impala_async.metrics.report import advice_on, format_mean_return

QUANTILES = (0, 10, 50, 90, 100)


def summarise(
    config: RunConfig,
    report: dict[str, Value],
    *,
    exit_reason: str,
    wall_s: float,
    env_steps_since: int,
    lag_histogram: Sequence[int],
    mean_return: float | None,
    verdict: str,
) -> dict[str, Any]:
    """`wall_s` runs from the first update; rates are means over it, and the verdict is on it.

    `env_steps_since` are those trained in that time: what the first update learned from was
    gathered before the clock ran.
    """
    zero_at, env_steps = config.idle_from, report["env_steps_trained"]
    assert isinstance(env_steps, int)
    steps_per_s = env_steps_since / wall_s if wall_s > 0 else 0.0
    return {
        "exit_reason": exit_reason,
        "env_id": config.env.id,
        "seed": config.seed,
        "version": __version__,
        "env_steps_trained": env_steps,
        "lr_is_0_since": zero_at if zero_at is not None and env_steps > zero_at else None,
        "updates": report["updates"],
        "wall_s": round(wall_s, 3),
        "run_s": report["time_s"],
        "env_steps_per_s": round(steps_per_s, 1),
        "frames_per_s": round(steps_per_s * config.env.frames_per_step, 1),
        "mean_return": report["mean_return"] if mean_return is None else mean_return,
        "mean_return_100": mean_return,
        "episodes": report["episodes/count"],
        "lag_quantiles": lag_quantiles(lag_histogram),
        "dropped": {reason: report[f"dropped/{reason}"] for reason in DROP_REASONS},
        "rejected": report["trajectories/rejected"],
        "starved_total_s": report["learner/starved_total_s"],
        "bottleneck": verdict,
        "advice": advice_on(verdict),
        "num_actors": report["num_actors"],
    }


def describe(summary: dict[str, Any]) -> str:
    """The summary in one line, for a log."""
    mean_return = format_mean_return(summary["mean_return"], summary["episodes"])
    zero_at = summary["lr_is_0_since"]
    unlearned = "" if zero_at is None else f"; nothing was learned after env step {zero_at:,}"
    return (
        f"ended ({summary['exit_reason']}) after {summary['env_steps_trained']:,} env steps and "
        f"{summary['updates']:,} updates, mean return {mean_return}{unlearned}"
    )


def lag_quantiles(histogram: Sequence[int]) -> list[int]:
    """Quantiles over every trajectory at every pass of this start; empty before the first."""
    counts = np.asarray(histogram, np.int64)
    total = int(counts.sum())
    if total == 0:
        return []
    ranks = [min(total - 1, round(q / 100 * (total - 1))) for q in QUANTILES]
    return [int(np.searchsorted(np.cumsum(counts), rank, side="right")) for rank in ranks]
