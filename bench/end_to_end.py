"""Whole trainings, through the door that users take: speed, start, time to the goal, and memory.

In each round the bare environment is stepped right before the trainings, so that a ratio is that
of neighbours in time.
"""

import functools
import importlib.util
import itertools
import sys
import time
from contextlib import ExitStack, closing
from pathlib import Path

import gymnasium
import numpy as np
from gymnasium.vector import SyncVectorEnv

from bench.door import run
from bench.one_run import CONFIGS, ENDLESS, one_run, steps_per_s
from bench.paired import Figure, Sample, figure, figure_of, in_turns, new_parser, publish, ratio
from bench.processes import PeakMemory, cpu_s
from bench.samplers import Case, bare_rate
from impala_async.actor.setup import make_setup
from impala_async.config.env import EnvSection
from impala_async.config.load import load_config
from impala_async.policy import Policy
from impala_async.schema import Schema

CARTPOLE, PONG = CONFIGS / "cartpole.toml", CONFIGS / "atari.toml"
NUM_BARE_ENVS = 16
# Processor time is that between the first and the last of these that are younger.
CPU_WARM_S = 2.0
BARE_S, PONG_BARE_S = 2.0, 5.0
CARTPOLE_S, PONG_S, PONG_MEMORY_S, SLEEPING_S = 10.0, 60.0, 20.0, 20.0
STEP_S, EPISODE = 0.005, 200
# These of a Pong run are not counted.
PONG_WARM_S = 10.0
LOOK_EVERY_S = 0.5
GB = 1e9

NOTES = """
Everything is `python -m impala_async.train` with a config of this repository; where steps sleep,
with nothing set but the environment. Steps per second are those trained, by the reports of the run,
from its first update on (Pong: from ten seconds later on) to its end; at CartPole no return ends
it. "To the first update", "to 475" and "to the end" are wall time from before the process is
started: the reports say how long ago the first update was, and the file's time when the last of
them was written, which is after the goal was met. "The end" is that of `train`, checkpoint and
picture included.

Bare is random actions, one process, every row counted, those that reset too: CartPole through
gymnasium's `SyncVectorEnv`, Pong as one environment in the wrappers of the papers. In turn is one
environment whose steps sleep, too.

Processor time is that of `train` and all below it, of all their threads, from two seconds after the
first update on, over the env steps trained meanwhile. With acting, bare is gymnasium's own vector
code of as many environments as the config has, stepped by the same policy in one process.

Memory is the greatest sum over the learner, its actors and what they start, looked at twice a
second: RSS counts pages that they share for each of them, PSS once (looked at every two seconds).

Each last run names its limit by its own account:

{verdicts}
"""


def main() -> int:
    """Measure what was asked for; 1 if a limit was missed."""
    args = new_parser("End to end", __doc__, rounds=5).parse_args()
    figures: list[Figure] = []
    verdicts: dict[str, str] = {}
    cases = (
        ("CartPole", "gymnasium", cartpole),
        ("Sleeping", "gymnasium", sleeping),
        ("Pong", "ale_py", pong),
    )
    for name, needs, measure in cases:
        if args.only.lower() not in name.lower():
            continue
        if importlib.util.find_spec(needs) is None:
            print(f"skipped: {name}: {needs} is not installed", file=sys.stderr)
            continue
        figures += measure(args.rounds, verdicts)
    listed = "\n".join(f"- {run}: {verdict}" for run, verdict in verdicts.items())
    notes = NOTES.format(verdicts=listed)
    return publish("End to end", figures, notes=notes, is_json=args.json, folder=args.write)


def cartpole(rounds: int, verdicts: dict[str, str]) -> list[Figure]:
    """CartPole at full speed for a while, and to its goal with as many seeds as rounds."""
    seeds = itertools.count()

    def at_speed() -> Sample:
        settings = [*ENDLESS, f"stop.wall_s={CARTPOLE_S}", f"learner.report_every_s={LOOK_EVERY_S}"]
        return train(CARTPOLE, settings, "CartPole at full speed", verdicts)

    def to_goal() -> Sample:
        settings = [f"seed={next(seeds)}"]
        return train(CARTPOLE, settings, "CartPole to 475", verdicts)

    sides = {
        "bare": bare_cartpole,
        "acting": acting_cartpole,
        "at speed": at_speed,
        "to 475": to_goal,
    }
    return cartpole_figures(*in_turns(sides, rounds).values())


