"""The actor door: `python -m impala_async.actor --learner tcp://HOST:PORT`.

Runs on: main thread
"""

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from impala_async import doors, processes
from impala_async.errors import ConfigError
from impala_async.output import flush_output

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    parser = doors.new_parser(
        "actor", "Step environments for a learner, wherever this process runs."
    )
    doors.add_learner_flag(parser)
    parser.add_argument(
        "--num-envs",
        type=int,
        metavar="N",
        help="environments here, if not as many as the learner's actor.num_envs says",
    )
    parser.add_argument(
        "--connect-s",
        type=float,
        default=60.0,
        metavar="S",
        help="how long to look for the learner at the start (default: 60); with inf it looks for "
        "ever, also for one that is lost later",
    )
    # These are for whoever starts an actor again: its number, how often it was started before and
    # its number among those of this host; and where it says that the run is over.
    parser.add_argument("--start", type=int, nargs=3, default=(-1, 0, 0), help=argparse.SUPPRESS)
    parser.add_argument("--over-fd", type=int, help=argparse.SUPPRESS)
    flags = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(flags)
    return doors.run_door(lambda: _serve(args, flags))


def _serve(args: argparse.Namespace, flags: Sequence[str]) -> int:
    here = os.getcwd()
    doors.check_learner(args.learner)
    if args.num_envs is not None and args.num_envs < 1:
        raise ConfigError(f"--num-envs: wants a whole number from 1 up, got {args.num_envs}")
    if not args.connect_s > 0:
        raise ConfigError(f"--connect-s: wants a number of seconds over 0, got {args.connect_s}")
    processes.hold()
    doors.start_logging()
    # Read when numpy is imported: the sums of an actor are small, and threads only slow them down.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    with doors.start_told_of("torch is loaded"):
        from impala_async.actor.client import NewRun
        from impala_async.actor.service import ActorService

    service = ActorService(
        args.learner,
        num_envs=args.num_envs,
        connect_s=args.connect_s,
        start=tuple(args.start),
    )
    try:
        code = service.run()
        if args.over_fd is not None and service.is_finished:
            os.eventfd_write(args.over_fd, 1)
        return code
    except NewRun:
        pass
    # The service only notes a signal, and looks at its note no more.
    with processes.quit_at_once():
        if service.is_told_to_end:
            return service.exit_code
        logger.info(
            "another run, or an earlier state of this one, is at this address now: starting anew, "
            "with the code as it is now"
        )
        flush_output()
        # An environment may have changed the current folder, where its module lies.
        os.chdir(here)
        os.execv(sys.executable, [sys.executable, "-m", "impala_async.actor", *flags])


if __name__ == "__main__":
    processes.leave(main())
