"""One actor with an env worker for each core of a host, beside as many actors without workers.

The claim: the one actor fetches weights once for all environments that these step.
"""

import functools
import os

from bench.door import run
from bench.one_run import CONFIGS
from bench.paired import Figure, Sample, figure_of, in_turns, new_parser, publish, ratio
from bench.scaling import ASLEEP, Case, measure

WIDTH = 8
CASES = (
    ASLEEP,
    Case(
        "computes 1 ms",
        CONFIGS / "cartpole.toml",
        ("env.id=bench.probes:Burning", "env.kwargs.step_s=0.001", "trajectory.rows=10"),
    ),
)

NOTES = """
Env steps trained per second, and bytes of weights that the learner sent for each of them: with one
actor that has {num} env workers, and with {num} actors that step their environments in turn. Each
worker and each of those actors has {width} environments, and batches are the same. Ten seconds are
counted, from when all actors have joined. Learner and actors share the {cores} cores of this
machine.
"""


def main() -> int:
    """Measure what was asked for."""
    parser = new_parser("Host", __doc__, rounds=5)
    parser.add_argument("--num", type=int, default=max(2, os.cpu_count() or 2), metavar="N",
                        help="env workers, and actors (as many as cores)")  # fmt: skip
    args = parser.parse_args()
    figures: list[Figure] = []
    for case in CASES:
        if args.only.lower() in case.name.lower():
            figures += compare(case, args.num, args.rounds)
    notes = NOTES.format(num=args.num, width=WIDTH, cores=os.cpu_count())
    return publish("Host", figures, notes=notes, is_json=args.json, folder=args.write)


def compare(case: Case, num: int, rounds: int) -> list[Figure]:
    """The two ways in turns, and the ratios of the one actor to the many."""
    names = f"{case.name}, 1 actor with {num} env workers", f"{case.name}, {num} actors"
    both = *case.settings, f"learner.batch_columns={WIDTH * num}"
    workers = "actor.sampler=parallel", f"actor.num_workers={num}", f"actor.num_envs={WIDTH * num}"
    alone = "actor.sampler=serial", f"actor.num_envs={WIDTH}"
    sides = {
        name: functools.partial(measure, case._replace(settings=(*both, *own)), actors, name, {})
        for name, own, actors in zip(names, (workers, alone), (1, num), strict=True)
    }
    samples = in_turns(sides, rounds)
    one, many = (samples[name] for name in names)
    return [
        *(each for name in names for each in _figures(name, samples[name])),
        ratio(f"{case.name}: env steps/s of 1 over {num} actors", one, many, "per_s"),
        ratio(f"{case.name}: weights of 1 over {num} actors", one, many, "weights_bytes_per_step"),
    ]


def _figures(name: str, samples: list[Sample]) -> list[Figure]:
    return [
        figure_of(f"{name}: env steps/s", samples, "per_s"),
        figure_of(f"{name}: weights per env step", samples, "weights_bytes_per_step", "bytes"),
    ]


if __name__ == "__main__":
    run(main)
