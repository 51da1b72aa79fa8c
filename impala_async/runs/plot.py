"""Pictures of a run, drawn from its metrics file. Imports matplotlib only when it draws."""

import io
import json
import logging
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from impala_async.files import write_whole
from impala_async.metrics.report import format_mean_return
from impala_async.output import told_of
from impala_async.processes import REQUESTS
from impala_async.user_code import one_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from impala_async.runs.folder import RunFolder

logger = logging.getLogger(__name__)

DRAWING = "ending: drawing the learning curve, with matplotlib"


def draw_at_end(summary: dict[str, Any], folder: "RunFolder", goal: float | None, code: int) -> str:
    """Where the picture of a run is, or why there is none. A signal ends all with `code`."""

    def leave(number: int, frame: object) -> None:
        os.write(2, b"learning curve: left out, as a signal came\n")
        os._exit(code)

    title = str(summary["env_id"])
    if summary["mean_return"] is not None:
        mean_return = format_mean_return(summary["mean_return"], summary["episodes"])
        title += f": mean return {mean_return}"
    picture = folder.path / "learning_curve.png"
    before = {number: signal.signal(number, leave) for number in REQUESTS}
    try:
        with told_of(DRAWING, logger.info):
            is_drawn = draw_learning_curve(folder.metrics, picture, title=title, goal=goal)
    except OSError as error:
        return f"cannot be written: {error.strerror or error}"
    # matplotlib reads files and variables of the user's, and fails in its own ways.
    except Exception as error:
        return f"cannot be drawn: {one_line(error)}"
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return str(picture) if is_drawn else "no report to draw"


def read_reports(path: Path) -> list[dict[str, Any]]:
    """The reports of a metrics file; a line that is torn or damaged is passed over."""
    if not path.is_file():  # a pipe would be waited for
        return []
    reports = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            report = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(report, dict):
            reports.append(report)
    return reports


def draw_learning_curve(
    metrics: Path, picture: Path, *, title: str = "", goal: float | None = None
) -> Path | None:
    """Return over env steps, with the lag beneath it; None if no episode was reported."""
    whole = [r for r in read_reports(metrics) if _has_number(r, "env_steps_trained")]
    lived = _without_lost_branches(whole)
    reports = [r for r in lived if _has_number(r, "episodes/return_mean")]
    if not reports:
        return None
    # It is read at the import, and may name what is not installed here.
    os.environ["MPLBACKEND"] = "agg"
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, (top, bottom) = plt.subplots(
        2, 1, sharex=True, figsize=(8, 6), height_ratios=[3, 1], layout="constrained"
    )
    # As text: a pair of dollar signs in a name is no formula.
    top.set_title(title, parse_math=False)
    _draw(top, reports, "episodes/return_mean", alpha=0.4, label="interval")
    _draw(top, reports, "mean_return_100", label="last 100 episodes", linewidth=2)
    if goal is not None:
        top.axhline(goal, color="tab:green", linestyle="--", label="goal")
    top.set_ylabel("episode return")
    top.legend(loc="lower right")
    _draw(bottom, reports, "lag/mean", color="tab:red")
    bottom.set_ylabel("lag (updates)")
    bottom.set_xlabel("env steps trained")
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=120)
    plt.close(figure)
    write_whole(picture, drawn.getvalue())
    return picture


def _without_lost_branches(reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Draw once what a resumed run had to do again: steps only grow."""
    kept: list[dict[str, Any]] = []
    for report in reports:
        while kept and kept[-1]["env_steps_trained"] > report["env_steps_trained"]:
            kept.pop()
        kept.append(report)
    return kept


def _has_number(report: dict[str, Any], name: str) -> bool:
    value = report.get(name)
    # One that is too large to be drawn, or is none, is damage.
    return isinstance(value, int | float) and abs(value) < 1e100


def _draw(axes: "Axes", reports: list[dict[str, Any]], name: str, **style: Any) -> None:
    known = [r for r in reports if _has_number(r, name)]
    if known:
        axes.plot([r["env_steps_trained"] for r in known], [r[name] for r in known], **style)
