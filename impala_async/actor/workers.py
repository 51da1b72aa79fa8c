"""The actor's side of env workers: each a process with two pipes, together a batch of environments.

A worker that dies, or whose environment fails, is an EnvError: no other environment could go on
with its trajectories. One that hangs is waited for, while `look_up` is called again and again.

Runs on: sampler thread
"""

import json
import logging
import math
import operator
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import reduce
from itertools import accumulate
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from impala_async.actor import env_worker
from impala_async.config.env import EnvSection
from impala_async.config.policies import ONE_POLICY, PoliciesSection
from impala_async.envs.batch import Actions, Obs, Step
from impala_async.envs.describe import read_answer
from impala_async.envs.faults import RUNNING, TOO_LONG, WHERES, Blame
from impala_async.errors import EnvError, EnvHangsError, how_it_ended
from impala_async.processes import Lifeline
from impala_async.schema import ActionSpec, ObsSpec

logger = logging.getLogger(__name__)

POLL_MS = 50
# More than that between two looks is not the worker's time.
LOOK_S = 1.0
# A worker gets so long to finish its step and to close its environments, each of which may be a
# simulator that ends in a second. `train` waits for an actor for longer.
CLOSE_S = 5.0
DEATH_S = 1.0
STACKS_S = 0.5
PROGRAM = (sys.executable, "-m", "impala_async.actor.env_worker")

LookUp = Callable[[], None]


