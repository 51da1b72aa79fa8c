"""The replay door: a recording into a learner, without environments.

It starts a learner with the recorded settings, or takes one that runs already (`--learner`).
"""

import argparse
import logging
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from impala_async.doors import (
    bind_of_this_start,
    check_learner_url,
    new_parser,
    run_door,
    start_logging,
    start_told_of,
    tell_death,
)
from impala_async.errors import EXIT_DONE, EXIT_INTERRUPTED, ConfigError, RecordingError
from impala_async.interrupts import REQUESTS, interrupt, undone
from impala_async.leaving import leave

if TYPE_CHECKING:
    from impala_async.actor.player import Manner, Played
    from impala_async.actor.playlist import Playlist, Take
    from impala_async.config.run import RunConfig
    from impala_async.runs.folder import RunFolder

logger = logging.getLogger(__name__)

CONNECT_S = 60.0
# A learner that has reached its goal, and said so, is about to end by itself.
GRACE_S = 600.0
ANY_PORT = "tcp://127.0.0.1:*"
SETTINGS = "replay.json"
ENDLESS = dict.fromkeys(("env_steps", "updates", "mean_return", "wall_s"))


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
    parser.add_argument(
        "--speed",
        choices=("max", "original"),
        default="max",
        help="max: as fast as the learner takes it (default); original: as it was recorded",
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
        "--run-dir", type=Path, metavar="DIR", help="its run folder (default: a new one in runs/)"
    )
    args = parser.parse_args(argv)
    return run_door(lambda: _replay(args))


def _replay(args: argparse.Namespace) -> int:
    _check_flags(args)
    start_logging()
    from impala_async.actor.playlist import Playlist

    playlist = Playlist(args.file)
    if args.exact:
        _check_exact(playlist)
    if args.learner is not None:
        return _play_into(args, playlist)
    return _play_into_a_new_one(args, playlist)


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


def _check_exact(playlist: "Playlist") -> None:
    """Only what began with a seed can be made again from it."""
    start = playlist.takes[0].start
    if start.settings.get("pace", {}).get("mode") == "lockstep":
        raise RecordingError(
            f"--exact: {playlist.path} was recorded in lockstep, where the same settings make the "
            "same run anyway: train again with them"
        )
    if start.update != 0:
        raise RecordingError(
            f"--exact: {playlist.path} begins at update {start.update}, with a checkpoint that is "
            "not in it: record from the start of a run"
        )
    if _num_updates(playlist) == 0:
        raise RecordingError(f"--exact: {playlist.path} ended before the first update")
    left = sum(take.stop - take.first for take in playlist.takes[1:])
    if left:
        logger.warning(
            "--exact plays the first start of the recorded learner; %d messages of later ones are "
            "left out",
            left,
        )


def _num_updates(playlist: "Playlist") -> int | None:
    """How many the first take made, or those of them that a later one went on from."""
    first, *later = playlist.takes
    if later:
        return later[0].start.update
    return None if first.end is None else first.end.update


def _play_into(args: argparse.Namespace, playlist: "Playlist") -> int:
    told: list[int] = []
    played = _play(args.learner, playlist, _manner(args), told, lambda: bool(told))
    return _tell(played, playlist, told)


def _play_into_a_new_one(args: argparse.Namespace, playlist: "Playlist") -> int:
    from impala_async.runs.folder import RunFolder, default_run_path

    config = _settings(args, playlist)
    folder = RunFolder(args.run_dir or default_run_path(config))
    folder.check_new(advice="name another folder")
    folder.hold()  # and so it is ours to withdraw
    folder.let_go()
    with undone(folder.withdraw), undone(lambda: folder.remove(SETTINGS)):
        return _start_and_play(args, playlist, folder, _write_settings(folder, config))


def _start_and_play(
    args: argparse.Namespace, playlist: "Playlist", folder: "RunFolder", settings: Path
) -> int:
    from impala_async.config.bind import BindSection
    from impala_async.launch.local import free_ports
    from impala_async.launch.lone import LoneLearner

    data, weights = (f"tcp://127.0.0.1:{port}" for port in free_ports(2))
    told: list[int] = []
    learner = LoneLearner(
        ["--config", str(settings), "--run-dir", str(folder.path)],
        bind_of_this_start(BindSection(data=data, weights=weights)),
    )
    grace_s = 0.0
    try:
        with undone(learner.kill):
            manner = _manner(args)
            played = _play(
                data, playlist, manner, told, lambda: bool(told) or not learner.is_running
            )
        grace_s = GRACE_S if played.is_finished else 0.0
    finally:
        code = learner.end(grace_s)
    if code != EXIT_DONE:
        if code > EXIT_INTERRUPTED:  # a signal that it could not tell of itself
            tell_death(code, folder, "learner")
        return code
    _tell(played, playlist, told)
    _tell_of(folder)
    if args.exact and not told:
        _check_reached(folder, playlist, played)
        _compare(folder, playlist.takes[0], _num_updates(playlist))
    return EXIT_INTERRUPTED if signal.SIGINT in told else EXIT_DONE


