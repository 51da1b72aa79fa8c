"""The record door: `train`, with everything that the actors send written to a file.

For actors on other hosts there is `python -m impala_async.learner --record FILE`.
"""

from collections.abc import Sequence
from pathlib import Path

from impala_async.doors import add_run_flags, new_parser, run_door
from impala_async.processes import leave
from impala_async.train import train


def main(argv: Sequence[str] | None = None) -> int:
    """As `train` does it, from the first message to the last."""
    parser = new_parser(
        "record",
        "Train on this machine, and write all that the learner takes from its actors to a file, "
        "for `replay`.",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="the recording, a new file")
    add_run_flags(parser)
    args = parser.parse_args(argv)
    return run_door(lambda: train(args, ["--record", str(args.file)]))


if __name__ == "__main__":
    leave(main())
