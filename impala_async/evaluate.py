"""The evaluate door: episodes with the weights of a checkpoint, or of a run's newest."""

import argparse
import ctypes
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from impala_async.actor.stopping import Stopper
from impala_async.doors import new_parser, run_door, seeds_of, start_told_of, typed_path
from impala_async.envs.faults import (
    CLOSE_S,
    Watch,
    closed_after,
    end_without_close,
    tell_stderr,
)
from impala_async.errors import ConfigError, EnvError
from impala_async.evaluation import MAX_STEPS, SEED
from impala_async.processes import answer_requests, interrupt, leave, result_wanted, without_echo
from impala_async.user_code import one_line

if TYPE_CHECKING:
    from impala_async.config.run import RunConfig
    from impala_async.envs.batch import EnvBatch
    from impala_async.evaluation.play import Episode
    from impala_async.evaluation.results import Row
    from impala_async.policy import AnyPolicy
    from impala_async.runs.folder import RunFolder
    from impala_async.training.checkpoint import TrainingState

# Each with its default and its use.
FLAGS = (
    ("episodes", 10, "how many each agent plays of each seed, at least, if it is in all of them"),
    ("max-steps", MAX_STEPS, "give up when an environment takes more steps for each episode"),
)

ACTIONS = {"greedy": "choose the likeliest actions (default)", "sampled": "sample, as actors do"}


def main(argv: Sequence[str] | None = None) -> int:
    parser = new_parser("evaluate", "Play episodes with a trained policy.")
    parser.add_argument("path", type=Path, help="a run folder, or one checkpoint in it")
    for flag, default, text in FLAGS:
        told = f"{text}; default: {default}"
        parser.add_argument(f"--{flag}", type=int, default=default, metavar="N", help=told)
    told = f"of the environments: 0-4, or a list by commas; default: {SEED}"
    parser.add_argument("--seeds", type=seeds_of, default=[SEED], metavar="SEEDS", help=told)
    actions = parser.add_mutually_exclusive_group()
    for name, told in ACTIONS.items():
        how: dict[str, Any] = {"dest": "actions", "action": "store_const", "const": name}
        actions.add_argument(f"--{name}", **how, help=told)
    told = "one JSON object on stdout, with the return and the length of each episode"
    parser.add_argument("--json", action="store_true", help=told)
    told = "film an episode with the first seed: to a .gif, or an .mp4"
    parser.add_argument("--video", type=typed_path, metavar="FILE", help=told)
    parser.set_defaults(actions="greedy")
    args = parser.parse_args(argv)
    with result_wanted():
        return run_door(lambda: _evaluate(args))


def _evaluate(args: argparse.Namespace) -> int:
    from impala_async.runs.folder import find_run

    for flag, *_ in FLAGS:
        if (value := getattr(args, flag.replace("-", "_"))) < 1:
            raise ConfigError(f"--{flag}: wants a whole number from 1 up, got {value}")
    folder, checkpoints, named = find_run(args.path)
    config = folder.load_config()
    watch = Watch(tell_stderr)
    # Foreign code may hear no handler of ours.
    with closing(Stopper(tell_stderr, lambda: "").start()), closing(watch.start()):
        checkpoint = _open(checkpoints, named, args)
        with ExitStack() as opened:
            try:
                with _stdout_kept(is_apart=args.json) as out:
                    about, rows = _play(folder, config, checkpoint, args, opened, out)
                _print_result(about, rows, args)
            except BaseException as error:
                watch.limit(CLOSE_S, f"after this: {one_line(error)}")
                raise
            # A close that hangs, or ends this process, takes no result with it.
            watch.end = end_without_close
            watch.limit(CLOSE_S, "and is left so: there is a result")
            if args.json:
                _leave_stdout()
            opened.close()
    return 0


def _leave_stdout() -> None:
    """Nothing comes behind the object, whatever is printed until this process ends."""
    os.dup2(2, 1)
    sys.stdout = sys.stderr


def _print_result(about: dict[str, Any], rows: "list[Row]", args: argparse.Namespace) -> None:
    if args.json:
        print(json.dumps(about, indent=2), flush=True)
        return
    for row in rows:
        print(row.describe(args.actions), flush=True)
    if video := about["video"]:
        print(f"video: {video['file']} ({video['length']} steps)", flush=True)


@contextmanager
def _stdout_kept(*, is_apart: bool) -> Iterator[TextIO]:
    """A context after which stdout is as before, as environments replace it to be silent. If they
    are to leave it alone, what they, and libraries in C, print goes to stderr."""
    stream, kept, was = sys.stdout, os.dup(1), os.fstat(1)
    if is_apart:
        sys.stdout = sys.stderr
        os.dup2(2, 1)
    try:
        yield stream
    except BaseException:
        with suppress(EnvError):
            _give_back(stream, kept, was)
        raise
    _give_back(stream, kept, was)


