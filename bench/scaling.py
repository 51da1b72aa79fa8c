"""The number of actor processes against the env steps that are trained per second.

Each round trains with each number of actors once. Counting begins when the last of them has
joined.
"""

import functools
import os
import sys
from pathlib import Path
from typing import NamedTuple

from bench.door import run
from bench.one_run import CONFIGS, ENDLESS, Report, one_run, steps_per_s
from bench.paired import Figure, Sample, figure, in_turns, new_parser, publish, ratio

NUM_ACTORS = (1, 2, 4, 8, 16)
COLUMNS = 16
COUNTED_S = 10.0
POLL_S = 0.25
SETTINGS = (*ENDLESS, "learner.report_every_s=0.25")

NOTES = """
Env steps trained per second with so many actor processes, and the same over one actor of the same
round; ten seconds are counted, from when all actors have joined. CartPole wants a core for each
actor and one for the learner: beyond this machine's cores, of which there are {cores}, nothing more
is expected of it. Environments that sleep for a millisecond want no core, so they show how the
service itself takes more actors, until what is left beside the sleep fills the cores.

In lockstep the actors share 16 columns, and an update waits for all of them: one actor steps all
columns in turn, 16 have one each. So it is in loops that gather, update and broadcast by MPI: the
table of one, mpi_util, has 546 steps/s by one process and 2,484 by nine, 4.5 times as many, with
little more from the fourth on, on six cores. Two ranks have a learner each, and half of the actors.
They are no faster here, as both run on the cores that one learner has for itself otherwise.

The serial share is what Amdahl's law makes of the last row: the share of the work that is not done
side by side. With 16 actors on few cores, that is mostly what is left beside their sleep.

Each last run names its limit by its own account:

{verdicts}
"""


class Case(NamedTuple):
    """A run that is trained."""

    name: str
    config: Path
    settings: tuple[str, ...] = ()
    # In lockstep actors share the columns of a batch; else each has as many as ever.
    is_lockstep: bool = False
    num_ranks: int = 1

    @property
    def numbers(self) -> tuple[int, ...]:
        """Each rank has an actor at least."""
        return tuple(number for number in NUM_ACTORS if number >= self.num_ranks)

    def settings_of(self, num_actors: int) -> list[str]:
        settings = [*SETTINGS, *self.settings, f"train.num_actors={num_actors}"]
        if self.is_lockstep:
            settings += ["pace.mode=lockstep", f"learner.batch_columns={COLUMNS}"]
            settings += [f"actor.num_envs={COLUMNS // num_actors}"]
        return settings


# Its environments are stepped in turn, or an actor would start processes besides itself. Short
# trajectories, since a second of one actor is to be many batches.
ASLEEP = Case(
    "sleeps 1 ms",
    CONFIGS / "cartpole.toml",
    (
        "env.id=bench.probes:Slow",
        "env.kwargs.step_s=0.001",
        "env.kwargs.length=100",
        "actor.sampler=serial",
        "trajectory.rows=10",
    ),
)
LOCKSTEP = ASLEEP._replace(name="sleeps 1 ms, lockstep", is_lockstep=True)
# A batch of two ranks has room for an actor in each half.
RANKS = ASLEEP._replace(
    name="sleeps 1 ms, 2 ranks",
    settings=(*ASLEEP.settings, "learner.batch_columns=32"),
    num_ranks=2,
)
LOCKSTEP_RANKS = LOCKSTEP._replace(name="sleeps 1 ms, lockstep, 2 ranks", num_ranks=2)


def main() -> int:
    """Measure what was asked for."""
    parser = new_parser("Scaling", __doc__, rounds=5)
    parser.add_argument("--config", type=Path, default=CONFIGS / "cartpole.toml", metavar="FILE",
                        help="what is trained in place of CartPole")  # fmt: skip
    args = parser.parse_args()
    figures: list[Figure] = []
    verdicts: dict[str, str] = {}
    for case in (Case(args.config.stem, args.config), ASLEEP, RANKS, LOCKSTEP, LOCKSTEP_RANKS):
        if args.only.lower() in case.name.lower():
            figures += scale(case, args.rounds, verdicts)
    listed = "\n".join(f"- {name}: {verdict}" for name, verdict in verdicts.items())
    notes = NOTES.format(cores=os.cpu_count(), verdicts=listed)
    return publish("Scaling", figures, notes=notes, is_json=args.json, folder=args.write)


def scale(case: Case, rounds: int, verdicts: dict[str, str]) -> list[Figure]:
    """Two figures for each number of actors; the verdicts are told, and kept by their names."""
    names = [_named(case, number) for number in case.numbers]
    sides = {
        name: functools.partial(measure, case, num, name, verdicts)
        for name, num in zip(names, case.numbers, strict=True)
    }
    samples = in_turns(sides, rounds)
    least, over = samples[names[0]], _actors(case.numbers[0])
    figures = [each for name in names for each in _figures(name, samples[name], least, over)]
    if "sleeps" in case.name:  # else it is the cores that end the growth
        figures.append(serial_share(case, samples[names[-1]], least))
    return figures


def serial_share(case: Case, most: list[Sample], least: list[Sample]) -> Figure:
    """The share of the work that is not done side by side, by Amdahl's law: of `n` times the actors
    `s` times the rate, (n / s - 1) / (n - 1)."""
    times = case.numbers[-1] / case.numbers[0]
    speedups = [many["per_s"] / few["per_s"] for many, few in zip(most, least, strict=True)]
    shares = [(times / each - 1) / (times - 1) for each in speedups]
    return figure(f"{case.name}: serial share, of {_actors(case.numbers[-1])}", shares)


def measure(case: Case, num_actors: int, name: str, verdicts: dict[str, str]) -> Sample:
    """Train until all are there, and then for as long as is counted."""
    first: Report | None = None
    with one_run(case.config, case.settings_of(num_actors), case.num_ranks) as run:
        for _ in run.moments(POLL_S):
            last = run.last_report()
            # Who goes in between begins the count anew.
            is_whole = last is not None and last["updates"] and last["num_actors"] == num_actors
            first = (first or last) if is_whole else None
            if first and last and last["time_s"] - first["time_s"] >= COUNTED_S:
                verdicts[name] = str(last["bottleneck"])
                print(f"{name}: {verdicts[name]}", file=sys.stderr)
                steps = last["env_steps_trained"] - first["env_steps_trained"]
                sent_bytes = last["weights/bytes"] - first["weights/bytes"]
                return {
                    "per_s": steps_per_s([first, last]),
                    "weights_bytes_per_step": sent_bytes / steps,
                }
    raise RuntimeError(f"{name}: the run ended before it was measured")


def _named(case: Case, number: int) -> str:
    return f"{case.name}, {_actors(number)}"


def _actors(number: int) -> str:
    return f"{number} actor{'s' * (number > 1)}"


def _figures(name: str, samples: list[Sample], least: list[Sample], over: str) -> list[Figure]:
    speed = figure(f"{name}: env steps/s", [each["per_s"] for each in samples])
    if samples is least:
        return [speed]
    return [speed, ratio(f"{name}: over {over}", samples, least, "per_s")]


if __name__ == "__main__":
    run(main)
