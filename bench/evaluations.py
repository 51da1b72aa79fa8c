"""Trainings with evaluations beside trainings without, in turns: what they cost the learner.

The claim: at most a fiftieth of its updates where cores are idle, as it waits for nothing.
"""

import functools
import os

from bench.door import run
from bench.one_run import CONFIGS, ENDLESS, one_run, steps_per_s
from bench.paired import Figure, Sample, figure_of, in_turns, new_parser, publish, ratio
from bench.scaling import ASLEEP, Case

EVERY_S = 2.0
# Counted once the process that evaluates has loaded torch.
AFTER_S, COUNTED_S = 4.0, 4.0
LOOK_EVERY_S = 0.5
EVALUATED = (f"evaluate.every_s={EVERY_S}",)
CASES = (ASLEEP, Case("CartPole", CONFIGS / "cartpole.toml"))

NOTES = """
Updates per second of whole trainings, {counted:g} s of each, with an evaluation of ten episodes
every {every:g} s and without. Environments that sleep leave the cores idle. CartPole at full speed
does not: on {cores} cores its evaluations, at a niceness of 10, compete with learner and actor.
"""


def main() -> int:
    """Measure what was asked for; 1 if a limit was missed."""
    args = new_parser("Evaluations", __doc__, rounds=5).parse_args()
    figures: list[Figure] = []
    for case in CASES:
        if args.only.lower() in case.name.lower():
            sides = {
                "without": functools.partial(train, case),
                "with": functools.partial(train, case, EVALUATED),
            }
            figures += figures_of(case, *in_turns(sides, args.rounds).values())
    notes = NOTES.format(counted=COUNTED_S, every=EVERY_S, cores=os.cpu_count())
    return publish("Evaluations", figures, notes=notes, is_json=args.json, folder=args.write)


def figures_of(case: Case, without: list[Sample], having: list[Sample]) -> list[Figure]:
    name, limits = case.name, {"at_least": 0.98} if case is ASLEEP else {}
    return [
        figure_of(f"{name}: updates/s without", without, "per_s"),
        figure_of(f"{name}: updates/s with", having, "per_s"),
        ratio(f"{name}: with over without", having, without, "per_s", **limits),
        figure_of(f"{name}: evaluations", having, "evaluations"),
        figure_of(f"{name}: one of them", having, "took_s", unit="s"),
    ]


def train(case: Case, settings: tuple[str, ...] = ()) -> Sample:
    """One training; its rate once all have begun."""
    limits = (*ENDLESS, f"stop.wall_s={AFTER_S + COUNTED_S}", "train.num_actors=1")
    with one_run(case.config, [*limits, *case.settings, *settings]) as trained:
        for _ in trained.moments(LOOK_EVERY_S):
            pass
        reports = trained.reports()
        last = reports[-1]
        return {
            "per_s": steps_per_s(reports, AFTER_S, "updates"),
            "evaluations": last["evaluate/count"],
            "took_s": last["evaluate/took_s"] or 0.0,
        }


if __name__ == "__main__":
    run(main)