def _give_back(stream: TextIO, kept: int, was: os.stat_result) -> None:
    """Make the file that `kept` is, of which `was` is known, stdout again."""
    with suppress(OSError, ValueError):
        stream.flush()
    ctypes.CDLL(None).fflush(None)  # what is kept until the end would follow the result
    try:
        is_ours = os.path.samestat(os.fstat(kept), was)
    except OSError:
        is_ours = False
    if not is_ours:
        raise EnvError("stdout is lost: the environment closed what is not its own")
    os.dup2(kept, 1)
    os.close(kept)
    sys.stdout = os.fdopen(1, "w", closefd=False) if stream.closed else stream


def _open(checkpoints: Path, named: Path | None, args: argparse.Namespace) -> "TrainingState":
    with start_told_of("torch and the checkpoint are loaded", tell_stderr):
        from impala_async.evaluation.video import check_film
        from impala_async.training.checkpoint import open_newest_or

        if args.video is not None:
            check_film(args.video)
            args.video = args.video.absolute()  # an environment may change the current folder
        return open_newest_or(named, checkpoints)


def _play(
    folder: "RunFolder",
    config: "RunConfig",
    checkpoint: "TrainingState",
    args: argparse.Namespace,
    opened: ExitStack,
    out: TextIO,
) -> "tuple[dict[str, Any], list[Row]]":
    """All that is known of the episodes, and the rows of the table. `opened` has to be closed."""
    from impala_async.evaluation.play import build_players, columns_for, play
    from impala_async.evaluation.results import as_json, rows_of

    # From here on there is something to close.
    answer_requests(without_echo(interrupt))
    num_envs, per_column = columns_for(args.episodes)
    how = {
        "is_sampled": args.actions == "sampled",
        "max_steps": args.max_steps,
        "advice": "give it a time limit, or allow more with --max-steps",
    }
    envs, policy = build_players(config, num_envs)
    opened.enter_context(closed_after(envs))
    played: list[Episode] = []
    _keep_spaces(folder, envs)
    checkpoint.load_into(policy)
    if not args.json:
        # A full disk is told before anything is played: what is printed is the result. Where a
        # film is one too, it is wanted though nobody reads.
        with suppress(BrokenPipeError) if args.video else nullcontext():
            if not out.closed:  # by the environment
                print(f"{config.env.id} with {checkpoint.path.name}", file=out, flush=True)
    video = None if args.video is None else _film(config, policy, args, how, opened)
    for seed in args.seeds:
        played += play(policy, envs, per_column, envs.num_envs // num_envs, seed=seed, **how)
    about: dict[str, Any] = {
        "env_id": config.env.id,
        "checkpoint": str(checkpoint.path),
        "env_steps_trained": checkpoint.state.get("env_steps_trained"),
        "updates": checkpoint.version.update,
        "actions": args.actions,
        "video": video,
        **as_json(played, config.policies),
    }
    return about, rows_of(played, config.policies)


def _keep_spaces(folder: "RunFolder", envs: "EnvBatch") -> None:
    """`load_policy` wants them, and a run has none where its learner made no environment."""
    from impala_async.envs.saved_spaces import save_spaces
    from impala_async.runs.folder import SPACES

    if not (folder.absolute / SPACES).exists():
        with suppress(ConfigError):  # it may be somebody else's
            folder.keep_spaces(save_spaces(envs.spaces))


def _film(
    config: "RunConfig",
    policy: "AnyPolicy",
    args: argparse.Namespace,
    how: dict[str, Any],
    opened: ExitStack,
) -> dict[str, Any]:
    """Play an episode in an environment that draws itself, with the first seed."""
    from impala_async.envs.make import build_drawn
    from impala_async.evaluation.play import play
    from impala_async.evaluation.results import mean_return
    from impala_async.evaluation.video import film, frames_of, frames_per_s

    envs, env = build_drawn(config.env, config.policies)
    draw = frames_of(env, config.env.id)
    opened.enter_context(closed_after(envs))
    with film(args.video, frames_per_s(env)) as filmed:
        seed = args.seeds[0]
        how = {**how, "look": lambda: filmed.add(draw())}
        played = play(policy, envs, 1, envs.num_envs, seed=seed, **how)
    # An agent of several may have ended before the film does.
    length = max(each.length for each in played)
    return {"file": str(args.video), "return": mean_return(played), "length": length}


if __name__ == "__main__":
    leave(main())
