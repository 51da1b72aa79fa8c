"""The train door: one learner and its actors on this machine, then the summary and a picture.

`python -m impala_async.train` without arguments solves CartPole-v1.
"""

import argparse
import contextlib
import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from impala_async.doors import (
    add_run_flags,
    bind_of_this_start,
    check_run,
    default_config_path,
    names_an_env,
    new_parser,
    number_of_this_start,
    run_door,
    start_logging,
    tell_death,
)
from impala_async.errors import EXIT_CONFIG, EXIT_DONE, EXIT_INTERRUPTED
from impala_async.launch.local import LocalRun, free_ports
from impala_async.metrics.report import RETURN_EPISODES, format_return
from impala_async.processes import leave
from impala_async.runs.plot import draw_at_end

if TYPE_CHECKING:
    from impala_async.config.learner import BindSection
    from impala_async.config.run import RunConfig
    from impala_async.runs.folder import RunFolder

logger = logging.getLogger(__name__)

ANY_PORT = "tcp://127.0.0.1:*"
LOOPBACK = {"*": "127.0.0.1", "0.0.0.0": "127.0.0.1", "[::]": "[::1]"}


def main(argv: Sequence[str] | None = None) -> int:
    """Check the settings, run the processes, show the result."""
    parser = new_parser(
        "train",
        "Train on this machine: one learner and train.num_actors actors. Without arguments: "
        "CartPole-v1, until the mean return of 100 episodes is 475.",
    )
    add_run_flags(parser)
    args = parser.parse_args(argv)
    return run_door(lambda: train(args))


def train(args: argparse.Namespace) -> int:
    """A run, as the flags say it."""
    config, folder = check_run(args, default=default_config_path())
    hold = folder.hold()
    try:
        return _train(args, config, folder, hold)
    finally:
        folder.let_go()


def _train(args: argparse.Namespace, config: "RunConfig", folder: "RunFolder", hold: int) -> int:
    """In a folder that is ours; the learner shares in the hold of it."""
    from impala_async.runs.folder import HOLD_VARIABLE

    start_logging()
    unnamed = _unnamed_ports(config.bind)
    bind = _chosen(config.bind.model_copy(update=unnamed))
    overrides = [*args.overrides, *(f"bind.{key}={url}" for key, url in unnamed.items())]
    before = folder.read_json("summary.json") if args.resume else None
    started = time.monotonic()
    run = LocalRun(
        _learner_flags(args, folder, overrides),
        _reached_at(bind.data),
        folder.path,
        {**bind_of_this_start(bind), HOLD_VARIABLE: str(hold)},
        number_of_this_start,
        (hold,),
    )
    code = run.run(config.train.num_actors)
    if run.has_given_up:
        return code
    is_ours = not folder.is_elsewhere()
    if is_ours and not folder.exists():
        run.remove_logs()
        folder.withdraw()
    summary = folder.read_json("summary.json") if is_ours else None
    if summary is not None and summary != before:
        # Nobody may read it, or the disk be full: the run has ended as it has.
        with contextlib.suppress(OSError):
            launched_s = time.monotonic() - started
            _show(summary, folder, config.stop.mean_return, launched_s, is_resumed=args.resume)
        curve = draw_at_end(summary, folder, config.stop.mean_return, code)
        with contextlib.suppress(OSError):
            print(f"learning curve: {curve}")
    # A learner that was told to end while it started has nothing to sum up.
    elif code not in (EXIT_CONFIG, EXIT_DONE, EXIT_INTERRUPTED):
        tell_death(code, folder, "train")
    elif how := run.how_it_was_quit:
        tell_death(code, folder, "train", how)
    return code


def _unnamed_ports(bind: "BindSection") -> dict[str, str]:
    """Where the settings name no port any will do, in the run folder too, for a later resume."""
    return {key: ANY_PORT for key in ("data", "weights") if key not in bind.model_fields_set}


def _chosen(bind: "BindSection") -> "BindSection":
    """A port for each `*`: the actors are started at once, before the learner has a port."""
    from impala_async.config.learner import BindSection

    data, weights = (
        f"{url.removesuffix('*')}{port}" if url.endswith(":*") else url
        for url, port in zip((bind.data, bind.weights), free_ports(2), strict=True)
    )
    return BindSection(data=data, weights=weights)


def _reached_at(url: str) -> str:
    """Where an actor of this host finds what listens at a url, on every interface perhaps."""
    host, _, port = url.removeprefix("tcp://").rpartition(":")
    return f"tcp://{LOOPBACK.get(host, host)}:{port}"


def _learner_flags(
    args: argparse.Namespace, folder: "RunFolder", overrides: Sequence[str]
) -> list[str]:
    """The same flags for the learner."""
    flags = ["--run-dir", str(folder.path)]
    config = args.config if names_an_env(args) else default_config_path()
    if args.resume:
        flags.append("--resume")
    elif config is not None:
        flags += ["--config", str(config)]
    if args.record is not None:
        flags += ["--record", str(args.record)]
    return flags + [part for override in overrides for part in ("--set", override)]


def _show(
    summary: dict[str, Any],
    folder: "RunFolder",
    goal: float | None,
    launched_s: float,
    *,
    is_resumed: bool,
) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    seconds = f"{summary['wall_s']:.1f} ({launched_s:.1f} since launch)"
    this_start = ", this start" if is_resumed else ""
    lag = summary["lag_quantiles"]
    rate, frame_rate = summary["env_steps_per_s"], summary["frames_per_s"]
    frames = "" if frame_rate == rate else f" ({frame_rate:,.0f} frames)"
    # Text, as words of others are not to be read as rich's markup.
    title = Text(f"{summary['env_id']}: ended ({summary['exit_reason']})", style="table.title")
    table = Table(title=title, show_header=False)
    rows = {
        f"mean return of {min(summary['episodes'], RETURN_EPISODES)} episodes": format_return(
            summary["mean_return"], goal
        ),
        "env steps trained": f"{summary['env_steps_trained']:,}",
        "updates": f"{summary['updates']:,}",
        f"seconds of training{this_start}": seconds,
        f"env steps per second{this_start}": f"{rate:,.0f}{frames}",
        f"lag, median (largest){this_start}": f"{lag[2]} ({lag[-1]}) updates" if lag else "-",
        "trajectories dropped": str(sum(summary["dropped"].values())),
        "trajectories refused": str(summary["rejected"]),
        f"what limits it{this_start}": str(summary["bottleneck"]),
    }
    if (zero_at := summary["lr_is_0_since"]) is not None:
        rows["learning rate"] = f"0 since env step {zero_at:,}: nothing was learned after it"
    if summary["advice"] is not None:
        rows["what may help"] = str(summary["advice"])
    for name, value in rows.items():
        table.add_row(Text(name), Text(value))
    console = Console()
    # rich would end the process where nobody reads.
    with console.capture() as shown:
        console.print(table)
    # Outside of the table, which would cut what is longer than the terminal is wide.
    print(f"{shown.get()}run folder: {folder.path}", flush=True)


if __name__ == "__main__":
    leave(main())
