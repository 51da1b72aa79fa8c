"""The door of the suite: `python -m bench.learning --suite quick|full`."""

import argparse
import importlib.util
import shlex
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from bench.door import run
from bench.learning.cases import CASES, Case
from bench.learning.table import HEAD, is_held, measured, row, write
from bench.learning.train import Outcome, train


def main() -> int:
    """Train everything that was asked for; 1 if a floor was missed."""
    parser = argparse.ArgumentParser(prog="python -m bench.learning", description=__doc__)
    parser.add_argument("--suite", choices=("quick", "full"), default="quick",
                        help="quick leaves out what takes over five minutes a seed")  # fmt: skip
    parser.add_argument("--only", metavar="TEXT", help="cases whose name holds this text")
    parser.add_argument("--seeds", type=int, metavar="N", help="the first N seeds only")
    parser.add_argument("--write", type=Path, metavar="DIR",
                        help="bring learning.md and learning.json there up to date")  # fmt: skip
    parser.add_argument("--resume", action="store_true",
                        help="train only the seeds that the page of --write lacks")  # fmt: skip
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE",
                        help="train with this beside what a case sets; for no page")  # fmt: skip
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the run folders there")
    args = parser.parse_args()
    if args.resume and args.write is None:
        parser.error("--resume goes on with the page of --write DIR")
    if args.set and args.write is not None:
        parser.error("--set changes the cases, and pages are of the cases as they are")
    cases = [
        replace(case, overrides=(*case.overrides, *args.set))
        for case in CASES
        if _is_asked_for(case, args)
    ]
    if not cases:
        parser.error(f"--only: no case of this suite is called {args.only!r}")
    folder = args.keep or Path(tempfile.mkdtemp(prefix="impala-async-bench-"))
    command = f"python -m bench.learning {shlex.join(sys.argv[1:])}"
    are_held = []
    print(HEAD, flush=True)
    try:
        for case in cases:
            outcomes = measured(args.write, case) if args.resume else []
            num_seeds = min(case.num_seeds, args.seeds or case.num_seeds)
            for seed in range(len(outcomes), num_seeds):
                outcomes.append(_run(case, seed, folder))
                if args.write:
                    write(args.write, case, outcomes, command)
            print(row(case, outcomes), flush=True)
            are_held.append(is_held(case, outcomes))
    finally:
        if args.keep is None:
            shutil.rmtree(folder)
    return 0 if all(are_held) else 1


def _is_asked_for(case: Case, args: argparse.Namespace) -> bool:
    if args.only is not None and args.only.lower() not in case.name.lower():
        return False
    if args.suite == "quick" and not case.is_quick:
        return False
    if importlib.util.find_spec(case.needs) is None:
        print(f"skipped: {case.name}: {case.needs} is not installed", file=sys.stderr)
        return False
    return True


def _run(case: Case, seed: int, folder: Path) -> Outcome:
    name = "".join(letter if letter.isalnum() else "-" for letter in case.name)
    outcome = train(case, seed, folder / name / str(seed))
    print(f"{case.name}, seed {seed}: {outcome}", file=sys.stderr, flush=True)
    return outcome


if __name__ == "__main__":
    run(main)
