"""Evaluates the weights that a learner hands over, one after the other, while that trains on.

    python -m impala_async.evaluation.evaluator RUN WEIGHTS ANSWERS

RUN is the run folder, the others are files without a name that it inherits. Each line on stdin is
the size of what lies in WEIGHTS by then, and is answered by a line in ANSWERS: seconds, and the
mean return of each kind of actions. All that the environment prints goes to the log.
"""

import json
import mmap
import os
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import TextIO

from impala_async import processes
from impala_async.config.run import RunConfig
from impala_async.envs.faults import Watch, closed_after, tell_stderr
from impala_async.errors import Exit, ImpalaAsyncError, plain
from impala_async.evaluation.play import build_players, columns_for, play
from impala_async.evaluation.results import mean_return, trained_of
from impala_async.policy import AnyPolicy
from impala_async.runs.folder import RunFolder

# Where all cores are busy it gets about a tenth of what a learner or an actor does.
NICENESS = 10


def main() -> int:
    processes.begin()
    os.nice(NICENESS)
    processes.hold()
    run, *numbers = sys.argv[1:]
    weights, answers = fds = [int(text) for text in numbers]
    for fd in fds:
        os.set_inheritable(fd, False)
    # An environment may read from stdin too, and finds nothing there.
    requests = open(os.dup(0), closefd=False)  # noqa: SIM115
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    try:
        with processes.quit_at_once():
            return _serve(RunFolder(Path(run)).load_config(), requests, weights, answers)
    except ImpalaAsyncError as error:
        tell_stderr("\n".join(f"error: {plain(line)}" for line in str(error).splitlines()))
        return error.exit_code
    except processes.Interrupted:
        return Exit.DONE


def _serve(config: RunConfig, requests: TextIO, weights: int, answers: int) -> int:
    num_envs, per_column = columns_for(config.evaluate.episodes)
    with closing(Watch(tell_stderr).start()) as watch:
        watch.limit(config.env.step_timeout_s)
        envs, policy = build_players(config, num_envs)
        # From here on there is something to close.
        processes.answer_requests(processes.without_echo(processes.interrupt))
        with closed_after(envs):
            for line in requests:
                _load(policy, weights, int(line))
                began_at, answer = time.monotonic(), dict[str, float | None]()
                for kind in config.evaluate.kinds:
                    num_agents, is_sampled = envs.num_envs // num_envs, kind == "sampled"
                    played = play(policy, envs, per_column, num_agents, is_sampled=is_sampled)
                    answer[kind] = mean_return(trained_of(played, config.policies))
                answer["took_s"] = time.monotonic() - began_at
                os.write(answers, f"{json.dumps(answer)}\n".encode())
    return Exit.DONE


def _load(policy: AnyPolicy, weights: int, size: int) -> None:
    from safetensors.torch import load

    with mmap.mmap(weights, size) as memory:
        policy.load_tensors(load(memory[:]))


if __name__ == "__main__":
    processes.leave(main())
