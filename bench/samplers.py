"""Each sampler, with a policy that acts, against bare environments that are stepped in turn.

The claim: `actor.sampler` makes of an environment what the machine has to give. In each round the
bare environments are stepped before every sampler, and a ratio is that of two neighbours in time:
rows per second with the sampler, over rows per second without policy, trajectories or workers.
"""

import importlib.util
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import NamedTuple

import torch

from bench.door import run
from bench.paired import Figure, figure, new_parser, publish
from impala_async.actor.sampler import sampler_for
from impala_async.actor.setup import make_setup
from impala_async.actor.unroll import MessageBuffer
from impala_async.config.actor import ActorSection, SamplerName
from impala_async.config.env import EnvSection
from impala_async.config.model import ModelSection
from impala_async.envs.make import make_env
from impala_async.errors import EnvError
from impala_async.models.torso import pick_precision
from impala_async.policy import Policy
from impala_async.schema import Schema

SAMPLERS: tuple[SamplerName, ...] = ("serial", "vector", "parallel")
ROWS = 20
Rate = Callable[[float], float]
"""Rows per second, measured for so many seconds."""


class Case(NamedTuple):
    """An environment that is stepped, and the network that acts."""

    name: str
    env: EnvSection
    num_envs: int
    model: str = "mlp"
    needs: str = "gymnasium"
    num_workers: int | None = None
    """In `parallel`; as many as cores where it is not said."""


SLEEP = EnvSection(id="bench.probes:Slow", kwargs={"step_s": 0.001, "length": 100})
RESETS = EnvSection(id="bench.probes:SlowReset")
SPARED = RESETS.model_copy(update={"num_spares": 1})
CASES = (
    Case("CartPole, 8", EnvSection(id="CartPole-v1"), 8),
    Case("CartPole, 64", EnvSection(id="CartPole-v1"), 64),
    Case("sleeps 1 ms, 8", SLEEP, 8),
    Case("sleeps 1 ms, resets 20 ms, 8", RESETS, 8, num_workers=8),
    Case("sleeps 1 ms, resets 20 ms, 8 with a spare each", SPARED, 8, num_workers=8),
    Case("computes 1 ms, 8", EnvSection(id="bench.probes:Burning"), 8),
    Case("Pong, 8", EnvSection(id="ALE/Pong-v5"), 8, "nature_cnn", needs="ale_py"),
)


NOTES = """
Rows per second of a sampler with a policy that acts and trajectories that are written, over those
of bare environments stepped in turn, slice by slice. All workers share this machine's cores.
"""


def main() -> int:
    """Measure what was asked for."""
    parser = new_parser("Samplers", __doc__, rounds=7)
    parser.add_argument("--slice-s", type=float, default=0.5, metavar="S", help="of a turn (0.5)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    figures: list[Figure] = []
    for case in CASES:
        if args.only.lower() not in case.name.lower():
            continue
        if importlib.util.find_spec(case.needs) is None:
            print(f"skipped: {case.name}: {case.needs} is not installed", file=sys.stderr)
            continue
        figures += compare(case, args.rounds, args.slice_s)
    return publish("Samplers", figures, notes=NOTES, is_json=args.json, folder=args.write)


def compare(case: Case, num_rounds: int, slice_s: float) -> list[Figure]:
    """The ratio of each sampler that fits to the bare environments, measured right before it."""
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
        ratios: dict[SamplerName, list[float]] = {name: [] for name in rates}
        for number in range(num_rounds):
            print(f"{case.name}: round {number + 1} of {num_rounds}", file=sys.stderr)
            for name, rate in rates.items():
                before = bare(slice_s)
                ratios[name].append(rate(slice_s) / before)
    return [figure(f"{case.name}: {name} over bare", values) for name, values in ratios.items()]


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
    num_workers = case.num_workers if name == "parallel" else None
    actor = ActorSection(num_envs=case.num_envs, sampler=name, num_workers=num_workers)
    setup = make_setup(actor, case.env, case.num_envs)
    envs, width = setup.envs, setup.columns_per_message
    schema = Schema(envs.obs_spec, envs.action_spec, ROWS)
    policy = Policy(schema, ModelSection(name=case.model), seed=0, device=setup.device)
    policy.act_in(pick_precision("auto", case.model, policy.device))
    free: list[MessageBuffer] = []
    sampler = sampler_for(envs)(
        schema,
        envs,
        policy,
        policy.new_generator(),
        take_buffer=lambda: free.pop() if free else MessageBuffer(schema, width),
        newest=lambda: None,
        seed=0,
    )
    stack.callback(envs.close)

    def rate(slice_s: float) -> float:
        begun, num_steps = time.perf_counter(), 0
        while (spent_s := time.perf_counter() - begun) < slice_s:
            free.extend(finished.buffer for finished in sampler.step())
            num_steps += 1
        return num_steps * envs.num_envs / spent_s

    return rate


if __name__ == "__main__":
    run(main)
