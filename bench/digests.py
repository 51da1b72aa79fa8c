"""Whether a change of the code has changed what is learned: digests of short trainings in lockstep.

In lockstep a training depends on its settings and on the machine's arithmetic, not on the clock. So
a change that should leave learning as it is leaves every weight as it was, to the last bit:

    python -m bench.digests --write before.json
    ... the change ...
    python -m bench.digests --compare before.json

The exit code is 1 if a case differs. Digests hold for one machine, device and version of torch.
"""

import argparse
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from bench.door import run
from bench.machine import about_this_machine
from bench.one_run import one_run
from impala_async.files import write_whole

Outcome: TypeAlias = dict[str, Any]
"""A training's digests of its last checkpoint, and its numbers that cannot depend on the clock."""

LIMIT_S = 120.0
POLL_S = 0.1
ARITHMETIC = ("processor", "torch")
# The summary has the first of these, the last report the others.
COUNTED = ("exit_reason", "env_steps_trained", "updates", "episodes", "mean_return_100",
           "lag_quantiles")  # fmt: skip
LEARNED = ("loss/total", "loss/policy", "loss/value", "loss/entropy", "grad/norm", "policy/entropy",
           "policy/kl", "policy/clip_fraction", "algorithm/lr", "algorithm/entropy_cost",
           "algorithm/kl_coeff", "algorithm/return_scale", "lag/mean")  # fmt: skip

EVERYWHERE = (
    *("pace.mode=lockstep", "train.num_actors=2", "actor.num_envs=4", "actor.sampler=serial"),
    *("trajectory.rows=20", "stop.env_steps=4000"),
    *("algorithm.name=impala", "algorithm.lr=5e-4", "algorithm.lr_end=none"),
    *("algorithm.grad_clip=40.0", "algorithm.normalize_returns=false", "model.normalize_obs=false"),
    *("algorithm.num_minibatches=1", "learner.num_passes=1"),
)
POLE = ("env.id=CartPole-v1",)
HIDDEN = ("env.id=bench.learning.envs:no_velocities", "model.core_size=32")
PENDULUM = ("env.id=Pendulum-v1", "algorithm.reward_scale=0.1", "algorithm.entropy_cost=0.01")
PPO = (
    *("algorithm.name=ppo", "algorithm.returns=gae", "algorithm.num_minibatches=4"),
    "learner.num_passes=3",
)
PLAIN_APPO = (
    *("algorithm.name=appo", "algorithm.lambda=1", "algorithm.normalize_advantages=false"),
    "algorithm.target_update_every_updates=4",
)
APPO = (*PLAIN_APPO, "algorithm.num_minibatches=2", "learner.num_passes=2")
SCHEDULE = (
    "algorithm.lr_end=0",
    "algorithm.entropy_cost_end=0",
    "algorithm.schedule_env_steps=5000",
)
PAPER = (
    *(
        "algorithm.optimizer=rmsprop_tf",
        "algorithm.optimizer_options.momentum=0.5",
        "algorithm.reduction=sum",
    ),
    *("algorithm.reward_clip=unit", *SCHEDULE),
)
# Each of two agents is a column.
GAMES = ("env.id=examples.tictactoe:TicTacToe", "algorithm.gamma=0.8", "learner.batch_columns=16")
COPIED = (
    *('policies.names=["main", "past"]', 'policies.copies={past = "main"}'),
    "policies.copy_every_updates=5",
)
SMALL_IMAGES = ("env.id=bench.digest_envs:stacked_catch",)
LARGE_IMAGES = (*SMALL_IMAGES, "env.kwargs.scale=4", "env.frame_stack=on")

