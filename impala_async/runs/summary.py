"""The end of a run: its summary in a small file and in words, and its picture.

Runs on: event loop, and the main thread behind it; matplotlib is imported only to draw
"""

import io
import json
import logging
import os
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import numpy as np

from impala_async import __version__
from impala_async.config.run import RunConfig, StopSection
from impala_async.files import open_regular, write_whole
from impala_async.metrics.names import DROP_REASONS, Value, numbers
from impala_async.metrics.report import (
    REJECTED,
    RETURN_EPISODES,
    advice_on,
    agents_in,
    format_mean_return,
    format_return,
)
from impala_async.metrics.window import PERCENTILES
from impala_async.output import told_of
from impala_async.user_code import one_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from impala_async.runs.folder import RunFolder

logger = logging.getLogger(__name__)

# A value in the table that is wider goes on in the next line.
MOST_WIDE = 66
ENV_STEPS, INTERVAL_RETURN = "env_steps_trained", "episodes/return_mean"
RETURNS = {INTERVAL_RETURN, *(f"evaluate/{kind}_return" for kind in ("greedy", "sampled"))}
DRAWN = {*RETURNS, ENV_STEPS, "mean_return_100", "lag/mean", "evaluate/env_steps"}
PICTURE = "learning_curve.png"
NOTHING_TO_DRAW = "no report had an episode that ended, or an evaluation"
# A report has some kilobytes.
MOST_LINE = 1 << 20


def summarise(
    config: RunConfig,
    report: dict[str, Value],
    *,
    exit_reason: str,
    wall_s: float,
    env_steps_since: int,
    lag_histogram: Sequence[int],
    mean_return: float | None,
    best_evaluated: tuple[float, str, str] | None,
    verdict: str,
) -> dict[str, Any]:
    """`report` is the last one; `wall_s`, from the first update on, had `env_steps_since`."""
    zero_at, env_steps = config.idle_from, report["env_steps_trained"]
    assert isinstance(env_steps, int)
    steps_per_s = env_steps_since / wall_s if wall_s > 0 else 0.0
    if exit_reason in StopSection.model_fields and report["updates"] and not wall_s:
        verdict = "nothing: the run had come to its end before this start"
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
        "frames_per_s": round(steps_per_s * config.env.frames_per_step / agents_in(report), 1),
        "mean_return": report["mean_return"] if mean_return is None else mean_return,
        "mean_return_100": mean_return,
        "episodes": report["episodes/count"],
        "best_eval_return": best_evaluated and best_evaluated[0],
        "best_eval_actions": best_evaluated and best_evaluated[2],
        "best_checkpoint": best_evaluated and best_evaluated[1],
        "lag_quantiles": lag_quantiles(lag_histogram),
        "dropped": {reason: report[f"dropped/{reason}"] for reason in DROP_REASONS},
        "rejected": report["trajectories/rejected"],
        "rejections": {
            name.removeprefix(REJECTED): count
            for name, count in report.items()
            if name.startswith(REJECTED)
        },
        "starved_total_s": report["learner/starved_total_s"],
        "bottleneck": verdict,
        "advice": advice_on(verdict),
        "num_actors": report["num_actors"],
    }


def lag_quantiles(histogram: Sequence[int]) -> list[int]:
    """Percentiles over every trajectory at every pass of this start; empty before the first."""
    sums = np.cumsum(histogram, dtype=np.int64)
    if not sums.any():
        return []
    ranks = [round(q / 100 * (int(sums[-1]) - 1)) for q in PERCENTILES]
    return [int(lag) for lag in np.searchsorted(sums, ranks, side="right")]


def describe(summary: dict[str, Any], goal: float | None, *, is_resumed: bool) -> str:
    """The summary as a table. Some figures of a resumed run are of its last start alone."""
    last = ", this start" if is_resumed else ""
    lag, rate = summary["lag_quantiles"], summary["env_steps_per_s"]
    frame_rate = summary["frames_per_s"]
    frames = "" if frame_rate == rate else f" ({frame_rate:,.0f} frames)"
    num_episodes = min(summary["episodes"], RETURN_EPISODES)
    rows = {
        f"mean return of {num_episodes} episodes": format_return(summary["mean_return"], goal),
        "env steps trained": f"{summary['env_steps_trained']:,}",
        "updates": f"{summary['updates']:,}",
        f"seconds of training{last}": f"{summary['wall_s']:.1f}",
        f"env steps per second{last}": f"{rate:,.0f}{frames}" if rate else "-",
        f"lag, median (largest){last}": f"{lag[2]} ({lag[-1]}) updates" if lag else "-",
        "trajectories dropped": _by_reason(summary["dropped"]),
        "trajectories refused": _by_reason(summary["rejections"]),
        f"what limits it{last}": summary["bottleneck"],
    }
    if (best := summary["best_eval_return"]) is not None:
        rows["best evaluation"] = f"{format_return(best)} ({summary['best_checkpoint']})"
    if (zero_at := summary["lr_is_0_since"]) is not None:
        rows["learning rate"] = f"0 since env step {zero_at:,}: nothing was learned after it"
    if summary["advice"] is not None:
        rows["what may help"] = summary["advice"]
    width = max(map(len, rows))
    indent = "\n" + " " * (width + 4)
    lines = [
        f"  {name:<{width}}  {indent.join(wrap(str(value), MOST_WIDE))}"
        for name, value in rows.items()
    ]
    return "\n".join([f"{summary['env_id']}: ended ({summary['exit_reason']})", *lines])


