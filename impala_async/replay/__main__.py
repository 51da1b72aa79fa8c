"""The replay door: a recording into a learner of the recorded settings, without environments."""

import argparse
import logging
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from impala_async import doors
from impala_async.errors import ConfigError, Exit
from impala_async.launch.children import end_in_time, exit_code, spawn
from impala_async.launch.local import LEARNER_END_S
from impala_async.output import told_of
from impala_async.processes import (
    Lifeline,
    answer_requests,
    interrupt,
    last_word,
    leave,
    result_wanted,
    undone,
    without_echo,
)

if TYPE_CHECKING:
    from impala_async.replay.index import RecordingIndex
    from impala_async.runs.folder import RunFolder

logger = logging.getLogger(__name__)

SETTINGS = "replay.json"
CONNECT_S = 60.0
POLL_S = 0.05
# A learner that has reached its goal, and said so, is about to end by itself.
GRACE_S = 600.0


def main(argv: Sequence[str] | None = None) -> int:
    parser = doors.new_parser(
        "replay",
        "Start a learner with the settings of a recording, and play that into it, as fast as it "
        "takes it: without environments, over the same protocol.",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="a file that `train --record` made")
    parser.add_argument(
        "--exact",
        action="store_true",
        help="with the recorded versions, for the same weights to the last bit",
    )
    parser.add_argument("--loop", action="store_true", help="again and again, until Ctrl-C")
    change = "change a recorded setting of the learner; may be repeated"
    doors.add_common_flags(parser, change, "its run folder")
    args = parser.parse_args(argv)
    with result_wanted() if args.exact else nullcontext():
        return doors.run_door(lambda: _replay(args))


def _replay(args: argparse.Namespace) -> int:
    if args.exact and (args.loop or args.overrides):
        raise ConfigError("--exact: it ends, with the recorded settings: drop --loop and --set")
    doors.start_logging()
    from impala_async.replay.index import RecordingIndex, check_exact, settings_for
    from impala_async.runs.folder import RunFolder, default_run_path

    with doors.start_told_of(f"{args.file} is checked"):
        index = RecordingIndex(args.file)
    if args.exact:
        check_exact(index)
    config = settings_for(index, args.overrides, is_exact=args.exact)
    folder = RunFolder(args.run_dir or default_run_path(config))
    folder.check_new(advice="name another folder")
    folder.check_free()  # and so it is ours to withdraw
    with undone(folder.withdraw), undone(lambda: folder.remove(SETTINGS)):
        return _start_and_play(args, index, folder, folder.write_settings(config, SETTINGS))


def _start_and_play(
    args: argparse.Namespace, index: "RecordingIndex", folder: "RunFolder", settings: Path
) -> int:
    from impala_async.replay.index import compare

    told: list[int] = []
    lifeline = Lifeline()
    flags = ["--config", str(settings), "--run-dir", str(folder.path)]
    learner = spawn("learner", flags, lifeline)
    player, grace_s = None, 0.0

    def is_over() -> bool:
        return bool(told) or learner.poll() is not None

    def hear(number: int, frame: object) -> None:
        if told:
            interrupt(number, frame)
        told.append(number)

    try:
        # Until it has begun it has nothing to say.
        with undone(learner.wait), undone(learner.kill):
            with doors.start_told_of("torch is loaded, the learner built"):
                from impala_async.replay.player import Player

                answer_requests(without_echo(hear))
                while not (service := folder.read_json("service.json")) and not is_over():
                    time.sleep(POLL_S)
            if service and not is_over():
                player = Player(
                    str(folder.path),
                    index,
                    is_exact=args.exact,
                    is_looped=args.loop,
                    should_stop=is_over,
                    connect_s=CONNECT_S,
                )
                player.run()
                grace_s = GRACE_S if player.is_finished else 0.0
    finally:
        with told_of("ending: waiting for the learner", logger.info):
            end_in_time([learner], grace_s, asked_s=LEARNER_END_S)
        code = exit_code(learner.returncode)
        lifeline.close()
    if code > Exit.INTERRUPTED:  # a signal that it could not tell of itself
        doors.tell_death(code, folder, "learner")
    if code != Exit.DONE:
        return code
    if player is not None:
        print(player.describe())
        if args.exact and not told:
            print(compare(folder, index, is_finished=player.is_finished))
    return last_word(*told)[1] if told else Exit.DONE


if __name__ == "__main__":
    leave(main())