CASES: dict[str, tuple[str, ...]] = {
    "impala": POLE,
    "impala, lag 1": (*POLE, "pace.lag=1"),
    "impala, env workers": (*POLE, "actor.sampler=parallel", "actor.num_workers=2"),
    "impala, gymnasium's vector": (*POLE, "actor.sampler=vector"),
    # There every column is a message of its own, and lockstep wants one of each actor.
    "impala, reset within the step": ("env.id=bench.digest_envs:same_step_poles", "pace.lag=1",
                                      "actor.sampler=vector", "actor.num_envs=1",
                                      "stop.env_steps=2000"),
    "impala, rmsprop_tf and the paper's sums": (*POLE, *PAPER),
    "impala, adamw": (*POLE, "algorithm.optimizer=adamw",
                      "algorithm.optimizer_options.weight_decay=0.1"),
    "impala, lstm": (*HIDDEN, "model.core=lstm", "env.last_action=true", "env.last_reward=true"),
    "impala, two keys": ("env.id=bench.learning.envs:split_pole", "learner.num_passes=2"),
    "impala, several actions and masks": ("env.id=bench.digest_envs:TwoDeals",),
    "impala, squashed actions": (*PENDULUM, "env.squash_actions=true",
                                 "model.state_dependent_std=true"),
    "impala, small images": (*SMALL_IMAGES, "model.name=small_cnn"),
    "impala, large images, frames sent once": (*LARGE_IMAGES, "model.name=nature_cnn",
                                               "model.hidden_sizes=[64]", "stop.env_steps=2000"),
    "impala, resnet": (*SMALL_IMAGES, "model.name=impala_resnet", "stop.env_steps=2000"),
    "impala, two policies, one a copy": (*GAMES, *COPIED),
    "appo": (*POLE, *PLAIN_APPO),
    "appo, kl, lag 1": (*POLE, *APPO, "algorithm.kl_coeff=0.5", "algorithm.tau=0.5", "pace.lag=1"),
    "appo, continuous actions, normalised": (*PENDULUM, *APPO, "model.normalize_obs=true",
                                             "algorithm.normalize_returns=true"),
    "ppo": (*POLE, *PPO),
    "ppo, vtrace, lag 1": (*POLE, *PPO, "algorithm.returns=vtrace", "algorithm.lambda=1",
                           "pace.lag=1"),
    "ppo, gru": (*HIDDEN, *PPO, "model.core=gru"),
    "ppo, two policies": (*GAMES, *PPO, 'policies.names=["left", "right"]'),
    "a2c": (*POLE, "algorithm.name=a2c"),
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Train what is asked for; 1 if a training fails, or differs from what was recorded."""
    args = asked_for(argv)
    content: dict[str, Any] = {"machine": about_this_machine(), "cases": {}}
    recorded = json.loads(args.compare.read_text()) if args.compare else None
    if recorded is not None:
        tell_other_arithmetic(content["machine"], recorded["machine"])
    num_wrong = 0
    for name in args.names:
        begun = time.monotonic()
        outcome, wrong = attempt([*CASES[name], f"learner.device={args.device}"])
        if outcome:
            content["cases"][name] = outcome
            if recorded is not None:
                wrong = differences(outcome, recorded["cases"].get(name))
        num_wrong += bool(wrong)
        tell(name, outcome, wrong, time.monotonic() - begun, is_compared=recorded is not None)
        if args.write:
            write_whole(args.write, f"{json.dumps(content, indent=2)}\n".encode())
    print(f"something is wrong with {num_wrong} of {len(args.names)} trainings")
    return 1 if num_wrong else 0


def asked_for(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags, and `names`, the cases that they mean."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.digests",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--write", type=Path, metavar="FILE", help="record the outcomes there")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="with those recorded there")
    parser.add_argument("--device", default="cpu", help="the learner's (cpu)")
    parser.add_argument("--only", metavar="WORD", default="", help="cases whose name holds it")
    args = parser.parse_args(argv)
    args.names = [name for name in CASES if args.only in name]
    if not args.names:
        parser.error(f"--only: no case has {args.only!r} in its name")
    return args


def attempt(settings: Sequence[str]) -> tuple[Outcome, list[str]]:
    """The outcome of a training; if it fails, none, and why."""
    try:
        return train(settings), []
    except RuntimeError as error:
        return {}, [f"failed: {error}"]


def train(settings: Sequence[str]) -> Outcome:
    """RuntimeError, if it does not end well and in time."""
    with one_run(None, [*EVERYWHERE, *settings]) as training:
        for _ in training.moments(POLL_S, LIMIT_S):
            pass
        checkpoints = (training.run_dir / "checkpoints").glob("ckpt-*")
        last = max(checkpoints, key=lambda path: int(path.name.rpartition("-")[2]))
        summary, report = training.summary(), training.reports()[-1]
        return {
            **{path.name: _digest(path) for path in sorted(last.glob("*.safetensors"))},
            **{name: summary[name] for name in COUNTED},
            **{name: report[name] for name in LEARNED},
        }


def differences(outcome: Outcome, recorded: Outcome | None) -> list[str]:
    """Name what is not as it was recorded, one line each."""
    if recorded is None:
        return ["was not recorded"]
    return [
        f"{name}: {outcome.get(name)}, was {recorded.get(name)}"
        for name in {**recorded, **outcome}
        if outcome.get(name) != recorded.get(name)
    ]


def tell_other_arithmetic(machine: Mapping[str, Any], recorded: Mapping[str, Any]) -> None:
    """Why all cases may differ though the code is the same."""
    for key in ARITHMETIC:
        if machine[key] != recorded[key]:
            print(f"recorded with another {key}: {recorded[key]}, here it is {machine[key]}")


def tell(
    name: str, outcome: Outcome, wrong: Sequence[str], spent_s: float, *, is_compared: bool
) -> None:
    """A line for the case, and one for each thing that is wrong with it."""
    digest = outcome.get("model.safetensors", "")[:12]
    verdict = "same" if is_compared and not wrong else ""
    print(f"{name:42} {digest:12} {spent_s:5.1f} s {verdict}".rstrip(), flush=True)
    for line in wrong:
        print(f"    {line}", flush=True)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    run(main)