def _by_reason(counts: Mapping[str, int]) -> str:
    """Their number, and that of each reason: what a shutdown drops is no loss to training."""
    found = {reason: count for reason, count in counts.items() if count}
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in found.items())
    return f"{sum(found.values()):,}" + (f" ({reasons})" if found else "")


def draw_at_end(summary: dict[str, Any], folder: "RunFolder", goal: float | None) -> str:
    """Where the picture of a run is, or why there is none."""
    title = str(summary["env_id"])
    if summary["mean_return"] is not None:
        mean_return = format_mean_return(summary["mean_return"], summary["episodes"])
        title += f": mean return {mean_return}"

    def draw() -> bytes | None:
        reports = read_reports(folder.metrics, DRAWN)
        has_return = any(name in each for each in reports for name in RETURNS)
        return draw_learning_curve(reports, title, goal) if has_return else None

    if not os.path.isfile(folder.metrics):
        return f"none, as {folder.metrics} is gone"
    why_none = NOTHING_TO_DRAW
    if summary["mean_return"] is not None:  # the disk was full for a while
        why_none = f"no report with an episode that ended is in {folder.metrics}"
    why_not = save_picture(folder.absolute / PICTURE, "the learning curve", draw, why_none)
    return why_not or str(folder.path / PICTURE)


def save_picture(
    path: Path, what: str, draw: Callable[[], bytes | None], why_none: str = NOTHING_TO_DRAW
) -> str:
    """Draw, and write it down: why there is no picture, or nothing."""
    try:
        with told_of(f"ending: drawing {what}, with matplotlib", logger.info):
            drawn = draw()
        if drawn is None:
            return f"none, as {why_none}"
        write_whole(path, drawn)
    except OSError as error:
        return f"cannot be written: {error.strerror or error}"
    # matplotlib reads files and variables of the user's, and fails in its own ways.
    except Exception as error:
        return f"cannot be drawn: {one_line(error)}"
    return ""


def read_reports(path: Path, only: Container[str] | None = None) -> list[dict[str, float]]:
    """The numbers of the reports in a metrics file, or `only` these of them: it grows as long as a
    run does. Left out are lines that are torn or damaged, and reports of what a resumed run had to
    do again: steps only grow."""
    kept: list[dict[str, float]] = []
    if not path.is_file():
        return kept
    with open(path, "rb", opener=open_regular) as file:
        while line := file.readline(MOST_LINE):
            try:
                report = json.loads(line)
            except (ValueError, RecursionError):
                continue
            found = numbers(report) if isinstance(report, dict) else {}
            # One that is too large to be drawn is damage.
            found = {
                name: value
                for name, value in found.items()
                if abs(value) < 1e100 and (only is None or name in only)
            }
            if ENV_STEPS in found:
                while kept and kept[-1][ENV_STEPS] > found[ENV_STEPS]:
                    kept.pop()
                kept.append(found)
    return kept


def load_pyplot() -> Any:
    """Matplotlib's pyplot, which draws into memory."""
    # It is read at the import, and may name what is not installed here.
    os.environ["MPLBACKEND"] = "agg"
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    return plt


def as_png(figure: Any) -> bytes:
    """The picture, whose figure is closed."""
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=120)
    load_pyplot().close(figure)
    return drawn.getvalue()


def draw_learning_curve(reports: list[dict[str, float]], title: str, goal: float | None) -> bytes:
    """Return over env steps, with the lag beneath it, as PNG."""
    plt = load_pyplot()

    def draw(axes: "Axes", name: str, over: str = ENV_STEPS, **style: Any) -> None:
        known = [each for each in reports if name in each and over in each]
        if known:
            if len(known) == 1:  # a line of one point is none
                style["marker"] = "."
            axes.plot([each[over] for each in known], [each[name] for each in known], **style)

    figure, (top, bottom) = plt.subplots(
        2, 1, sharex=True, figsize=(8, 6), height_ratios=[3, 1], layout="constrained"
    )
    # As text: a pair of dollar signs in a name is no formula.
    top.set_title(title, parse_math=False)
    draw(top, INTERVAL_RETURN, alpha=0.4, label="interval")
    draw(top, "mean_return_100", label="last 100 episodes", linewidth=2)
    for kind, color in (("greedy", "tab:purple"), ("sampled", "tab:brown")):
        # A report repeats the newest evaluation: its point is drawn once more, at its own place.
        style = {"marker": ".", "color": color, "label": f"evaluation, {kind}"}
        draw(top, f"evaluate/{kind}_return", "evaluate/env_steps", **style)
    if goal is not None:
        top.axhline(goal, color="tab:green", linestyle="--", label="goal")
    top.set_ylabel("episode return")
    top.legend(loc="lower right")
    draw(bottom, "lag/mean", color="tab:red")
    bottom.set_ylabel("lag (updates)")
    bottom.set_xlabel("env steps trained")
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
    return as_png(figure)