def _settings(args: argparse.Namespace, playlist: "Playlist") -> "RunConfig":
    """The recorded ones, of the last start, for a learner that knows no environment and no goal."""
    from impala_async.config.load import merge_overrides, validate_config

    start = (playlist.takes[0] if args.exact else playlist.takes[-1]).start
    goal: dict[str, Any] = dict(ENDLESS)
    if args.exact:
        # The steps come to what they were at that update, and the schedules ended with them.
        steps = start.settings.get("stop", {}).get("env_steps")
        goal |= {"updates": _num_updates(playlist), "env_steps": steps}
    recorded: dict[str, Any] = {
        **start.settings,
        "env": {**start.settings.get("env", {}), "probe": "actor"},
        "bind": {"data": ANY_PORT, "weights": ANY_PORT},
        "stop": goal,
    }
    config = validate_config(*merge_overrides(recorded, args.overrides))
    as_recorded = validate_config(recorded)
    for section in ("env", "trajectory"):
        if getattr(config, section) != getattr(as_recorded, section):
            raise ConfigError(f"--set: {section}: a recording is what it is: drop it")
    if config.pace.is_lockstep:
        raise ConfigError(
            "pace.mode: a learner in lockstep waits for actors of its own: add "
            "--set pace.mode=async --set pace.lag=0 --set pace.on_loss=go_on"
        )
    return config


def _write_settings(folder: "RunFolder", config: "RunConfig") -> Path:
    from impala_async.runs.folder import PRIVATE

    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        dumped = config.model_dump(mode="json", by_alias=True)
        return folder.write_json(SETTINGS, {"config": dumped}, mode=PRIVATE)
    except OSError as error:
        raise ConfigError(f"--run-dir: cannot write to {folder.path}: {error.strerror}") from None


def _manner(args: argparse.Namespace) -> "Manner":
    with start_told_of("torch is loaded"):
        from impala_async.actor.player import Manner

    return Manner(
        is_exact=args.exact, is_looped=args.loop, is_original_speed=args.speed == "original"
    )


def _play(
    url: str,
    playlist: "Playlist",
    manner: "Manner",
    told: list[int],
    should_stop: Callable[[], bool],
) -> "Played":
    import torch

    from impala_async.actor.player import Player

    # Nothing is computed here, and a pool of threads would only stand in the learner's way.
    torch.set_num_threads(1)

    def hear(number: int, frame: object) -> None:
        if told:
            interrupt(number, frame)
        told.append(number)

    for number in REQUESTS:
        signal.signal(number, hear)
    return Player(url, playlist, manner, should_stop=should_stop, connect_s=CONNECT_S).run()


def _tell(played: "Played", playlist: "Playlist", told: list[int]) -> int:
    from impala_async.actor.player import describe

    print(describe(played, len(playlist)))
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


def _check_reached(folder: "RunFolder", playlist: "Playlist", played: "Played") -> None:
    """A learner that is killed may have trained on what was not on the disk yet."""
    wanted = _num_updates(playlist)
    summary = folder.read_json("summary.json")
    if wanted is not None and not played.is_finished:
        raise RecordingError(
            f"--exact: {playlist.path}: its messages make {summary and summary['updates']} "
            f"updates, and the learner that was recorded made {wanted}"
        )


def _compare(folder: "RunFolder", take: "Take", num_updates: int | None) -> None:
    """Whether the weights are those of the recording, to the last bit."""
    from impala_async.training.checkpoint import read_digests
    from impala_async.weights import Version

    if take.end is None or take.end.update != num_updates or not take.end.digests:
        print("the recording does not say what the weights were: nothing to compare")
        return
    digests = read_digests(folder.checkpoints, Version(1, num_updates))
    if digests != take.end.digests:
        raise RecordingError(
            f"--exact: after {num_updates} updates the weights are not those of the recording. "
            "They are on a CPU of the same kind, with the same releases of impala-async, torch and "
            f"numpy; it was recorded with impala-async {take.start.package}"
        )
    print(
        f"the same weights and optimizer state as recorded, to the last bit ({num_updates} updates)"
    )


if __name__ == "__main__":
    leave(main())
