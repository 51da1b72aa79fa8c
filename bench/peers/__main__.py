"""This package beside its peers, in turns: `python -m bench.peers [--venvs DIR] [--install]`.

Trained env steps per second on CartPole and Pong, seconds to CartPole's goal, start-up and memory.
A peer that is not installed is skipped, and named.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from bench.door import run
from bench.paired import Figure, in_turns, publish
from bench.peers.measure import SYSTEMS, WARM_S, System, solving, speed
from bench.peers.table import goal_rows, speed_rows
from bench.peers.venvs import DEFAULT_FOLDER, fault_of, install

NOTES = """
All have the same games, networks of the same size (MLP 2x64 tanh; the Nature CNN) and the same
cores. Env steps count once, when they are trained on for the first time:
agent steps, not frames, without padding and bootstrap rows. The clock runs from the launch of the
command; speeds are taken from 10 s after the first trained step. Memory is the greatest sum of the
RSS of all processes, looked at four times a second; what they share is in it several times. A seed
of a peer that did not come to a mean return of 475 over 100 episodes in time counts as the time
limit, and the ratio to it is at most what is shown.

- impala_async: configs/cartpole.toml and configs/atari.toml, through `impala_async.train`, one
  thread a process. Its environments are vector code: gymnasium's of CartPole in numpy, ale_py's of
  Pong. The peers step single environments in Python, Pong through AtariPreprocessing. Its torso for
  images computes in bfloat16 where the processor has it (`model.precision`, the usual auto; the
  last line says whether this one has); the peers' compute in float32, as they are set.
- Sample Factory: asynchronous APPO, 2 workers in two halves. CartPole as its gymnasium example, 20
  environments a worker, batch 512, rewards times 0.1, but learning rate 1e-3. Pong: 8 environments
  a worker, batch 256, each row trained on once (its Atari example: four times).
- SB3: rl-zoo's settings. CartPole: A2C with 8 environments; PPO with 8, 32 steps, 20 epochs, batch
  256, learning rate 1e-3 and clip 0.2 falling to nothing in 100,000 steps; DummyVecEnv, one thread.
  Pong: A2C with 16 environments; PPO with 8, 128 steps, 4 epochs, batch 256; SubprocVecEnv, and two
  threads for torch, since learning and acting alternate.
- RLlib: its examples, 2 env runners, the learner in the driver's process. CartPole: 16 environments
  a runner, batch 500, learning rate 5e-4; IMPALA with normalised observations, APPO with a ring of
  8 batches used twice. Pong: batch 500, frames stacked by its connectors; IMPALA with 5
  environments a runner; APPO with 2 and a ring of 4 batches used twice.
"""


def main() -> int:
    """Measure what was asked for; 1 if a limit was missed."""
    args = _parse()
    # Inherited by everything that is started from here.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.cores])
    wanted = tuple(text.lower() for text in args.only or [""])
    systems = present([each for each in SYSTEMS if each.name.lower().startswith(wanted)], args)
    figures: list[Figure] = []
    for title, seconds in (("CartPole", args.cartpole_s), ("Pong", args.pong_s)):
        if seconds:
            game = title.lower()
            sides = {each.name: speed(each, args.venvs, game, seconds) for each in systems}
            figures += speed_rows(title, in_turns(sides, args.rounds))
    if args.seeds:
        goals = {each.name: solving(each, args.venvs, args.limit_s) for each in systems}
        figures += goal_rows(in_turns(goals, args.seeds), args.limit_s)
    return publish("Peers", figures, notes=NOTES, is_json=args.json, folder=args.write)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=__doc__)
    add = parser.add_argument
    add("--venvs", type=Path, metavar="DIR", default=DEFAULT_FOLDER,
        help=f"the peers' virtual environments ({DEFAULT_FOLDER})")  # fmt: skip
    add("--install", action="store_true", help="make those that are missing or have other versions")
    add("--cores", type=int, default=2, metavar="N", help="for each system (2)")
    add("--rounds", type=int, default=3, metavar="N", help="turns of each, for speeds (3)")
    add("--cartpole-s", type=float, default=20, metavar="S", help="of such a turn (20); 0: none")
    add("--pong-s", type=float, default=90, metavar="S", help="of such a turn (90); 0: none")
    add("--seeds", type=int, default=5, metavar="N", help="to CartPole's goal (5); 0: none")
    add("--limit-s", type=float, default=120, metavar="S", help="of a seed, from launch (120)")
    add("--only", action="append", metavar="TEXT",
        help="systems whose name begins so; may be given again")  # fmt: skip
    add("--json", action="store_true", help="print JSON, not a table")
    add("--write", type=Path, metavar="DIR", help="put peers.md and .json there")
    args = parser.parse_args()
    for name in ("cartpole_s", "pong_s"):
        # So long a rate waits, and it wants as much again.
        if 0 < getattr(args, name) < WARM_S:
            parser.error(f"--{name.replace('_', '-')}: wants {WARM_S:g} or more, or 0 for none")
    args.venvs = args.venvs.expanduser().absolute()
    # Known now, and not after half an hour.
    if args.pong_s and find_spec("ale_py") is None:
        parser.error("Pong needs ale_py here too: pip install 'impala-async[atari]', or --pong-s 0")
    return args


def present(systems: Sequence[System], args: argparse.Namespace) -> list[System]:
    """Those that can be measured; the others are installed if that was asked for, or named."""
    found = []
    for system in systems:
        if system.venv and args.install and fault_of(args.venvs, system.venv):
            install(args.venvs, system.venv)
        fault = fault_of(args.venvs, system.venv) if system.venv else None
        if fault is None:
            found.append(system)
        else:
            print(f"skipped: {system.name}: {fault}", file=sys.stderr)
    return found


if __name__ == "__main__":
    run(main)
