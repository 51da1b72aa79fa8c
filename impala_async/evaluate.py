"""The evaluate door: greedy episodes with the weights of a checkpoint.

`python -m impala_async.evaluate runs/CartPole-v1-...` takes the newest checkpoint of a run
folder, or of its `checkpoints`; a checkpoint's own folder works as well.
"""

import argparse
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from impala_async.doors import new_parser, run_door, start_told_of
from impala_async.envs.faults import Watch, tell_stderr
from impala_async.errors import CheckpointError, ConfigError, EnvError
from impala_async.metrics.report import format_return
from impala_async.output import Wait
from impala_async.processes import REQUESTS, interrupt, leave

if TYPE_CHECKING:
    from impala_async.config.run import RunConfig
    from impala_async.envs.batch import EnvBatch
    from impala_async.policy import AnyPolicy
    from impala_async.runs.folder import RunFolder
    from impala_async.training.checkpoint import Checkpoint

NUM_ENVS = 8
MAX_STEPS = 100_000


Played = tuple[int, float]
"""One episode: the number of the policy that played it, and its return."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the return of every episode, and their mean."""
    parser = new_parser("evaluate", "Play greedy episodes with a trained policy.")
    parser.add_argument("path", type=Path, help="a run folder, or one checkpoint in it")
    parser.add_argument(
        "--episodes",
        type=int,
        default=10,
        metavar="N",
        help="how many count, of all agents together: of each the same number; default: 10",
    )
    parser.add_argument(
        "--max-steps",
        type=int,
        default=MAX_STEPS,
        metavar="N",
        help=f"give up when an environment has taken so many steps (default: {MAX_STEPS})",
    )
    parser.add_argument("--seed", type=int, default=10_000, metavar="N", help="default: 10000")
    args = parser.parse_args(argv)
    return run_door(lambda: _evaluate(args))


def _evaluate(args: argparse.Namespace) -> int:
    for flag, least in (("episodes", 1), ("seed", 0), ("max_steps", 1)):
        if (value := getattr(args, flag)) < least:
            name = flag.replace("_", "-")
            raise ConfigError(f"--{name}: wants a whole number from {least} up, got {value}")
    folder, path = _locate(args.path)
    config = folder.load_config()
    is_one = path != folder.checkpoints
    watch = Watch(tell_stderr).start()
    try:
        played = _play(config, path, args, is_one=is_one)
    finally:
        watch.close()
    for number, name in enumerate(config.policies.names or [""]):
        returns = [total for policy, total in played if policy == number]
        if returns:
            _tell(f"{name}: " if name else "", returns)
    return 0


def _tell(who: str, returns: list[float]) -> None:
    mean = sum(returns) / len(returns)
    print(f"{who}mean return of {len(returns)} greedy episodes: {format_return(mean)}")
    least, most = format_return(min(returns)), format_return(max(returns))
    print(f"{who}smallest {least}, largest {most}")


def _locate(path: Path) -> "tuple[RunFolder, Path]":
    """The run, and its checkpoints or one of them."""
    from impala_async.runs.folder import RunFolder

    if not path.exists():
        raise CheckpointError(f"{path}: there is no such folder")
    whole = path.resolve()
    for run_path in (whole, whole.parent, whole.parent.parent):
        folder = RunFolder(run_path)
        if folder.exists() and whole in (run_path, folder.checkpoints):
            return folder, folder.checkpoints
        if folder.exists() and whole.parent == folder.checkpoints:
            return folder, whole
    raise CheckpointError(
        f"{path}: wants the folder of a run, its checkpoints, or one of them "
        "(RUN/checkpoints/ckpt-EPOCH-UPDATE)"
    )


