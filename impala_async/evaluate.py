"""The evaluate door: greedy episodes with the weights of a checkpoint, or of a run's newest."""

import argparse
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from impala_async.actor.stopping import Stopper
from impala_async.doors import new_parser, run_door, start_told_of
from impala_async.envs.faults import Watch, tell_stderr
from impala_async.errors import CheckpointError, ConfigError, EnvError
from impala_async.metrics.report import format_return
from impala_async.output import Wait
from impala_async.processes import answer_requests, interrupt, leave, without_echo
from impala_async.user_code import one_line

if TYPE_CHECKING:
    from impala_async.config.run import RunConfig
    from impala_async.envs.batch import EnvBatch
    from impala_async.policy import AnyPolicy

NUM_ENVS = 8
MAX_STEPS = 100_000
# Each with its default, the least it may be, and its use.
FLAGS = (
    ("episodes", 10, 1, "how many each agent plays, at least"),
    ("max-steps", MAX_STEPS, 1, "give up when an environment has taken so many steps"),
    ("seed", 10_000, 0, "of the environments"),
)

Played = tuple[int, float]
"""One episode: the number of the policy that played it, and its return."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = new_parser("evaluate", "Play greedy episodes with a trained policy.")
    parser.add_argument("path", type=Path, help="a run folder, or one checkpoint in it")
    for flag, default, _, text in FLAGS:
        told = f"{text}; default: {default}"
        parser.add_argument(f"--{flag}", type=int, default=default, metavar="N", help=told)
    args = parser.parse_args(argv)
    return run_door(lambda: _evaluate(args))


def _evaluate(args: argparse.Namespace) -> int:
    for flag, _, least, _ in FLAGS:
        if (value := getattr(args, flag.replace("-", "_"))) < least:
            raise ConfigError(f"--{flag}: wants a whole number from {least} up, got {value}")
    from impala_async.runs.folder import find_run

    folder, named = find_run(args.path)
    config = folder.load_config()
    # Foreign code may hear no handler of ours.
    with closing(Stopper(tell_stderr, lambda: "").start()), closing(Watch(tell_stderr).start()):
        played = _play(config, folder.checkpoints, named, args)
    for number, name in enumerate(config.policies.names or [""]):
        returns = [total for policy, total in played if policy == number]
        if returns:
            who, mean = f"{name}: " if name else "", sum(returns) / len(returns)
            print(f"{who}mean return of {len(returns)} greedy episodes: {format_return(mean)}")
            smallest, largest = format_return(min(returns)), format_return(max(returns))
            print(f"{who}smallest {smallest}, largest {largest}", flush=True)
    return 0


def _play(
    config: "RunConfig", checkpoints: Path, named: Path | None, args: argparse.Namespace
) -> list[Played]:
    with start_told_of("torch and the checkpoint are loaded", tell_stderr):
        from impala_async.training.checkpoint import open_newest_or

        checkpoint = open_newest_or(named, checkpoints)
    # From here on there is something to close.
    answer_requests(without_echo(interrupt))
    per_column = -(-args.episodes // NUM_ENVS)
    envs, policy = build_players(config, -(-args.episodes // per_column))
    with closing(envs):
        _keep_spaces(checkpoints.parent, envs)
        try:
            policy.load_tensors(checkpoint.tensors["model"])
        except (KeyError, RuntimeError) as error:
            raise CheckpointError(
                f"{checkpoint.path} does not fit this model and environment; did the environment "
                f"change since? {one_line(error)}"
            ) from None
        # A full disk is told before anything is played: what is printed is the result.
        print(f"{config.env.id} with {checkpoint.path.name}", flush=True)
        return _play_greedily(policy, envs, per_column, args.seed, args.max_steps)


def _keep_spaces(run: Path, envs: "EnvBatch") -> None:
    """`load_policy` wants them, and a run has none where its learner made no environment."""
    from impala_async.envs.saved_spaces import save_spaces
    from impala_async.runs.folder import SPACES, RunFolder

    folder = RunFolder(run)
    if not (folder.path / SPACES).exists():
        with suppress(OSError):  # it may be somebody else's
            folder.write_json(SPACES, save_spaces(envs.spaces))


def build_players(config: "RunConfig", num_envs: int) -> "tuple[EnvBatch, AnyPolicy]":
    """Environments of a run and a new policy, which plays with the torch threads of an actor."""
    import torch

    from impala_async.envs.make import build_envs
    from impala_async.policy import build_policy, check_default_dtype
    from impala_async.schema import Schema, recurrent_state

    torch.set_num_threads(config.actor.threads)
    policies, rows = config.policies, config.trajectory.rows
    envs = build_envs(config.actor.sampler, config.env, num_envs, policies)
    check_default_dtype(config.env.id)
    state = recurrent_state(config.model.core, config.model.core_size)
    schema = Schema(envs.obs_spec, envs.action_spec, rows, state, policies.names)
    return envs, build_policy(schema, config.model, policies, seed=config.seed)


def _play_greedily(
    policy: "AnyPolicy",
    envs: "EnvBatch",
    per_column: int,
    seed: int,
    max_steps: int = MAX_STEPS,
    clock: Callable[[], float] = time.monotonic,
) -> list[Played]:
    """Each column plays the same number of episodes, so short ones are not favoured."""
    import numpy as np

    from impala_async.envs.describe import check_numbers
    from impala_async.schema import POLICY

    num_wanted, played = per_column * envs.num_envs, list[Played]()

    def so_far(seconds: float) -> str:
        mean = format_return(sum(total for _, total in played) / len(played) if played else None)
        done = f"{len(played)} of {num_wanted} episodes after {seconds:.0f} s"
        return f"playing: {done}, mean return {mean}"

    totals, num_left = np.zeros(envs.num_envs), np.full(envs.num_envs, per_column)
    obs, state = envs.reset(seed), policy.first_state(envs.num_envs)
    check_numbers(envs, obs)
    num_steps, wait = 0, Wait(tell_stderr, clock=clock)
    while num_left.any():
        num_steps += 1
        wait.look(so_far)
        if num_steps > max_steps:
            raise EnvError(
                f"{envs.name}: {len(played)} of {num_wanted} episodes ended within {max_steps} "
                "steps; allow more with --max-steps, or give it a time limit"
            )
        actions, _, state = policy.act(obs, state)
        step = envs.step(actions)
        check_numbers(envs, step.obs, step.rewards)
        obs = step.obs
        totals += step.rewards
        for column in np.flatnonzero(step.ended & (num_left > 0)).tolist():
            player = int(obs[POLICY][column]) if len(policy.members) > 1 else 0
            played.append((player, float(totals[column])))
            num_left[column] -= 1
        totals[step.ended] = 0.0
        if (fresh := step.fresh) is not None:
            for part in state.values():
                part[fresh] = 0.0
    return played


if __name__ == "__main__":
    leave(main())
