"""Figures of two or more ways to do a thing, measured in turns, and what follows from their ratio.

Machines are shared and noisy: what is measured A B A B sees the same neighbours. So only ratios
within one run are claimed, and a figure is a median with its smallest and largest.
"""

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.machine import about_this_machine
from impala_async.files import write_whole

Sample = Mapping[str, float]
"""Figures of one turn, by their names."""


@dataclass(frozen=True)
class Figure:
    """A median over all turns, between the smallest and the largest; and a floor or a ceiling."""

    name: str
    median: float
    smallest: float
    largest: float
    unit: str = ""
    at_least: float | None = None
    at_most: float | None = None

    @property
    def is_held(self) -> bool:
        is_above = self.at_least is None or self.median >= self.at_least
        return is_above and (self.at_most is None or self.median <= self.at_most)

    def row(self) -> str:
        limit = ""
        if self.at_least is not None:
            limit = f"at least {self.at_least:g}"
        if self.at_most is not None:
            limit = f"at most {self.at_most:g}"
        verdict = "" if self.is_held else " **missed**"
        spread = f"{_short(self.smallest)} to {_short(self.largest)}"
        unit = f" {self.unit}" if self.unit else ""
        return f"| {self.name} | {_short(self.median)}{unit}{verdict} | {spread} | {limit} |"


def new_parser(
    title: str, about: str | None, *, rounds: int | None, has_cases: bool = True
) -> argparse.ArgumentParser:
    """A parser of the flags that benchmarks share; `rounds` is the default of that flag, if any."""
    name = _name(title)
    parser = argparse.ArgumentParser(prog=f"python -m bench.{name}", description=about)
    add = parser.add_argument
    if has_cases:
        add("--only", metavar="TEXT", default="", help="cases whose name holds this")
    if rounds is not None:
        add("--rounds", type=int, default=rounds, metavar="N", help=f"turns of each ({rounds})")
    add("--json", action="store_true", help="print JSON, not a table")
    add("--write", type=Path, metavar="DIR", help=f"put {name}.md and .json there")
    return parser


HEAD = "| what | median | range | limit |\n|---|---|---|---|"


def in_turns(sides: Mapping[str, Callable[[], Sample]], rounds: int) -> dict[str, list[Sample]]:
    """Samples of every side, each round one of each."""
    samples: dict[str, list[Sample]] = {name: [] for name in sides}
    for number in range(rounds):
        for name, measure in sides.items():
            samples[name].append(measure())
            print(f"round {number + 1} of {rounds}: {name}: {samples[name][-1]}", file=sys.stderr)
    return samples


def figure(name: str, values: Sequence[float], **limits: Any) -> Figure:
    return Figure(name, statistics.median(values), min(values), max(values), **limits)


def figure_of(
    name: str, samples: Sequence[Sample], key: str, unit: str = "", **limits: Any
) -> Figure:
    """The figure of all that the turns have under one name."""
    return figure(name, [each[key] for each in samples], unit=unit, **limits)


def ratio(
    name: str, above: Sequence[Sample], below: Sequence[Sample], key: str, **limits: Any
) -> Figure:
    """The ratio of one figure, round by round."""
    values = [first[key] / second[key] for first, second in zip(above, below, strict=True)]
    return figure(name, values, **limits)


def publish(
    title: str,
    figures: Sequence[Figure],
    *,
    notes: str,
    is_json: bool,
    folder: Path | None,
    gpu: str | None = None,
) -> int:
    """Print the table, or JSON; write both into a folder, if there is one.

    Returns 1 if a limit is missed.
    """
    if folder is None:
        content = _content(title, figures, gpu)
    else:
        content = write_page(title, figures, notes=notes, folder=folder, gpu=gpu)
    print(json.dumps(content, indent=2) if is_json else _table(figures))
    return 0 if all(each.is_held for each in figures) else 1


def write_page(
    title: str, figures: Sequence[Figure], *, notes: str, folder: Path, gpu: str | None = None
) -> dict[str, Any]:
    """The table with its notes, and JSON, which is what comes back; a GPU has pages of its own."""
    content = _content(title, figures, gpu)
    page = folder / f"{content['bench']}{'_cuda' if gpu else ''}"
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(page.with_suffix(".json"), f"{json.dumps(content, indent=2)}\n".encode())
    where = ", ".join(str(content[key]) for key in ("commit", "date", "machine", "images", "torch"))
    parts = [
        f"# {title}",
        f"`{content['command']}`",
        _table(figures),
        notes.strip(),
        f"Measured: {where}.",
    ]
    write_whole(page.with_suffix(".md"), ("\n\n".join(parts) + "\n").encode())
    return content


def _content(title: str, figures: Sequence[Figure], gpu: str | None) -> dict[str, Any]:
    name = _name(title)
    facts = about_this_machine()
    beside = f" and {gpu}" if gpu else ""
    return {
        "bench": name,
        "command": f"python -m bench.{name} {shlex.join(sys.argv[1:])}".strip(),
        "date": facts["date"],
        "commit": facts["commit"],
        "machine": f"{facts['cores']} cores of {facts['processor']}{beside}",
        "images": f"torsos for images in {facts['images']}",
        "torch": f"torch {facts['torch']}",
        "figures": [{**asdict(each), "is_held": each.is_held} for each in figures],
    }


def _name(title: str) -> str:
    return title.lower().replace(" ", "_")


def _table(figures: Sequence[Figure]) -> str:
    return "\n".join([HEAD, *(each.row() for each in figures)])


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