def sleeping(rounds: int, verdicts: dict[str, str]) -> list[Figure]:
    """Nothing is set but an environment whose steps wait."""
    env = EnvSection(id="bench.probes:Slow", kwargs={"step_s": STEP_S, "length": EPISODE})

    def in_turn() -> Sample:
        with ExitStack() as stack:
            return {"per_s": bare_rate(Case("Sleeping", env, 1), stack)(BARE_S)}

    def at_speed() -> Sample:
        kwargs = [f"env.kwargs.{name}={value}" for name, value in env.kwargs.items()]
        settings = [*ENDLESS, f"env.id={env.id}", *kwargs, f"stop.wall_s={SLEEPING_S}"]
        return train(None, settings, "Sleeping", verdicts, is_watched=False)

    turns = in_turns({"in turn": in_turn, "at speed": at_speed}, rounds)
    one_by_one, speed = turns["in turn"], turns["at speed"]
    what = f"An environment whose steps sleep for {1000 * STEP_S:g} ms"
    return [
        figure_of(f"{what}: trained env steps/s", speed, "per_s"),
        ratio("The same over one that is stepped in turn", speed, one_by_one, "per_s", at_least=6),
    ]


def pong(rounds: int, verdicts: dict[str, str]) -> list[Figure]:
    """Pong as it is configured; and with two actors for a shorter time, for their memory."""

    def at_speed() -> Sample:
        settings = [*ENDLESS, f"stop.wall_s={PONG_S}"]
        return train(PONG, settings, "Pong", verdicts, after_s=PONG_WARM_S)

    def two_actors() -> Sample:
        settings = [*ENDLESS, f"stop.wall_s={PONG_MEMORY_S}", "train.num_actors=2"]
        return train(PONG, settings, "Pong with two actors", verdicts)

    sides = {"bare": bare_pong, "at speed": at_speed, "two actors": two_actors}
    return pong_figures(*in_turns(sides, rounds).values())


def cartpole_figures(
    bare: list[Sample], acting: list[Sample], speed: list[Sample], goal: list[Sample]
) -> list[Figure]:
    return [
        figure_of("CartPole: trained env steps/s", speed, "per_s", at_least=100_000),
        figure_of(f"bare SyncVectorEnv of {NUM_BARE_ENVS} on one core: rows/s", bare, "per_s"),
        ratio("CartPole: trained over bare", speed, bare, "per_s"),
        figure_of("CartPole: processor time per trained env step", speed, "cpu_us", unit="µs"),
        ratio("the same over that of bare vector code with acting", speed, acting, "cpu_us",
            at_most=2.5),
        figure_of("CartPole: launch to the first update", [*speed, *goal], "start_s", unit="s",
            at_most=5),
        figure_of("CartPole: launch to 475", goal, "last_s", unit="s", at_most=9),
        figure_of("CartPole: launch to the end of the run to 475", goal, "end_s", unit="s"),
        figure("CartPole: share of the seeds that reached 475",
               [sum(each["is_solved"] for each in goal) / len(goal)], at_least=1),
        *_memory("CartPole", speed, at_most=1.0),
    ]  # fmt: skip


def pong_figures(bare: list[Sample], speed: list[Sample], two: list[Sample]) -> list[Figure]:
    return [
        figure_of("Pong: trained agent steps/s", speed, "per_s"),
        figure_of("bare wrapped Pong on one core: rows/s", bare, "per_s"),
        ratio("Pong: trained over bare", speed, bare, "per_s"),
        figure_of("Pong: launch to the first update", speed, "start_s", unit="s"),
        *_memory("Pong with two actors", two, at_most=1.6),
    ]