class Worker:
    """One process, which answers each command once; all of this may raise EnvError."""

    def __init__(self, order: dict[str, Any], memory: int, look_up: LookUp) -> None:
        self._env_id = order["env"]["id"]
        self._timeout_s = order["env"]["step_timeout_s"] or math.inf
        self._num_envs, self._first_env = order["num_envs"], order["first_env"]
        self._look_up = look_up
        self.place = RUNNING.place
        self._told: EnvError | None = None
        self._waiter = select.poll()
        # Where it cannot be started, descriptors may be what it lacks.
        with ExitStack() as ours, ExitStack() as its:
            self._lifeline = Lifeline()
            ours.callback(self._lifeline.close)
            theirs, self.commands = os.pipe()
            ours.callback(os.close, self.commands)
            its.callback(os.close, theirs)
            self._replies, replies = os.pipe()
            ours.callback(os.close, self._replies)
            its.callback(os.close, replies)
            self._waiter.register(self._replies, select.POLLIN)
            given = (theirs, replies, memory)
            command = [*PROGRAM, *map(str, given)]
            self.process = self._lifeline.start(command, given, stdin=subprocess.DEVNULL)
            ours.pop_all()
        self.tell(env_worker.as_line(order))

    def tell(self, message: bytes, where: str = "to be made") -> None:
        self._where = where
        try:
            env_worker.write(self.commands, message)
        except BrokenPipeError:
            raise self._death() from None

    def hear(self) -> int:
        if not self._waiter.poll(POLL_MS):
            self._wait()
        reply = os.read(self._replies, 1)
        if not reply:
            raise self._death()
        if reply[0] == env_worker.FAULT:
            raise self._fault()
        return reply[0]

    def hear_look(self) -> tuple[str, AutoresetMode, tuple[ObsSpec, ActionSpec, int]]:
        """The name and the autoreset mode of what it has made, its spaces and columns."""
        self.hear()
        try:
            look = env_worker.read_json(self._replies)
        except EOFError:
            raise self._death() from None
        spaces = read_answer(json.dumps(look["spaces"]).encode())
        return look["name"], AutoresetMode(look["autoreset"]), spaces

    def closes_until(self, deadline: float) -> bool:
        """Wait for its end; whether it has closed its environments at least, as an interpreter may
        take longer to end."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, deadline - time.monotonic()))
            return True
        return any(events == select.POLLHUP for _, events in self._waiter.poll(0))

    def end(self) -> EnvError | None:
        """Once its process ends: what its environments had to say to being closed."""
        self.process.wait()
        fault = self._last_words()
        os.close(self._replies)
        self._lifeline.close()
        return fault

    def __str__(self) -> str:
        first, last = self._first_env, self._first_env + self._num_envs - 1
        which = f"environment {last}" if first == last else f"environments {first} to {last}"
        return f"the env worker of {which} of {self._env_id}"

    def _wait(self) -> None:
        call = Blame(self._env_id, self._where, self._num_envs, is_here=False)
        call.first = self._first_env
        since = looked_at = time.monotonic()
        waited_s, seen = 0.0, None
        former, RUNNING.place = RUNNING.place, self.place
        RUNNING.call = (call, since)
        try:
            while True:
                self._look_up()
                if self._waiter.poll(POLL_MS):
                    return
                if self.process.poll() is not None and not self._waiter.poll(0):
                    # A process that its environment forked may hold the pipe open.
                    raise self._death()
                # A process that was stopped for a while has not hung meanwhile.
                now = time.monotonic()
                waited_s, looked_at = waited_s + min(now - looked_at, LOOK_S), now
                former_look, seen = seen, RUNNING.look(now)
                if seen is not former_look:
                    waited_s = 0.0  # its next environment has a time of its own
                if self._where in WHERES and waited_s > self._timeout_s:
                    self.process.send_signal(env_worker.TELL_STACKS)
                    # It writes to where our own log goes.
                    with suppress(subprocess.TimeoutExpired):
                        self.process.wait(STACKS_S)
                    raise EnvHangsError(f"{call.describe(waited_s)}, {TOO_LONG}")
        finally:
            RUNNING.call, RUNNING.place = None, former

    def _fault(self) -> EnvError:
        try:
            told = env_worker.read_json(self._replies)
        except EOFError:
            return EnvError(f"{self} was killed while it told of a fault", is_death=True)
        self._told = EnvError(told["error"])
        self._told.__cause__ = RuntimeError(f"in an env worker\n{told['traceback']}")
        return self._told

    def _death(self) -> EnvError:
        if self._told is not None:
            return self._told  # it has ended as it said, to somebody who asks again
        # Who ends this actor may have ended its workers in the same breath.
        self._look_up()
        try:
            code = self.process.wait(DEATH_S)
        except subprocess.TimeoutExpired:
            return EnvError(f"{self} has closed its pipes", is_death=True)
        printed = "" if code < 0 else "; what it printed, if anything, is above"
        text = f"{self} {how_it_ended(code)}{printed}"
        return self._last_words() or EnvError(text, is_death=True)

    def _last_words(self) -> EnvError | None:
        """Read what an ended process has said: steps that nobody waits for, then maybe a fault."""
        while self._waiter.poll(0) and (reply := os.read(self._replies, 1)):
            if reply[0] == env_worker.FAULT:
                return self._fault()
        return None


class WorkerEnvs:
    """Workers with about as many environments each.

    Columns have the seeds that they would have in one process, so a policy that chooses alike gets
    the same trajectories to the last bit.
    """

    def __init__(
        self,
        section: EnvSection,
        num_envs: int,
        num_workers: int,
        policies: PoliciesSection = ONE_POLICY,
        look_up: LookUp = lambda: None,
    ) -> None:
        """Start them; EnvError when one cannot make its environments."""
        self._workers: list[Worker] = []
        self.spaces = None  # only the workers know them
        memory = os.memfd_create("impala-async-columns")
        with ExitStack() as always, ExitStack() as on_failure:
            always.callback(os.close, memory)
            on_failure.callback(self._end)
            for number, share in enumerate(np.array_split(range(num_envs), num_workers)):
                order = {
                    "env": section.model_dump(mode="json"),
                    "policies": policies.model_dump(mode="json"),
                    "num_envs": len(share),
                    "first_env": int(share[0]),
                }
                look_up()
                try:
                    self._workers.append(Worker(order, memory, look_up))
                except OSError as error:  # too many files or processes, for now perhaps
                    why = f"env worker {number} of {num_workers} cannot be started"
                    raise EnvError(f"{why}: {error.strerror}", is_death=True) from None
            self._lay_out(memory)
            on_failure.pop_all()

    def reset(self, seed: int, first_env: int = 0) -> Obs:
        self._ask(env_worker.RESET + env_worker.as_line(seed), "in reset")
        return self._shared.obs

    def step(self, actions: Actions) -> Step:
        for name, array in self._shared.actions.items():
            np.copyto(array, actions[name])
        return self._steps[self._ask(env_worker.STEP, "in step")]

    def close(self) -> None:
        """End the workers, all at once; then raise what their environments had to say."""
        if faults := self._end():
            raise faults[0]

    def _ask(self, message: bytes, where: str) -> int:
        for worker in self._workers:
            worker.tell(message, where)
        return reduce(operator.or_, [worker.hear() for worker in self._workers])

    def _end(self) -> list[EnvError]:
        workers, self._workers = self._workers, []
        for worker in workers:
            os.close(worker.commands)
        deadline = time.monotonic() + CLOSE_S
        if slow := [worker for worker in workers if not worker.closes_until(deadline)]:
            more = f", nor do {len(slow) - 1} more" if len(slow) > 1 else ""
            logger.warning("%s does not end%s: killed", slow[0], more)
        # All at once: those that go on would take the processor from those that end.
        for worker in workers:
            worker.process.kill()
        faults = [worker.end() for worker in workers]
        return [fault for fault in faults if fault is not None]

    def _lay_out(self, memory: int) -> None:
        """Only what the workers have made says what goes into the memory."""
        names, modes, spaces = zip(*[worker.hear_look() for worker in self._workers], strict=True)
        self.name, self.autoreset = names[0], modes[0]
        self.obs_spec, self.action_spec, _ = spaces[0]
        for worker, (*specs, _) in zip(self._workers, spaces, strict=True):
            if specs != [self.obs_spec, self.action_spec]:
                raise EnvError(f"{worker} has other spaces than the first one: they must be alike")
        nums_columns = (num_columns for *_, num_columns in spaces)
        *firsts, self.num_envs = accumulate(nums_columns, initial=0)
        try:
            specs = self.obs_spec, self.action_spec
            self._shared = env_worker.SharedColumns.over(memory, *specs, self.num_envs)
        except OSError as error:  # to the kernel it is a file, which `ulimit -f` limits
            why = f"the memory that {len(self._workers)} env workers share cannot be had"
            raise EnvError(f"{why}: {error.strerror}", is_death=True) from None
        self._steps = [self._shared.read(brought) for brought in range(1 << len(Step._fields))]
        for worker, first in zip(self._workers, firsts, strict=True):
            worker.place = self._shared.columns(first, self.num_envs).place
            worker.tell(env_worker.as_line([self.num_envs, first]))
