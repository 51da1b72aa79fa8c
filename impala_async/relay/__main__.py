"""The relay door: `python -m impala_async.relay --learner tcp://HOST:PORT`.

Runs on: main thread
"""

import argparse
from collections.abc import Sequence

from impala_async.doors import check_learner_url, new_parser, run_door, start_logging
from impala_async.errors import ConfigError
from impala_async.leaving import leave


def main(argv: Sequence[str] | None = None) -> int:
    """It needs to know where the learner is, and where its actors shall find it."""
    parser = new_parser(
        "relay",
        "Stand between a learner on another host and the actors of this one: weights then come "
        "over the network once for all of them. Start them with --learner and the relay's address.",
    )
    parser.add_argument(
        "--learner",
        required=True,
        metavar="URL",
        help="where the learner takes trajectories, for example tcp://10.0.0.1:5555",
    )
    parser.add_argument(
        "--bind",
        default="tcp://127.0.0.1:*",
        metavar="URL",
        help="where actors find the relay (default: tcp://127.0.0.1:*, any free port)",
    )
    args = parser.parse_args(argv)
    return run_door(lambda: _serve(args))


def _serve(args: argparse.Namespace) -> int:
    check_learner_url(args.learner)
    from impala_async.config_bind import TCP_URL

    if TCP_URL.fullmatch(args.bind) is None:
        raise ConfigError(f"--bind: wants tcp://HOST:PORT, or tcp://HOST:*, got {args.bind!r}")
    start_logging()
    from impala_async.relay.service import RelayService

    return RelayService(args.learner, args.bind).run()


if __name__ == "__main__":
    leave(main())
