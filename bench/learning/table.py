"""The table of results: as markdown for people, as JSON for programs."""

import hashlib
import json
import math
import re
import statistics
import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.learning.cases import CASES, Case
from bench.learning.train import Outcome
from bench.machine import about_this_machine
from bench.one_run import CONFIGS
from impala_async.config.load import load_config
from impala_async.files import write_whole

HEAD = (
    "| task | floor | seeds passed | mean return per seed | env steps, median | seconds, median |\n"
    "|---|---|---|---|---|---|"
)


def is_held(case: Case, outcomes: list[Outcome]) -> bool:
    """Whether enough seeds passed."""
    needed = math.ceil(case.num_must * len(outcomes) / case.num_seeds)
    return sum(outcome.has_passed for outcome in outcomes) >= needed


def row(case: Case, outcomes: list[Outcome]) -> str:
    """One line of the table that is shown while the suite runs."""
    floor = f"{'below' if case.is_control else ''} {case.goal:g} in {case.env_steps:,}".strip()
    returns = ", ".join("-" if o.best_return is None else f"{o.best_return:.4g}" for o in outcomes)
    num_passed = sum(outcome.has_passed for outcome in outcomes)
    verdict = "" if is_held(case, outcomes) else " **missed**"
    steps = statistics.median(outcome.env_steps for outcome in outcomes)
    seconds = statistics.median(outcome.wall_s for outcome in outcomes)
    return (
        f"| {case.name} | {floor}, {case.num_must} of {case.num_seeds} "
        f"| {num_passed} of {len(outcomes)}{verdict} | {returns} | {steps:,.0f} | {seconds:.0f} |"
    )


def settings_of(case: Case) -> str:
    """A digest of all that a seed of the case is trained with and measured against."""
    config = tomllib.loads((CONFIGS / case.config).read_text()) if case.config else {}
    # The suite has goals and ends of its own.
    config.pop("stop", None)
    trial = case.trial and case.trial.__name__
    goal = case.goal, case.env_steps, case.is_control, trial
    # Those that an algorithm has where nobody sets them are in no file, and have changed.
    whole = load_config(CONFIGS / case.config if case.config else None, case.overrides)
    settings = config, case.overrides, case.num_ranks, *goal, whole.algorithm.returns_kind
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]


def measured(folder: Path, case: Case) -> list[Outcome]:
    """The seeds of the case that the page has, if they were trained with the settings of today."""
    entry = _entries(folder).get(case.name, {})
    if entry.get("settings") != settings_of(case):
        return []
    return [Outcome(**seed) for seed in entry["seeds"]]


def _entries(folder: Path) -> dict[str, dict[str, Any]]:
    path = folder / "learning.json"
    kept = json.loads(path.read_text()) if path.exists() else []
    return {entry["task"]: entry for entry in kept}


def write(folder: Path, case: Case, outcomes: list[Outcome], command: str) -> None:
    """Put the row of one case into the page, and into the JSON from which the page is made.

    The rows of other cases stay as they were measured, with their own commit and date.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "learning.json"
    entries = _entries(folder)
    seeds = [asdict(outcome) for outcome in outcomes]
    about, before = about_this_machine(), entries.get(case.name, {})
    if before and seeds[: len(before["seeds"])] == before["seeds"]:
        # Those seeds are of an earlier time, and perhaps of another machine.
        for key, value in about.items():
            if (old := before.get(key, value)) != value:
                both = dict.fromkeys([*str(old).split(" and "), str(value)])
                about[key] = " and ".join(both)
    entries[case.name] = {
        "task": case.name,
        "config": case.config,
        "overrides": case.overrides,
        "settings": settings_of(case),
        "held": is_held(case, outcomes),
        "row": row(case, outcomes),
        "seeds": seeds,
        "command": command,
        **about,
    }
    in_order = [entries[case.name] for case in CASES if case.name in entries]
    write_whole(path, f"{json.dumps(in_order, indent=2)}\n".encode())
    write_whole(folder / "learning.md", _page(in_order).encode())


def _page(entries: list[dict[str, Any]]) -> str:
    head, rule = HEAD.splitlines()
    lines = [
        "# Learning",
        "",
        "`python -m bench.learning --suite full --write bench/results` measures all of it, with",
        "`--only TEXT` some rows, with `--resume` the seeds that are missing; each row says when",
        "it was measured.",
        "",
        "Returns are the best mean of 100 episodes of a seed, or a share that a trial measured",
        "after the training (`bench/learning/trials.py`); seconds are from launch to end, with the",
        "start of the processes, and are longer where the machine had other work meanwhile. A",
        "control lacks what its task needs, and must stay below.",
        "",
        f"{head} commit, date |",
        f"{rule}---|",
        *(f"{entry['row']} {entry['commit']}, {entry['date']} |" for entry in entries),
        "",
        "Measured on:",
        "",
        *sorted({f"- {e['cores']} cores of {e['processor']}, torch {e['torch']}" for e in entries}),
    ]
    return "\n".join(lines) + "\n"


RESULTS = Path(__file__).resolve().parents[1] / "results"
CONFIGS_HEAD = (
    "| file | what it is | algorithm | reaches | env steps | seconds |\n|---|---|---|---|---|---|"
)


def configs_table() -> str:
    """The table of configs/README.md: what each file was measured to do, with all seeds."""
    entries = json.loads((RESULTS / "learning.json").read_text())
    # A config's first row is that of what it is for.
    firsts = {entry["config"]: entry for entry in reversed(entries) if not entry["overrides"]}
    rows = [_config_row(path, firsts.get(path.name)) for path in sorted(CONFIGS.glob("*.toml"))]
    return "\n".join([CONFIGS_HEAD, *rows, ""])


def _config_row(path: Path, entry: dict[str, Any] | None) -> str:
    text = path.read_text()
    algorithm = load_config(path).algorithm.name
    comment = " ".join(line[2:] for line in text.partition("\n\n")[0].splitlines())
    what = re.split(r"[:;,.](?: |$)", comment)[0]
    start = f"| `{path.name}` | {what} | {algorithm} |"
    if entry is None:
        page = f"{path.stem}.md"
        assert (RESULTS / page).exists(), f"{path.name} was never measured"
        return f"{start} [a page of its own](../bench/results/{page}) | | |"
    (case,) = (case for case in CASES if case.name == entry["task"])
    of_what = case.name.partition(": ")[2]
    goal = f"{case.goal:g}" + (f", {of_what}" if of_what else "")
    seeds = entry["seeds"]
    num_passed = sum(seed["has_passed"] for seed in seeds)
    if num_passed < len(seeds):
        goal += f" ({num_passed} of {len(seeds)} seeds)"
    steps = _spread([seed["env_steps"] for seed in seeds])
    return f"{start} {goal} | {steps} | {_spread([seed['wall_s'] for seed in seeds])} |"


def _spread(values: list[float]) -> str:
    """The median, and the range if there is one."""
    smallest, middle, largest = min(values), statistics.median(values), max(values)
    return f"{middle:,.0f}" + (f" ({smallest:,.0f} to {largest:,.0f})" if len(values) > 1 else "")
