"""The search for defaults: settings that want nothing of a task but its spaces, tried on many.

    python -m bench.learning.search --write bench/results
    python -m bench.learning.search --write bench/results --tasks held-out

`candidates.toml` names the settings of each candidate, as `train --set` takes them:

    [wide]
    set = ["actor.num_envs=32", "learner.batch_columns=32"]

where `{env_steps}` stands for the steps of a task. Each is trained on each task, with each seed, by
`impala_async.train` with nothing set but those, `env.id` and `stop.env_steps`. The mean return of
the last 100 episodes counts. A result is a line of `search.jsonl`, and what has one by the same
settings is not trained again: the search may be ended and go on at any time. The page, `search.md`,
compares candidates by their ranks: by the median of the seeds in each task, then by the mean over
tasks, so that no task counts for more since its returns are larger.
"""

import argparse
import importlib.util
import json
import statistics
import sys
import tomllib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from bench.door import run
from bench.machine import commit_of
from bench.one_run import ENDLESS, one_run
from impala_async.doors import seeds_of
from impala_async.files import write_whole

PAGE = "search"
CANDIDATES = Path(__file__).with_name("candidates.toml")
LIMIT_S = 3600.0
LOOK_EVERY_S = 0.2
# Tables of learning and tests have the first ones.
SEEDS = "1000-1002"

Candidates: TypeAlias = Mapping[str, Sequence[str]]
"""The settings of each, by its name."""
Returns: TypeAlias = dict[tuple[str, str], dict[int, float]]
"""Those of a candidate and a task, by seed."""


class Task(NamedTuple):
    """An environment, and the steps that it is trained for."""

    env_id: str
    env_steps: int
    needs: str = "gymnasium"


TRAINING = (
    Task("CartPole-v1", 150_000),
    Task("Acrobot-v1", 150_000),
    Task("Pendulum-v1", 300_000),
    Task("MountainCarContinuous-v0", 200_000),
    Task("FrozenLake-v1", 300_000),
    Task("Taxi-v4", 500_000),
    Task("LunarLander-v3", 600_000, "Box2D"),
    Task("minatar:MinAtar/Breakout-v1", 1_500_000, "minatar"),
    Task("minatar:MinAtar/SpaceInvaders-v1", 1_000_000, "minatar"),
    Task("InvertedPendulum-v5", 200_000, "mujoco"),
    Task("Hopper-v5", 1_000_000, "mujoco"),
    Task("HalfCheetah-v5", 1_000_000, "mujoco"),
)
# Nobody looks at these before a choice is made.
HELD_OUT = (
    Task("MountainCar-v0", 500_000),
    Task("Blackjack-v1", 200_000),
    Task("CliffWalking-v1", 300_000),
    Task("FrozenLake8x8-v1", 500_000),
    Task("LunarLanderContinuous-v3", 500_000, "Box2D"),
    Task("BipedalWalker-v3", 2_000_000, "Box2D"),
    Task("minatar:MinAtar/Asterix-v1", 1_500_000, "minatar"),
    Task("minatar:MinAtar/Freeway-v1", 1_500_000, "minatar"),
    Task("InvertedDoublePendulum-v5", 1_000_000, "mujoco"),
    Task("Walker2d-v5", 1_000_000, "mujoco"),
    Task("Swimmer-v5", 1_000_000, "mujoco"),
    Task("Reacher-v5", 500_000, "mujoco"),
)
TASKS = {"training": TRAINING, "held-out": HELD_OUT}


def main(argv: Sequence[str] | None = None) -> int:
    """Train what has no result yet, and write the page."""
    args = _parsed(argv)
    tasks = [task for task in TASKS[args.tasks] if args.only.lower() in task.env_id.lower()]
    lacking = {task.needs for task in tasks if importlib.util.find_spec(task.needs) is None}
    if lacking:
        print(f"skipped: tasks that need {', '.join(sorted(lacking))}", file=sys.stderr)
    tasks = [task for task in tasks if task.needs not in lacking]
    candidates, data = candidates_in(CANDIDATES), args.write / f"{PAGE}.jsonl"
    returns, commit = read(data, candidates), commit_of(Path.cwd())
    # Seeds come last, so that a search that is ended early has tried all on something.
    for seed in args.seeds:
        for task in tasks:
            for name, settings in candidates.items():
                if seed not in returns[name, task.env_id]:
                    found = train(task, seed, settings)
                    returns[name, task.env_id][seed] = found
                    line = {"candidate": name, "task": task.env_id, "seed": seed, "return": found}
                    with data.open("a") as file:
                        file.write(f"{json.dumps({**line, 'set': settings, 'commit': commit})}\n")
                    print(line, file=sys.stderr, flush=True)
    write_whole(args.write / f"{PAGE}.md", page(returns, candidates, commits_in(data)).encode())
    return 0


