"""The console command: `impala-async <door>`, the same doors as `python -m impala_async.<door>`."""

import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from impala_async import __version__
from impala_async.doors import run_door
from impala_async.errors import Exit
from impala_async.processes import leave

# Door: its module, and what it is for. Modules are imported only when their door is opened.
DOORS = {
    "train": ("impala_async.train", "one learner and its actors on this machine"),
    "learner": ("impala_async.learner.__main__", "a learner for actors anywhere"),
    "actor": ("impala_async.actor.__main__", "an actor, for a learner anywhere"),
    "actors": ("impala_async.actors", "some actors of this host, started again when they die"),
    "launch": ("impala_async.launch.__main__", "a learner and its actors, by Slurm or Ray"),
    "replay": ("impala_async.replay.__main__", "a recording into a learner, without environments"),
    "evaluate": ("impala_async.evaluate", "greedy episodes with a trained policy"),
    "export": ("impala_async.export", "a trained policy as ONNX, or as torch.export saves it"),
}


def main(argv: Sequence[str] | None = None) -> int:
    args = list(sys.argv[1:] if argv is None else argv)
    return run_door(lambda: _open(args))


def console() -> NoReturn:
    leave(main())


def _open(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help"):
        print(_help())
        return Exit.DONE if args else Exit.CONFIG
    if args[0] == "--version":
        print(f"impala-async {__version__}")
        return Exit.DONE
    if args[0] not in DOORS:
        near = difflib.get_close_matches(args[0], DOORS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        print(f"error: there is no door {args[0]!r}{hint}\n\n{_help()}", file=sys.stderr)
        return Exit.CONFIG
    # As `python -m` does: environments of one's own often lie in this folder.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    return int(importlib.import_module(DOORS[args[0]][0]).main(args[1:]))


def _help() -> str:
    doors = "\n".join(f"  {door:<10} {purpose}" for door, (_, purpose) in DOORS.items())
    told = "impala-async DOOR --help tells more"
    return f"usage: impala-async DOOR [flags]\n\n{doors}\n\n{told}"


if __name__ == "__main__":
    console()
