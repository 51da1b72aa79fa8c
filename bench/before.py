"""Trainings by this checkout and by an earlier one, in turns: what the changes between them cost.

    git worktree add ../earlier COMMIT
    python -m bench.before ../earlier --write bench/results

Whether they learn the same, to the last bit, is what `bench.digests` compares.
"""

import argparse
from functools import partial
from pathlib import Path

from bench.door import run
from bench.machine import commit_of
from bench.one_run import CONFIGS, ENDLESS, one_run, steps_per_s
from bench.paired import Figure, Sample, in_turns, new_parser, publish, ratio

HERE = CONFIGS.parent
TRAINED_S, WARM_S = 12.0, 2.0
POLL_S = 0.5
FLOOR = 0.98
# By its name: the config, and what is set besides.
CASES = {
    "CartPole": ("cartpole", ()),
    "CartPole, PPO": ("cartpole_ppo", ()),
    "CartPole, lockstep": ("cartpole", ("pace.mode=lockstep",)),
}
NOTES = """
`python -m impala_async.train` in two checkouts, {here} over {earlier}, each with its own
configs, at full speed for {trained_s:g} seconds from the first update on, of which the first
{warm_s:g} are not counted.
"""


def main() -> int:
    """Measure what was asked for; 1 if a limit is missed."""
    parser = new_parser("Before", __doc__, rounds=6)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("earlier", type=Path, metavar="CHECKOUT", help="the folder of the other")
    args = parser.parse_args()
    earlier = args.earlier.resolve()
    if not (earlier / "impala_async").is_dir():
        parser.error(f"{earlier} is no checkout: there is no impala_async in it")
    figures = []
    for name in CASES:
        if args.only.lower() in name.lower():
            sides = {
                "earlier": partial(measure, earlier, name),
                "here": partial(measure, HERE, name),
            }
            figures += figures_of(name, in_turns(sides, args.rounds))
    commits = {"here": commit_of(HERE), "earlier": commit_of(earlier)}
    notes = NOTES.format(**commits, trained_s=TRAINED_S, warm_s=WARM_S)
    return publish("Before", figures, notes=notes, is_json=args.json, folder=args.write)


def measure(checkout: Path, name: str) -> Sample:
    config, more = CASES[name]
    settings = [*ENDLESS, *more, f"stop.wall_s={TRAINED_S}", "learner.report_every_s=0.25"]
    with one_run(checkout / f"configs/{config}.toml", settings, checkout=checkout) as trained:
        for _ in trained.moments(POLL_S):
            pass
        reports = trained.reports()
    return {
        "steps": steps_per_s(reports, WARM_S),
        "updates": steps_per_s(reports, WARM_S, "updates"),
    }


def figures_of(name: str, samples: dict[str, list[Sample]]) -> list[Figure]:
    here, earlier = samples["here"], samples["earlier"]
    return [
        ratio(f"{name}: env steps/s over earlier", here, earlier, "steps", at_least=FLOOR),
        ratio(f"{name}: updates/s over earlier", here, earlier, "updates", at_least=FLOOR),
    ]


if __name__ == "__main__":
    run(main)