def train(task: Task, seed: int, settings: Sequence[str]) -> float:
    """The mean return of the last 100 episodes; RuntimeError if the training fails."""
    given = (f"env.id={task.env_id}", f"seed={seed}", f"stop.env_steps={task.env_steps}")
    filled = [text.replace("{env_steps}", str(task.env_steps)) for text in settings]
    with one_run(None, [*ENDLESS, *filled, *given]) as training:
        for _ in training.moments(LOOK_EVERY_S, LIMIT_S):
            pass
        found: float | None = training.summary()["mean_return_100"]
    # No episode has ended: as bad as a task can go, which has no number.
    return float("-inf") if found is None else found


def read(path: Path, candidates: Candidates) -> Returns:
    """The results so far of these candidates; one that had other settings was another one."""
    returns: Returns = defaultdict(dict)
    if path.exists():
        for line in map(json.loads, path.read_text().splitlines()):
            if candidates.get(line["candidate"]) == line["set"]:
                returns[line["candidate"], line["task"]][line["seed"]] = line["return"]
    return returns


def mean_ranks(returns: Returns, names: Sequence[str], tasks: Sequence[str]) -> dict[str, float]:
    """The mean over tasks that all have tried of a candidate's place, of which 1 is the best; who
    is equal shares the mean of the places."""
    places: dict[str, list[float]] = {name: [] for name in names}
    for task in tasks:
        if not all(returns[name, task] for name in names):
            continue
        medians = {name: statistics.median(returns[name, task].values()) for name in names}
        for name, median in medians.items():
            above = sum(other > median for other in medians.values())
            equal = sum(other == median for other in medians.values())
            places[name].append(1 + above + (equal - 1) / 2)
    return {name: statistics.fmean(found) for name, found in places.items() if found}


def table(returns: Returns, names: Sequence[str], tasks: Sequence[str]) -> str:
    """Medians of the seeds for each task, and the mean ranks below."""
    rows = [["task", "seeds", *names], ["---"] * (2 + len(names))]
    for task in tasks:
        found = [returns[name, task].values() for name in names]
        seeds = "-".join(str(number) for number in sorted({len(each) for each in found}))
        cells = (f"{statistics.median(each):.4g}" if each else "-" for each in found)
        rows.append([task, seeds, *cells])
    ranks = mean_ranks(returns, names, tasks)
    last = (f"**{ranks[name]:.2f}**" if name in ranks else "-" for name in names)
    rows.append(["mean rank", "", *last])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def commits_in(path: Path) -> list[str]:
    """A search goes on over days: those that any result is of."""
    lines = path.read_text().splitlines() if path.exists() else []
    return sorted({json.loads(line)["commit"] for line in lines})


def page(returns: Returns, candidates: Candidates, commits: Sequence[str]) -> str:
    """Both tables: one to choose by, the other one to judge the choice by."""
    names = list(candidates)
    settings = "\n".join(
        f"- {name}: {' '.join(f'`{text}`' for text in candidates[name]) or 'nothing set'}"
        for name in names
    )
    training, held_out = (
        table(returns, names, [task.env_id for task in TASKS[each]]) for each in TASKS
    )
    return f"""# The search for defaults

`python -m bench.learning.search --write bench/results`, and once more with `--tasks held-out`.
Nothing is set but `env.id`, `stop.env_steps`, the seed and what a candidate sets. Returns are means
of the last 100 episodes at the end, of which medians over seeds are shown. Ranks are of medians,
over tasks that all candidates were trained on.

{settings}

Tasks of the search:

{training}

Tasks that it did not see:

{held_out}

Commits {", ".join(commits)}.
"""


def candidates_in(path: Path) -> Candidates:
    found: Mapping[str, dict[str, list[str]]] = tomllib.loads(path.read_text())
    return {name: section["set"] for name, section in found.items()}


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.learning.search",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--write", type=Path, required=True, metavar="DIR")
    parser.add_argument("--tasks", choices=TASKS, default="training", help="(training)")
    parser.add_argument("--only", metavar="TEXT", default="", help="tasks whose id holds this text")
    parser.add_argument("--seeds", type=seeds_of, default=seeds_of(SEEDS), metavar="A-B",
                        help=f"({SEEDS})")  # fmt: skip
    return parser.parse_args(argv)


if __name__ == "__main__":
    run(main)
