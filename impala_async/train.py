"""The train door: one learner and its actors on this machine, then the summary and a picture.

`python -m impala_async.train` without arguments solves CartPole-v1.
"""

import argparse
import logging
import sys
import time
from collections.abc import Sequence
from typing import Any

from impala_async.config import BindSection
from impala_async.doors import (
    add_run_flags,
    check_run,
    default_config_path,
    names_an_env,
    new_parser,
    run_door,
    start_logging,
)
from impala_async.errors import EXIT_CONFIG
from impala_async.launch.local import LocalRun, free_url
from impala_async.learner.run_folder import RunFolder

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Check the settings, run the processes, show the result."""
    parser = new_parser(
        "train",
        "Train on this machine: one learner and train.num_actors actors. Without arguments: "
        "CartPole-v1, until the mean return of 100 episodes is 475.",
    )
    add_run_flags(parser)
    args = parser.parse_args(argv)
    return run_door(lambda: _train(args))


def _train(args: argparse.Namespace) -> int:
    config, folder = check_run(args, default=default_config_path())
    start_logging()
    bind = _chosen(config.bind)
    before = folder.read_json("summary.json") if args.resume else None
    started = time.monotonic()
    run = LocalRun(_learner_flags(args, folder, bind), bind.data, folder.path / "actors")
    code = run.run(config.train.num_actors)
    summary = folder.read_json("summary.json")
    if summary is not None and summary != before:
        _show(summary, folder, launched_s=time.monotonic() - started)
    elif code != EXIT_CONFIG:
        logger.error("the learner ended without a summary, with exit code %d", code)
    return code


def _chosen(bind: BindSection) -> BindSection:
    """Ports that are free, unless the settings name some: the actors must know them as well."""
    if bind == BindSection():
        return BindSection(data=free_url(), weights=free_url())
    return BindSection(data=_without_star(bind.data), weights=_without_star(bind.weights))


def _without_star(url: str) -> str:
    host, _, port = url.rpartition(":")
    return f"{host}:{free_url().rpartition(':')[2]}" if port == "*" else url


def _learner_flags(args: argparse.Namespace, folder: RunFolder, bind: BindSection) -> list[str]:
    """The same flags for the learner, and the ports that were chosen."""
    flags = ["--run-dir", str(folder.path)]
    config = args.config if names_an_env(args) else default_config_path()
    if args.resume:
        flags.append("--resume")
    elif config is not None:
        flags += ["--config", str(config)]
    overrides = [*args.overrides, f"bind.data={bind.data}", f"bind.weights={bind.weights}"]
    return flags + [part for override in overrides for part in ("--set", override)]


def _show(summary: dict[str, Any], folder: RunFolder, launched_s: float) -> None:
    from rich.console import Console
    from rich.table import Table

    from impala_async.plot import draw_learning_curve

    try:
        picture = draw_learning_curve(folder.metrics, folder.path / "learning_curve.png")
        drawn = str(picture) if picture else "no report to draw"
    except OSError as error:
        drawn = f"cannot be written: {error.strerror}"
    mean_return = summary["mean_return_100"]
    lag = summary["lag_quantiles"]
    table = Table(
        title=f"{summary['env_id']}: ended by {summary['exit_reason']}", show_header=False
    )
    rows = {
        "mean return of 100 episodes": "-" if mean_return is None else f"{mean_return:.1f}",
        "env steps trained": f"{summary['env_steps_trained']:,}",
        "updates": f"{summary['updates']:,}",
        "seconds of training": f"{summary['wall_s']:.1f} ({launched_s:.1f} since launch)",
        "env steps per second": f"{summary['env_steps_per_s']:,.0f}",
        "lag, median (largest)": f"{lag[2]} ({lag[-1]}) updates" if lag else "-",
        "trajectories dropped": str(sum(summary["dropped"].values())),
        "what limits it": str(summary["bottleneck"]),
        "run folder": str(folder.path),
        "learning curve": drawn,
    }
    for name, value in rows.items():
        table.add_row(name, value)
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
