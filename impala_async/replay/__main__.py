"""The replay door: a recording into a learner, without environments.

It starts a learner with the recorded settings, or takes one that runs already (`--learner`).
"""

import argparse
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from impala_async.doors import (
    bind_of_this_start,
    check_learner_url,
    new_parser,
    run_door,
    start_logging,
    start_told_of,
    tell_death,
    typed_path,
)
from impala_async.errors import EXIT_DONE, EXIT_INTERRUPTED, ConfigError, RecordingError
from impala_async.processes import REQUESTS, interrupt, leave, undone

if TYPE_CHECKING:
    from impala_async.replay.index import RecordingIndex
    from impala_async.replay.player import Played
    from impala_async.runs.folder import RunFolder

CONNECT_S = 60.0
# A learner that has reached its goal, and said so, is about to end by itself.
GRACE_S = 600.0


def main(argv: Sequence[str] | None = None) -> int:
    """Check the flags and the file, play it, say how it went."""
    parser = new_parser(
        "replay",
        "Play a recording into a learner, as fast as it takes it: without environments, over the "
        "same protocol. Starts a learner with the recorded settings, unless --learner names one.",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="a recording, as `record` made it")
    parser.add_argument(
        "--learner", metavar="URL", help="a learner that runs already, as tcp://127.0.0.1:5555"
    )
    parser.add_argument(
        "--exact",
        action="store_true",
        help="with the recorded versions, for the same weights to the last bit",
    )
    parser.add_argument("--loop", action="store_true", help="again and again, until Ctrl-C")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        dest="overrides",
        help="change a recorded setting of the learner that is started; may be repeated",
    )
    parser.add_argument(
        "--run-dir",
        type=typed_path,
        metavar="DIR",
        help="its run folder (default: a new one in runs/)",
    )
    args = parser.parse_args(argv)
    return run_door(lambda: _replay(args))


def _replay(args: argparse.Namespace) -> int:
    _check_flags(args)
    start_logging()
    from impala_async.replay.index import RecordingIndex

    index = RecordingIndex(args.file)
    if args.exact:
        _check_exact(index)
    if args.learner is not None:
        return _play_into(args, index)
    return _play_into_a_new_one(args, index)


def _check_flags(args: argparse.Namespace) -> None:
    if args.exact and args.loop:
        raise ConfigError("--loop: an exact replay has an end: drop --loop or --exact")
    if args.exact and args.overrides:
        raise ConfigError("--set: an exact replay keeps the recorded settings: drop it, or --exact")
    if args.learner is None:
        return
    check_learner_url(args.learner)
    for flag, value in (("--set", args.overrides), ("--run-dir", args.run_dir)):
        if value:
            raise ConfigError(
                f"{flag}: is for a learner that replay starts, and --learner names one that has "
                "its settings: drop one of them"
            )


def _check_exact(index: "RecordingIndex") -> None:
    """Only what began with a seed can be made again from it."""
    start = index.start
    if start.settings.get("pace", {}).get("mode") == "lockstep":
        raise RecordingError(
            f"--exact: {index.path} was recorded in lockstep, where the same settings make the "
            "same run anyway: train again with them"
        )
    if start.update != 0:
        raise RecordingError(
            f"--exact: {index.path} begins at update {start.update}, with a checkpoint that is "
            "not in it: record from the start of a run"
        )
    if index.num_updates == 0:
        raise RecordingError(f"--exact: {index.path} ended before the first update")


def _play_into(args: argparse.Namespace, index: "RecordingIndex") -> int:
    told: list[int] = []
    played = _play(args, args.learner, index, told, lambda: bool(told))
    return _tell(played, index, told)


def _play_into_a_new_one(args: argparse.Namespace, index: "RecordingIndex") -> int:
    from impala_async.replay.learner import SETTINGS, settings_for, write_settings
    from impala_async.runs.folder import RunFolder, default_run_path

    config = settings_for(index, args.overrides, is_exact=args.exact)
    folder = RunFolder(args.run_dir or default_run_path(config))
    folder.check_new(advice="name another folder")
    folder.hold()  # and so it is ours to withdraw
    folder.let_go()
    with undone(folder.withdraw), undone(lambda: folder.remove(SETTINGS)):
        return _start_and_play(args, index, folder, write_settings(folder, config))


def _start_and_play(
    args: argparse.Namespace, index: "RecordingIndex", folder: "RunFolder", settings: Path
) -> int:
    from impala_async.config.bind import BindSection
    from impala_async.launch.local import free_ports
    from impala_async.replay.learner import StartedLearner, compare

    data, weights = (f"tcp://127.0.0.1:{port}" for port in free_ports(2))
    told: list[int] = []
    learner = StartedLearner(
        ["--config", str(settings), "--run-dir", str(folder.path)],
        bind_of_this_start(BindSection(data=data, weights=weights)),
    )
    grace_s = 0.0
    try:
        with undone(learner.kill):
            played = _play(args, data, index, told, lambda: bool(told) or not learner.is_running)
        grace_s = GRACE_S if played.is_finished else 0.0
    finally:
        code = learner.end(grace_s)
    if code != EXIT_DONE:
        if code > EXIT_INTERRUPTED:  # a signal that it could not tell of itself
            tell_death(code, folder, "learner")
        return code
    _tell(played, index, told)
    _tell_of(folder)
    if args.exact and not told:
        print(compare(folder, index, is_finished=played.is_finished))
    return EXIT_INTERRUPTED if signal.SIGINT in told else EXIT_DONE


def _play(
    args: argparse.Namespace,
    url: str,
    index: "RecordingIndex",
    told: list[int],
    should_stop: Callable[[], bool],
) -> "Played":
    with start_told_of("torch is loaded"):
        import torch

        from impala_async.replay.player import Player

    # Nothing is computed here, and a pool of threads would only stand in the learner's way.
    torch.set_num_threads(1)

    def hear(number: int, frame: object) -> None:
        if told:
            interrupt(number, frame)
        told.append(number)

    for number in REQUESTS:
        signal.signal(number, hear)
    return Player(
        url,
        index,
        is_exact=args.exact,
        is_looped=args.loop,
        should_stop=should_stop,
        connect_s=CONNECT_S,
    ).run()


def _tell(played: "Played", index: "RecordingIndex", told: list[int]) -> int:
    from impala_async.replay.player import describe

    print(describe(played, len(index)))
    return EXIT_INTERRUPTED if signal.SIGINT in told else EXIT_DONE


def _tell_of(folder: "RunFolder") -> None:
    summary = folder.read_json("summary.json")
    if summary is not None:
        print(
            f"learner: {summary['updates']:,} updates of {summary['env_steps_trained']:,} env "
            f"steps, {summary['env_steps_per_s']:,.0f} per second\n"
            f"what limits it: {summary['bottleneck']}"
        )
    print(f"run folder: {folder.path}")


if __name__ == "__main__":
    leave(main())
