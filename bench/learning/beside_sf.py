"""Nothing set but the environment, beside Sample Factory's APPO with its own defaults.

    python -m bench.learning.beside_sf --write bench/results

We train each task for the steps of `beside_sb3`, and then Sample Factory for as long as that took,
from launch to the end, on the same cores. A result is kept with the page, and is not measured
again. `python -m bench.peers --install` makes its virtual environment, which wants Box2D, pygame
and mujoco besides. It takes an earlier gymnasium, where two of the tasks have earlier versions.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.door import run
from bench.learning.beside_sb3 import TASKS, Result, measured_by, read, result_of
from bench.learning.beside_sb3 import train as train_ours
from bench.peers.one_turn import Turn, run_turn
from bench.peers.venvs import DEFAULT_FOLDER, python_of
from impala_async.doors import seeds_of
from impala_async.files import write_whole

PAGE = "beside_sf"
# Vectors of numbers are all that it takes without code of one's own.
IDS = {
    "CartPole-v1": "CartPole-v1",
    "Acrobot-v1": "Acrobot-v1",
    "Pendulum-v1": "Pendulum-v1",
    "MountainCarContinuous-v0": "MountainCarContinuous-v0",
    "LunarLander-v3": "LunarLander-v2",
    "HalfCheetah-v5": "HalfCheetah-v4",
}
START_S = 60.0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.learning.beside_sf",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--write", type=Path, required=True, metavar="DIR")
    parser.add_argument("--only", default="", metavar="TEXT", help="tasks whose id holds this text")
    parser.add_argument("--seeds", type=seeds_of, default=seeds_of("0-2"), metavar="A-B")
    parser.add_argument("--venvs", type=Path, default=DEFAULT_FOLDER, metavar="DIR")
    args = parser.parse_args(argv)
    data = args.write / f"{PAGE}.jsonl"
    results = read(data)
    for seed in args.seeds:
        for task in (each for each in IDS if args.only.lower() in each.lower()):
            if ("sf", task, seed) in {each[:3] for each in results}:
                continue
            ours = train_ours("ours", task, seed, args.venvs)
            pair = [ours, train_theirs(task, seed, ours.seconds, args.venvs)]
            results += pair
            with data.open("a") as file:
                file.writelines(f"{json.dumps(each._asdict())}\n" for each in pair)
            told = " and ".join(f"{each.system} {each.final:.4g}" for each in pair)
            print(f"{task} seed {seed}, {ours.seconds:.0f} s: {told}", file=sys.stderr, flush=True)
    write_whole(args.write / f"{PAGE}.md", page(results).encode())
    return 0


def train_theirs(task: str, seed: int, seconds: float, venvs: Path) -> Result:
    """For so long from its launch; its last word is the result, however early."""
    command = [str(python_of(venvs, "sf")), "-m", "bench.peers.run_defaults", "sf", IDS[task]]
    turn = run_turn(
        [*command, str(10**9), str(seed)],
        lambda turn: bool(turn.progress) and turn.progress[-1].elapsed_s >= seconds,
        seconds + START_S,
    )
    within = [each for each in turn.progress if each.elapsed_s <= seconds]
    return result_of(Turn(within), "sf", task, seed)


def row(task: str, results: Sequence[Result]) -> str | None:
    """One line of the page, where both have been measured."""
    ours, theirs = ([r for r in results if (r.system, r.task) == (s, task)] for s in ("ours", "sf"))
    if not ours:
        return None
    finals = [[each.final for each in of] for of in (ours, theirs)]
    shown = [
        f"**{statistics.median(of):.4g}** ({', '.join(f'{f:.4g}' for f in of)})" for of in finals
    ]
    seconds = statistics.median(each.seconds for each in ours)
    counts = [each.num_steps for each in theirs if each.num_steps is not None]
    steps = f"{statistics.median(counts):,.0f}" if counts else "-"
    return f"| {task} | {seconds:.0f} | {TASKS[task]:,} | {shown[0]} | {steps} | {shown[1]} |"


def page(results: Sequence[Result]) -> str:
    rows = [found for task in IDS if (found := row(task, results))]
    return "\n".join(
        [
            "# With nothing set, beside Sample Factory",
            "",
            "`python -m bench.learning.beside_sf --write bench/results`. Nothing is set but the "
            "environment, the seed and our `stop.env_steps`; Sample Factory's APPO has its own "
            "defaults, on a CPU, and trains for the seconds that we took, from launch to the end. "
            "Returns are means of the last 100 episodes then, medians over seeds, and in brackets "
            "those of each seed; -inf where 100 episodes had not ended. Sample Factory wants an "
            "earlier gymnasium, and has LunarLander-v2 and HalfCheetah-v4 there.",
            "",
            "| task | seconds | our steps | ours | its steps | Sample Factory |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
            f"{measured_by(results)}.",
            "",
        ]
    )


if __name__ == "__main__":
    run(main)
