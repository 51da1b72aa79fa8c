"""The seconds of training to a return, with some numbers of passes over each batch, and with auto.

The claim: where env steps are cheap and where they are dear, `learner.num_passes = "auto"` takes at
most a tenth longer than the best of the numbers, which is another one in each.
"""

import functools
import os
import statistics
from collections.abc import Iterator

from bench.door import run
from bench.one_run import ENDLESS, one_run
from bench.paired import Figure, Sample, figure, figure_of, in_turns, new_parser, publish

GOAL, MOST_STEPS = 400.0, 400_000
PASSES = ("1", "2", "4", "8", "16", "auto")
SETTINGS = (
    *ENDLESS,
    *(f"stop.mean_return={GOAL}", f"stop.env_steps={MOST_STEPS}"),
    "learner.report_every_s=0.1",
)
CASES = {
    "CartPole": ("env.id=CartPole-v1",),
    # Stepped in turn, or more of them would wait at once.
    "CartPole that waits": (
        *("env.id=bench.learning.envs:slow_pole", "env.kwargs.step_s=0.0005"),
        "actor.sampler=serial",
    ),
}
LOOK_EVERY_S = 0.2

NOTES = """
Seconds from the first update to a mean return of {goal:g} over 100 episodes, with the defaults but
for `learner.num_passes`, each round with another seed. {cores} cores. A training that does not get
there within {most:,} env steps counts with all of its time. Steps of the second environment wait
for half a millisecond, one after the other, so most of a learner's time is free.
"""


def main() -> int:
    """Measure what was asked for; 1 if a limit was missed."""
    args = new_parser("Passes", __doc__, rounds=5).parse_args()
    figures: list[Figure] = []
    for name, settings in CASES.items():
        if args.only.lower() in name.lower():
            seeds = {passes: iter(range(args.rounds)) for passes in PASSES}
            sides = {
                passes: functools.partial(train, settings, passes, seeds[passes])
                for passes in PASSES
            }
            figures += figures_of(name, in_turns(sides, args.rounds))
    notes = NOTES.format(goal=GOAL, most=MOST_STEPS, cores=os.cpu_count())
    return publish("Passes", figures, notes=notes, is_json=args.json, folder=args.write)


def figures_of(name: str, samples: dict[str, list[Sample]]) -> list[Figure]:
    medians = {
        passes: statistics.median(each["goal_s"] for each in found)
        for passes, found in samples.items()
    }
    best = min((passes for passes in PASSES if passes != "auto"), key=lambda each: medians[each])
    ratio = medians["auto"] / medians[best]
    return [
        *(figure_of(f"{name}: {p}", samples[p], "goal_s", unit="s") for p in PASSES),
        figure_of(f"{name}: auto, passes of a batch", samples["auto"], "passes"),
        figure(f"{name}: auto over the best, {best}", [ratio], at_most=1.1),
    ]


def train(settings: tuple[str, ...], passes: str, seeds: Iterator[int]) -> Sample:
    """One training, with the next seed."""
    given = (f"learner.num_passes={passes}", f"seed={next(seeds)}")
    with one_run(None, [*SETTINGS, *settings, *given]) as trained:
        for _ in trained.moments(LOOK_EVERY_S):
            pass
        last = trained.reports()[-1]
        made = last["passes/done"] / max(1, last["trajectories/trained"])
        return {"goal_s": last["learner/wall_s"], "passes": made}


if __name__ == "__main__":
    run(main)
