"""The actors door: some actors of this host, for a learner anywhere, watched until its run ends."""

import argparse
import logging
import signal
import time
from collections.abc import Sequence

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
    logs = [_log_of(number, args) for number in range(args.num)]
    heard = list[int]()
    lifeline = Lifeline()
    # Those of other hosts have such numbers, too.
    actors = Actors(args.learner, logs, lifeline, has_numbers=False)
    answer_requests(without_echo(lambda number, frame: heard.append(number)))
    try:
        while not (heard or actors.verdict or actors.is_over):
            actors.look()
            time.sleep(POLL_S)
    finally:
        actors.end(GOODBYE_S if actors.is_over else 0.0, is_hurried=lambda: len(heard) > 1)
        lifeline.close()
    if actors.verdict:
        code, reason = actors.verdict
        logger.error("%s", reason)
        return code
    logger.info("the run is over" if actors.is_over else "told to end: all actors have ended")
    return Exit.INTERRUPTED if signal.SIGINT in heard else Exit.DONE


def _log_of(number: int, args: argparse.Namespace) -> Log:
    if args.log_dir is None:
        return EchoedLog(f"actor {number}")
    return LogFile(args.log_dir / f"actor-{number}.log", LOG_DIR)


if __name__ == "__main__":
    leave(main())