def _play(
    config: "RunConfig", path: Path, args: argparse.Namespace, *, is_one: bool
) -> list[Played]:
    with start_told_of("torch and the checkpoint are loaded", tell_stderr):
        from impala_async.training.checkpoint import newest_checkpoint, open_checkpoint

        checkpoint = open_checkpoint(path) if is_one else newest_checkpoint(path)
    if checkpoint is None:
        raise CheckpointError(f"{path} holds no whole checkpoint yet")
    # From here on there is something to close.
    for number in REQUESTS:
        signal.signal(number, interrupt)
    num_envs = min(NUM_ENVS, args.episodes)
    envs, policy = build_players(config, num_envs)
    num_agents = envs.num_envs // num_envs
    per_agent = -(-args.episodes // num_agents)
    try:
        _load(policy, checkpoint)
        shares = f": {per_agent} episodes of each of {num_agents} agents" if num_agents > 1 else ""
        print(f"{config.env.id} with {checkpoint.path.name}{shares}")
        return _play_greedily(policy, envs, per_agent, args.seed, args.max_steps, num_agents)
    finally:
        envs.close()


def build_players(config: "RunConfig", num_envs: int) -> "tuple[EnvBatch, AnyPolicy]":
    """Environments of a run, and what is to play in them, with the weights of its start.

    It plays in this process, with as many torch threads as an actor has.
    """
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


def _load(policy: "AnyPolicy", checkpoint: "Checkpoint") -> None:
    from impala_async.user_code import one_line

    try:
        policy.load_tensors(checkpoint.tensors["model"])
    except (KeyError, RuntimeError) as error:
        raise CheckpointError(
            f"{checkpoint.path} does not fit this model and environment; did the environment "
            f"change since? {one_line(error)}"
        ) from None


def _play_greedily(
    policy: "AnyPolicy",
    envs: "EnvBatch",
    per_agent: int,
    seed: int,
    max_steps: int = MAX_STEPS,
    num_agents: int = 1,
    clock: Callable[[], float] = time.monotonic,
) -> list[Played]:
    """Each environment plays the same number of episodes, so short ones are not favoured."""
    import numpy as np

    from impala_async.envs.describe import check_numbers
    from impala_async.schema import POLICY

    per_env = -(-per_agent * num_agents // envs.num_envs)
    played: list[list[Played]] = [[] for _ in range(envs.num_envs)]
    one_policy = np.zeros(envs.num_envs, np.uint8)
    totals = np.zeros(envs.num_envs)
    is_reset_row = np.zeros(envs.num_envs, np.bool_)
    obs, state = envs.reset(seed), policy.first_state(envs.num_envs)
    check_numbers(envs, obs)
    counted = partial(_counted, played, per_env, per_agent, num_agents)
    num_steps, wait = 0, Wait(tell_stderr, clock=clock)
    while min(map(len, played)) < per_env:
        num_steps += 1
        wait.look(lambda s: _so_far(counted(), per_agent * num_agents, s))
        if num_steps > max_steps:
            raise EnvError(
                f"{envs.name}: {len(counted())} of {per_agent * num_agents} episodes ended within "
                f"{max_steps} steps; allow more with --max-steps, or give it a time limit"
            )
        actions, _, state = policy.act(obs, state)
        step = envs.step(actions)
        check_numbers(envs, step.obs, step.rewards)
        obs = step.obs
        totals += np.where(is_reset_row, 0.0, step.rewards)
        is_over = (step.terminated | step.truncated) & ~is_reset_row
        players = obs[POLICY] if len(policy.members) > 1 else one_policy
        for env in np.flatnonzero(is_over).tolist():
            played[env].append((int(players[env]), float(totals[env])))
            totals[env] = 0.0
        is_first = is_reset_row if step.final_obs is None else is_over
        if step.idle is not None:
            is_first = is_first | step.idle
        for part in state.values():
            part[is_first] = 0.0
        is_reset_row = is_over if step.final_obs is None else np.zeros_like(is_over)
    return counted()


def _so_far(played: list[Played], num_wanted: int, seconds: float) -> str:
    mean = sum(total for _, total in played) / len(played) if played else None
    return (
        f"playing: {len(played)} of {num_wanted} episodes after {seconds:.0f} s, "
        f"mean return {format_return(mean)}"
    )


def _counted(
    played: list[list[Played]], per_env: int, per_agent: int, num_agents: int
) -> list[Played]:
    """As many episodes of each agent, and those that they played with each other."""
    counted = []
    for agent in range(num_agents):
        columns = played[agent::num_agents]
        counted += [episode for one in columns for episode in one[:per_env]][:per_agent]
    return counted


if __name__ == "__main__":
    leave(main())