def train(
    config: Path | None,
    settings: list[str],
    name: str,
    verdicts: dict[str, str],
    *,
    after_s: float = 0.0,
    is_watched: bool = True,
) -> Sample:
    """One training, from its launch to its end. Its speed counts from `after_s` on."""
    with one_run(config, settings) as run:
        peak = PeakMemory(run.pid)
        spent: list[tuple[float, int]] = []
        for _ in run.moments(LOOK_EVERY_S):
            if not is_watched:
                continue
            peak.look()
            report = run.last_report()
            if report and (report["learner/wall_s"] or 0.0) > CPU_WARM_S:
                spent.append((cpu_s(run.pid), report["env_steps_trained"]))
        end_s = time.time() - run.launched_at
        summary = run.summary()
        verdicts[name] = summary["bottleneck"]
        print(f"{name}: {summary['bottleneck']}", file=sys.stderr)
        return {
            "per_s": steps_per_s(run.reports(), after_s),
            "start_s": run.first_update_after_s,
            "last_s": run.last_report_after_s,
            "end_s": end_s,
            "is_solved": float(summary["exit_reason"] == "mean_return"),
            "rss_gb": peak.rss_bytes / GB,
            "pss_gb": peak.pss_bytes / GB,
            "cpu_us": cpu_us(spent),
        }


def bare_cartpole() -> Sample:
    """Random actions, nothing else."""
    make = functools.partial(gymnasium.make, "CartPole-v1", disable_env_checker=True)
    envs = SyncVectorEnv([make] * NUM_BARE_ENVS)
    envs.reset(seed=0)
    actions = np.random.default_rng(0).integers(0, 2, (1000, NUM_BARE_ENVS))
    begun, num_steps = time.perf_counter(), 0
    while (spent_s := time.perf_counter() - begun) < BARE_S:
        envs.step(actions[num_steps % len(actions)])
        num_steps += 1
    envs.close()
    return {"per_s": num_steps * NUM_BARE_ENVS / spent_s}


def acting_cartpole() -> Sample:
    """The vector code that the actor steps, with a policy that acts, nothing else."""
    config = load_config(CARTPOLE, [])
    num_envs = config.actor.num_envs
    assert isinstance(num_envs, int)
    envs = gymnasium.make_vec(config.env.id, num_envs, vectorization_mode="vector_entry_point")
    with closing(
        make_setup(config.actor, config.env, num_envs, config.policies, lambda: None).envs
    ) as ours:
        schema = Schema(ours.obs_spec, ours.action_spec, config.trajectory.rows)
    policy = Policy(schema, config.model, seed=0)
    generator = policy.new_generator()
    obs, _ = envs.reset(seed=0)
    begun_s, num_steps = time.process_time(), 0
    while (spent_s := time.process_time() - begun_s) < BARE_S:
        chosen = policy.act({"": obs}, {}, generator)
        obs, *_ = envs.step(chosen.actions[""])
        num_steps += num_envs
    envs.close()
    return {"cpu_us": 1e6 * spent_s / num_steps}


def bare_pong() -> Sample:
    """One environment, stepped alone."""
    with ExitStack() as stack:
        rate = bare_rate(Case("Pong", EnvSection(id="ALE/Pong-v5"), 1, needs="ale_py"), stack)
        return {"per_s": rate(PONG_BARE_S)}


def cpu_us(spent: list[tuple[float, int]]) -> float:
    """Per trained step, between the first and the last of these processor seconds and steps."""
    # A process that has ended is in the sum no more.
    falls = (n for n, (one, two) in enumerate(itertools.pairwise(spent), 1) if two[0] < one[0])
    spent = spent[: next(falls, len(spent))]
    if len(spent) < 2 or spent[-1][1] == spent[0][1]:
        return 0.0
    return 1e6 * (spent[-1][0] - spent[0][0]) / (spent[-1][1] - spent[0][1])


def _memory(name: str, samples: list[Sample], at_most: float) -> list[Figure]:
    rss = figure_of(f"{name}: memory of learner and actors, RSS",
              samples, "rss_gb", unit="GB", at_most=at_most)  # fmt: skip
    if not all(each["pss_gb"] for each in samples):
        return [rss]
    return [rss, figure_of(f"{name}: the same, PSS", samples, "pss_gb", unit="GB")]


if __name__ == "__main__":
    run(main)
