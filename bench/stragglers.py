"""Two ranks, of which one has environments that are ten times slower, with cut trajectories and
without.

Both go as far, from the same seeds. Environments sleep, so that the cores are for the learners.
"""

from bench.door import run
from bench.one_run import CONFIGS, one_run, steps_per_s
from bench.paired import Figure, Sample, figure, in_turns, new_parser, publish, ratio

ENV_STEPS = 150_000
SETTINGS = (
    *("env.id=bench.probes:Straggler", "actor.sampler=serial", "train.num_actors=2"),
    *("env.kwargs.step_s=0.0002", f"algorithm.schedule_env_steps={ENV_STEPS}"),
    *("stop.mean_return=none", f"stop.env_steps={ENV_STEPS}"),
)
CUT = ("pace.cut_share=0.5",)
POLL_S = 0.5
NOTES = """
DD-PPO on CartPole (`configs/cartpole_ddppo.toml`), whose steps sleep 0.2 ms, and 2 ms in rank 1:
with nothing cut each update waits for that. With `pace.cut_share` half of the ranks being ready
is enough, and the other one sends what it has, at least a quarter of its rows. Seconds are those in
which the learners train. The return is the mean of the last 100 episodes, when {env_steps:,} env
steps are trained, and the learning rate has come down to 0.
"""


def main() -> int:
    """A round is a seed; 1 if the limit is missed."""
    args = new_parser("Stragglers", __doc__, rounds=5, has_cases=False).parse_args()
    seeds = {"whole": iter(range(args.rounds)), "cut": iter(range(args.rounds))}
    sides = {
        "whole": lambda: one_turn((), next(seeds["whole"])),
        "cut": lambda: one_turn(CUT, next(seeds["cut"])),
    }
    figures = figures_of(in_turns(sides, args.rounds))
    notes = NOTES.format(env_steps=ENV_STEPS)
    return publish("Stragglers", figures, notes=notes, is_json=args.json, folder=args.write)


def one_turn(more: tuple[str, ...], seed: int) -> Sample:
    with one_run(CONFIGS / "cartpole_ddppo.toml", [*SETTINGS, *more, f"seed={seed}"], 2) as ranks:
        for _ in ranks.moments(POLL_S):
            pass
        trained = [report for report in ranks.reports() if report["updates"]]
    last = trained[-1]
    return {
        "per_s": steps_per_s([trained[0], last]),
        "return": float(last["mean_return_100"]),
        "rows_cut": float(last["lockstep/rows_cut"]),
    }


def figures_of(samples: dict[str, list[Sample]]) -> list[Figure]:
    whole, cut = samples["whole"], samples["cut"]
    return [
        ratio("env steps/s, cut over whole", cut, whole, "per_s", at_least=1.5),
        ratio("return, cut over whole", cut, whole, "return", at_least=0.95),
        figure("return, whole", [sample["return"] for sample in whole]),
        figure("return, cut", [sample["return"] for sample in cut]),
        figure("rows cut, of those that were sent or cut",
               [each["rows_cut"] / (ENV_STEPS + each["rows_cut"]) for each in cut]),
    ]  # fmt: skip


if __name__ == "__main__":
    run(main)
