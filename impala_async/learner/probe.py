"""Asks a short-lived child for the environment's spaces, so that the learner never imports it.

Runs on: main thread, before the event loop
"""

import json
import os
import subprocess
import sys

from impala_async.config.actor import ActorSection
from impala_async.config.env import EnvSection
from impala_async.config.model import ModelSection
from impala_async.config.policies import ONE_POLICY, PoliciesSection
from impala_async.envs.describe import read_answer
from impala_async.envs.faults import with_id
from impala_async.errors import EnvError, SpacesError, how_it_ended
from impala_async.processes import Lifeline, deaf_children
from impala_async.schema import Schema, recurrent_state

PROBE_TIMEOUT_S = 120.0
DESCRIBE = (sys.executable, "-m", "impala_async.envs.describe")


class SpaceProbe:
    """A child that makes the environment once and describes it; it works while torch loads."""

    def __init__(
        self,
        env: EnvSection,
        actor: ActorSection,
        model: ModelSection,
        policies: PoliciesSection = ONE_POLICY,
    ) -> None:
        self._env = env
        self._policies = policies
        self.num_columns = 1
        """One environment has one for each of its agents; `schema` finds out."""
        self._state = recurrent_state(model.core, model.core_size)
        # It is its own: a learner may have none, and ends without a word when it is killed.
        self._lifeline = Lifeline()
        asked = {
            "env": env.model_dump(mode="json"),
            "sampler": actor.sampler,
            "policies": policies.model_dump(mode="json"),
        }
        # No pipe: what the environment forks may hold that open for ever.
        self._answer = os.memfd_create("impala-async-spaces")
        with deaf_children():
            self._child = subprocess.Popen(
                DESCRIBE,
                stdin=subprocess.PIPE,
                stdout=self._answer,
                env={**os.environ, **self._lifeline.environment},
                pass_fds=self._lifeline.fds,
            )
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(asked).encode())
        self._child.stdin.close()
        self._child.stdin = None

    def schema(self, rows: int) -> Schema:
        """Wait for the description; raises EnvError with the child's one line."""
        try:
            self._child.wait(PROBE_TIMEOUT_S)
            # Two answers, where it forked and both processes went on, are read as well.
            answer = os.pread(self._answer, os.fstat(self._answer).st_size, 0)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
            raise EnvError(
                f"env.id: {self._env.id} was not made and tried within "
                f"{PROBE_TIMEOUT_S:.0f} s; where it stands is told above"
            ) from None
        finally:
            self._lifeline.close()
            os.close(self._answer)
        if not answer:
            raise EnvError(
                f"env.id: {self._env.id}: the process that made it "
                f"{how_it_ended(self._child.returncode)}; what it printed, if anything, is above"
            )
        try:
            obs, action, self.num_columns = read_answer(answer)
        except EnvError as error:
            raise with_id(error, self._env.id) from error.__cause__
        schema = Schema(obs, action, rows, self._state, self._policies.names)
        try:
            _ = schema.layout
        except SpacesError as error:
            raise EnvError(f"env.id: {self._env.id}: {error}") from None
        return schema
