"""Asks a short-lived child for the environment's spaces, so that the learner never imports it.

Runs on: main thread, before the event loop
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable

from impala_async.config.actor import ActorSection
from impala_async.config.env import EnvSection
from impala_async.config.model import ModelSection
from impala_async.config.policies import PoliciesSection
from impala_async.envs.describe import read_answer
from impala_async.envs.faults import with_id
from impala_async.errors import EnvError, SpacesError, how_it_ended
from impala_async.processes import Lifeline
from impala_async.schema import Schema, recurrent_state

PROBE_TIMEOUT_S = 120.0
DESCRIBE = (sys.executable, "-m", "impala_async.envs.describe")


def begin_probe(
    env: EnvSection, actor: ActorSection, model: ModelSection, policies: PoliciesSection, rows: int
) -> Callable[[], tuple[Schema, int]]:
    """Start a child that makes the environment once and describes it: it works while torch loads.

    The result waits for it: the schema, and how many columns one environment has, one for each of
    its agents. It raises EnvError with the child's one line.
    """
    # It is its own: a learner may have none, and ends without a word when it is killed.
    lifeline = Lifeline()
    asked = {
        "env": env.model_dump(mode="json"),
        "sampler": actor.sampler,
        "policies": policies.model_dump(mode="json"),
    }
    # No pipe: what the environment forks may hold that open for ever.
    answer_fd = os.memfd_create("impala-async-spaces")
    child = lifeline.start(DESCRIBE, stdin=subprocess.PIPE, stdout=answer_fd)
    assert child.stdin is not None
    child.stdin.write(json.dumps(asked).encode())
    child.stdin.close()

    def wait() -> tuple[Schema, int]:
        try:
            child.wait(PROBE_TIMEOUT_S)
            # Two answers, where it forked and both processes went on, are read as well.
            answer = os.pread(answer_fd, os.fstat(answer_fd).st_size, 0)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            text = f"was not made and tried within {PROBE_TIMEOUT_S:.0f} s; where it stands is told"
            raise EnvError(f"env.id: {env.id} {text} above") from None
        finally:
            lifeline.close()
            os.close(answer_fd)
        if not answer:
            raise EnvError(
                f"env.id: {env.id}: the process that made it {how_it_ended(child.returncode)}; "
                "what it printed, if anything, is above"
            )
        try:
            obs, action, num_columns = read_answer(answer)
            state = recurrent_state(model.core, model.core_size)
            schema = Schema(obs, action, rows, state, policies.names)
            _ = schema.layout
        except EnvError as error:
            raise with_id(error, env.id) from error.__cause__
        except SpacesError as error:
            raise EnvError(f"env.id: {env.id}: {error}") from None
        return schema, num_columns

    return wait
