"""The actors door: some actors of this host, for a learner anywhere, watched until its run ends."""

import argparse
import logging
import math
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from impala_async import doors
from impala_async.errors import ConfigError, Exit
from impala_async.files import writing
from impala_async.launch.actors import GOODBYE_S, Actors
from impala_async.launch.children import POLL_S
from impala_async.launch.logs import EchoedLog, Log, LogFile
from impala_async.processes import Lifeline, answer_requests, leave, without_echo

logger = logging.getLogger(__name__)

LOG_DIR = "--log-dir"
MOST_ACTORS = 1024
# So long a learner that goes on with a run after its end may load, and try the environment.
LATER_END_S = 180.0
LOOK_EVERY_S = 0.5


def main(argv: Sequence[str] | None = None) -> int:
    parser = doors.new_parser(
        "actors",
        "Run actors on this host for a learner, and start each again that dies, until the learner "
        "says that the run is over.",
    )
    doors.add_learner_flag(parser)
    told = "so many actors (default: 1, as one can use all cores: actor.sampler)"
    parser.add_argument("--num", type=int, default=1, metavar="K", help=told)
    parser.add_argument(
        LOG_DIR,
        type=doors.typed_path,
        metavar="DIR",
        help="a folder for what each of them says (default: all is said here, behind its number)",
    )
    args = parser.parse_args(argv)
    return doors.run_door(lambda: _watch(args))


def _watch(args: argparse.Namespace) -> int:
    doors.check_learner(args.learner)
    if not 1 <= args.num <= MOST_ACTORS:
        raise ConfigError(f"--num: wants a whole number from 1 to {MOST_ACTORS}, got {args.num}")
    if args.log_dir is not None:
        with writing(args.log_dir, LOG_DIR):
            args.log_dir.mkdir(parents=True, exist_ok=True)
    doors.start_logging()
    many = "1 actor" if args.num == 1 else f"{args.num} actors"
    logger.info("starting %s for the learner at %s", many, args.learner)
    is_abandoned = _look_for_run(args.learner)
    logs = [_log_of(number, args) for number in range(args.num)]
    heard = list[int]()
    lifeline = Lifeline()
    # Those of other hosts have such numbers, too.
    actors = Actors(args.learner, logs, lifeline, has_numbers=False)
    answer_requests(without_echo(lambda number, frame: heard.append(number)))
    try:
        while not (heard or actors.verdict or actors.is_over or is_abandoned()):
            actors.look()
            actors.tell_starts()
            time.sleep(POLL_S)
    finally:
        actors.end(GOODBYE_S if actors.is_over else 0.0, is_hurried=lambda: len(heard) > 1)
        lifeline.close()
    if actors.verdict:
        code, reason = actors.verdict
        logger.error("%s", reason)
        return code
    logger.info("told to end: all actors have ended" if heard else "the run is over")
    return Exit.INTERRUPTED if signal.SIGINT in heard else Exit.DONE


def _look_for_run(learner: str) -> Callable[[], bool]:
    """A function that says whether the run in this folder has been over for so long that nobody
    will go on with it."""
    from impala_async.actor.address import is_folder
    from impala_async.runs.folder import RunFolder
    from impala_async.runs.start import is_over

    # An address says nothing of a run.
    folder = RunFolder(Path(learner)) if is_folder(learner) else None
    look_at, over_since = 0.0, math.inf

    def is_abandoned() -> bool:
        nonlocal look_at, over_since
        if folder is None or (now := time.monotonic()) < look_at:
            return False
        look_at = now + LOOK_EVERY_S
        if not is_over(folder):
            over_since = math.inf
        elif over_since == math.inf:
            over_since = now
            told = "the run in %s is over: ending in %.0f s, unless a learner goes on with it"
            logger.info(told, folder.path, LATER_END_S)
        return now - over_since >= LATER_END_S

    return is_abandoned


def _log_of(number: int, args: argparse.Namespace) -> Log:
    if args.log_dir is None:
        return EchoedLog(f"actor {number}")
    return LogFile(args.log_dir / f"actor-{number}.log", LOG_DIR)


if __name__ == "__main__":
    leave(main())
