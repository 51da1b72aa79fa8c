"""Nothing set but the environment and the steps, beside SB3's PPO with its own defaults.

    python -m bench.learning.beside_sb3 --write bench/results

Both train each task with each seed, one after the other, on the same cores. A result is kept with
the page, and what has one is not trained again: the measurement may be ended and go on at any time.
Seconds are ours from launch, with whatever ran beside, and SB3's of a processor: it is one thread
that never waits.
`python -m bench.peers --install` makes SB3's virtual environment; tasks with other packages want
these in both.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from bench.door import run
from bench.learning.search import HELD_OUT, TRAINING
from bench.machine import about_this_machine
from bench.peers.one_turn import Turn, run_turn
from bench.peers.venvs import DEFAULT_FOLDER, python_of
from impala_async.doors import seeds_of
from impala_async.files import write_whole

PAGE = "beside_sb3"
SYSTEMS = ("ours", "sb3")
LIMIT_S = 7200.0
NUM_POINTS = 100
ENV_IDS = (
    "CartPole-v1",
    "Acrobot-v1",
    "Pendulum-v1",
    "MountainCarContinuous-v0",
    "FrozenLake-v1",
    "Taxi-v4",
    "LunarLander-v3",
    "LunarLanderContinuous-v3",
    "InvertedDoublePendulum-v5",
    "Hopper-v5",
    "HalfCheetah-v5",
    "Walker2d-v5",
    "minatar:MinAtar/Breakout-v1",
    "minatar:MinAtar/Asterix-v1",
    "minatar:MinAtar/Freeway-v1",
    "BipedalWalker-v3",
)
_STEPS = {task.env_id: task.env_steps for task in (*TRAINING, *HELD_OUT)}
TASKS = {env_id: _STEPS[env_id] for env_id in ENV_IDS}

Curve: TypeAlias = list[tuple[float, int, float]]
"""Seconds from launch, env steps trained, and the mean return of 100 episodes."""


class Result(NamedTuple):
    system: str
    task: str
    seed: int
    curve: Curve
    commit: str = ""
    machine: str = ""
    num_steps: int | None = None
    """All that it trained, with the steps before 100 episodes had ended."""

    @property
    def final(self) -> float:
        # Before 100 episodes have ended there is none, which is as bad as it can be.
        return self.curve[-1][2] if self.curve else float("-inf")

    @property
    def seconds(self) -> float:
        return self.curve[-1][0] if self.curve else float("inf")

    def reached_s(self, goal: float) -> float:
        return next((at for at, _, value in self.curve if value >= goal), float("inf"))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.learning.beside_sb3",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--write", type=Path, required=True, metavar="DIR")
    parser.add_argument("--only", default="", metavar="TEXT", help="tasks whose id holds this text")
    parser.add_argument("--seeds", type=seeds_of, default=seeds_of("0-9"), metavar="A-B")
    parser.add_argument("--venvs", type=Path, default=DEFAULT_FOLDER, metavar="DIR")
    args = parser.parse_args(argv)
    data = args.write / f"{PAGE}.jsonl"
    results = read(data)
    for seed in args.seeds:
        for task in (each for each in TASKS if args.only.lower() in each.lower()):
            for system in SYSTEMS:
                if (system, task, seed) in {each[:3] for each in results}:
                    continue
                result = train(system, task, seed, args.venvs)
                results.append(result)
                with data.open("a") as file:
                    file.write(f"{json.dumps(result._asdict())}\n")
                told = f"{result.final:.4g} after {result.seconds:.0f} s"
                print(f"{task} {system} seed {seed}: {told}", file=sys.stderr, flush=True)
    write_whole(args.write / f"{PAGE}.md", page(results).encode())
    return 0


def train(system: str, task: str, seed: int, venvs: Path) -> Result:
    """RuntimeError if it fails, or takes too long."""
    num_steps = TASKS[task]
    python = sys.executable if system == "ours" else str(python_of(venvs, "sb3"))
    module = "bench.peers.run_defaults"
    turn = run_turn(
        [python, "-m", module, system, task, str(num_steps), str(seed)],
        lambda turn: _last_step(turn) >= num_steps,
        LIMIT_S,
    )
    if _last_step(turn) < num_steps:
        raise RuntimeError(f"{system} trained {task} for {LIMIT_S:.0f} s without an end")
    return result_of(turn, system, task, seed)


def result_of(turn: Turn, system: str, task: str, seed: int) -> Result:
    """All that was said, or about a hundredth of it."""
    told = [each for each in turn.progress if each.mean_return is not None]
    every = max(1, len(told) // NUM_POINTS)
    # From the end on: the last one is the result.
    kept = told[::-every][::-1]
    curve = [
        (round(each.elapsed_s, 2), each.trained, round(each.mean_return or 0.0, 3)) for each in kept
    ]
    about = about_this_machine()
    machine = f"{about['cores']} cores of {about['processor']}"
    return Result(system, task, seed, curve, about["commit"], machine, _last_step(turn))


def _last_step(turn: Turn) -> int:
    return turn.progress[-1].trained if turn.progress else 0


def read(path: Path) -> list[Result]:
    if not path.exists():
        return []
    return [Result(**json.loads(line)) for line in path.read_text().splitlines()]


def row(task: str, results: Sequence[Result]) -> str | None:
    """One line of the page, where both have something to show."""
    ours, theirs = ([r for r in results if (r.system, r.task) == (s, task)] for s in SYSTEMS)
    if not ours or not theirs:
        return None
    # A seed that was trained again counts by its last return.
    last, rival = ({each.seed: each for each in of}.values() for of in (ours, theirs))
    mine, other = (statistics.median(each.final for each in of) for of in (last, rival))
    # Seconds are compared on one machine, where a return may be of an earlier commit.
    shared = [each.machine for each in ours if each.machine in {other.machine for other in theirs}]
    times = "| | |"
    if shared:
        here = [[r for r in of if r.machine == statistics.mode(shared)] for of in (ours, theirs)]
        reached_s, took_s = (statistics.median(r.reached_s(other) for r in of) for of in here)
        ratio = f"{took_s / reached_s:.1f}" if reached_s < float("inf") else "not reached"
        if reached_s <= statistics.median(r.curve[0][0] for r in here[0] if r.curve):
            ratio = "-"
        by = "" if commits_of(here[0]) == commits_of(last) else f" ({commits_of(here[0])})"
        times = f"{took_s:.0f} | {reached_s:.0f}{by} | {ratio} |"
    finals = ", ".join(f"{each.final:.4g}" for each in last)
    return (
        f"| {task} | {TASKS[task]:,} | **{mine:.4g}** ({finals}) | {commits_of(last)} "
        f"| {other:.4g} ({len(rival)}) | {times}"
    )


def commits_of(results: Iterable[Result]) -> str:
    return ", ".join(sorted({each.commit for each in results if each.commit}))


def measured_by(results: Sequence[Result]) -> str:
    """They may be of several days and machines."""
    machines = sorted({each.machine for each in results})
    commits = commits_of(each for each in results if each.system == "ours")
    return f"Commits {commits}, on {' and '.join(machines)}"


def page(results: Sequence[Result]) -> str:
    rows = [found for task in TASKS if (found := row(task, results))]
    return "\n".join(
        [
            "# With nothing set, beside SB3's PPO",
            "",
            "`python -m bench.learning.beside_sb3 --write bench/results`. Nothing is set but "
            "`env.id`, `stop.env_steps` and the seed; SB3's PPO has its own defaults. Returns are "
            "means of the last 100 episodes, of which the medians over seeds are shown, and in "
            "brackets ours of each seed. Seconds are those to the first time at SB3's final "
            "return: ours from launch, whatever else ran on the two cores, SB3's of a processor, "
            "as it is one thread that never waits. A seed that was trained again counts by its "
            "last return, and by the seconds of each time on the machine that SB3 was on: a commit "
            "behind our seconds is theirs, where the returns are of another one. There is no ratio "
            "where our first point is there already, as where SB3 has learned nothing.",
            "",
            "| task | steps | ours | commit | SB3 (seeds) | its seconds | our seconds | times |",
            "|---|---|---|---|---|---|---|---|",
            *rows,
            "",
            f"{measured_by(results)}: seconds are compared on the one, of those that SB3 was on, "
            "where we have trained most often.",
            "",
        ]
    )


if __name__ == "__main__":
    run(main)
