"""Each sampler, with a policy that acts, against bare environments that are stepped in turn.

    python -m bench.samplers [--json FILE] [--only TEXT] [--rounds N] [--slice-s S]

The claim: `actor.sampler` makes of an environment what the machine has to give. In each round the
bare environments are stepped before every sampler, and a ratio is that of two neighbours in time:
rows per second with the sampler, over rows per second without policy, trajectories or workers.
"""

import argparse
import importlib.util
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from impala_async.actor.cores import count_cores
from impala_async.actor.samplers.choose import Scrap
from impala_async.actor.samplers.stage import set_stage
from impala_async.config_actor import ActorSection, SamplerName
from impala_async.config_env import EnvSection
from impala_async.config_model import ModelSection
from impala_async.envs.make import make_env
from impala_async.errors import EnvError
from impala_async.policy import Policy
from impala_async.spec import Schema

SAMPLERS: tuple[SamplerName, ...] = ("serial", "vector", "parallel", "alternating", "central")
ROWS = 20
HEAD = "| environments | sampler | ratio to bare: min | median | max | rows/s, median |"
RULE = "|---|---|---|---|---|---|"
Rate = Callable[[float], float]
"""Rows per second, measured for so many seconds."""


class Case(NamedTuple):
    """What is stepped, and which network acts."""

    name: str
    env: EnvSection
    num_envs: int
    model: str = "mlp"
    needs: str = "gymnasium"


SLEEP = EnvSection(id="impala_async.envs.probes:Slow", kwargs={"step_s": 0.001, "length": 100})
CASES = (
    Case("CartPole, 8", EnvSection(id="CartPole-v1"), 8),
    Case("CartPole, 64", EnvSection(id="CartPole-v1"), 64),
    Case("sleeps 1 ms, 8", SLEEP, 8),
    Case("computes 1 ms, 8", EnvSection(id="bench.burning:Burning"), 8),
    Case("Pong, 8", EnvSection(id="ALE/Pong-v5"), 8, "nature_cnn", needs="ale_py"),
)


def main() -> int:
    """Measure what was asked for, as a table and, if wanted, as JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.samplers", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there")
    parser.add_argument("--only", metavar="TEXT", default="", help="cases whose name holds this")
    parser.add_argument("--rounds", type=int, default=7, metavar="N")
    parser.add_argument("--slice-s", type=float, default=0.5, metavar="S")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(HEAD, RULE, sep="\n", flush=True)
    found: list[dict[str, Any]] = []
    for case in CASES:
        if args.only.lower() not in case.name.lower():
            continue
        if importlib.util.find_spec(case.needs) is None:
            print(f"skipped: {case.name}: {case.needs} is not installed", file=sys.stderr)
            continue
        for row in compare(case, args.rounds, args.slice_s):
            print(line(row), flush=True)
            found.append(row)
    if args.json:
        machine = {"cores": count_cores(), "load": os.getloadavg()[0], "cpu": platform.machine()}
        args.json.write_text(json.dumps({"machine": machine, "rows": found}, indent=1) + "\n")
    return 0


def compare(case: Case, num_rounds: int, slice_s: float) -> list[dict[str, Any]]:
    """Of each sampler that fits: its ratios to the bare environments, and its rates."""
    with ExitStack() as stack:
        bare = bare_rate(case, stack)
        rates: dict[SamplerName, Rate] = {}
        for name in SAMPLERS:
            try:
                rates[name] = sampler_rate(case, name, stack)
            except EnvError as error:
                print(f"skipped: {case.name}, {name}: {error}", file=sys.stderr)
        for warm_up in (bare, *rates.values()):
            warm_up(slice_s / 5)
        pairs: dict[SamplerName, list[tuple[float, float]]] = {name: [] for name in rates}
        for _ in range(num_rounds):
            for name, rate in rates.items():
                pairs[name].append((bare(slice_s), rate(slice_s)))
    return [
        {
            "case": case.name,
            "sampler": sampler,
            "ratios": [ours / theirs for theirs, ours in found],
            "rows_per_s": [ours for _, ours in found],
            "bare_rows_per_s": [theirs for theirs, _ in found],
        }
        for sampler, found in pairs.items()
    ]


def line(row: dict[str, Any]) -> str:
    ratios = row["ratios"]
    numbers = (min(ratios), median(ratios), max(ratios))
    shown = " | ".join(f"{number:.2f}" for number in numbers)
    return f"| {row['case']} | {row['sampler']} | {shown} | {median(row['rows_per_s']):,.0f} |"


def bare_rate(case: Case, stack: ExitStack) -> Rate:
    """Environments in turn; the row after an end resets, as it does in a batch."""
    envs = [make_env(case.env) for _ in range(case.num_envs)]
    for seed, env in enumerate(envs):
        stack.callback(env.close)
        env.reset(seed=seed)
    actions = [envs[0].action_space.sample() for _ in range(1000)]
    is_over = [False] * len(envs)

    def rate(slice_s: float) -> float:
        begun, num_steps = time.perf_counter(), 0
        while (spent_s := time.perf_counter() - begun) < slice_s:
            action = actions[num_steps % len(actions)]
            for place, env in enumerate(envs):
                if is_over[place]:
                    env.reset()
                    is_over[place] = False
                else:
                    _, _, terminated, truncated, _ = env.step(action)
                    is_over[place] = terminated or truncated
            num_steps += 1
        return num_steps * len(envs) / spent_s

    return rate


def sampler_rate(case: Case, name: SamplerName, stack: ExitStack) -> Rate:
    """All that an actor does but for sending."""
    stage = set_stage(name, ActorSection(num_envs=case.num_envs), case.env, case.num_envs)
    schema = Schema(stage.obs_spec, stage.action_spec, ROWS)
    policy = Policy(schema, ModelSection(name=case.model), seed=0, device=stage.device)
    scrap = Scrap(schema)
    rng = torch.Generator(stage.device)
    sampler = stage.build_sampler(schema, policy, rng, buffers=scrap, newest=lambda: None, seed=0)
    stack.callback(sampler.close)
    num_rows = stage.num_columns / len(stage.groups)

    def rate(slice_s: float) -> float:
        begun, num_steps = time.perf_counter(), 0
        while (spent_s := time.perf_counter() - begun) < slice_s:
            for finished in sampler.step():
                scrap.give_back(finished.buffer)
            num_steps += 1
        return num_steps * num_rows / spent_s

    return rate


if __name__ == "__main__":
    sys.exit(main())
