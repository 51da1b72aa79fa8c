"""An actor's env workers together: the batch of environments that they are to a sampler.

Its columns have the seeds that they would have in one process, so a policy that chooses alike gets
the same trajectories to the last bit.

Runs on: sampler thread
"""

import os
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path, PurePosixPath

import numpy as np

from impala_async.actor.env_worker import Order
from impala_async.actor.shared_memory import SharedColumns, new_memory
from impala_async.actor.worker import LookUp, Worker, end_workers
from impala_async.config.env import EnvSection
from impala_async.config.policies import ONE_POLICY, PoliciesSection
from impala_async.envs.batch import Actions, Obs, Step
from impala_async.errors import EnvError

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")


def count_cores() -> int:
    """How many this process may use: those of its affinity, and no more than its quota.

    At least one. A container's quota counts in whole cores.
    """
    return max(1, min(len(os.sched_getaffinity(0)), *_quotas()))


def _quotas() -> list[int]:
    """The quotas of this control group and those around it; containers see theirs as the root."""
    try:
        (own,) = [
            line[3:] for line in OWN_CGROUP.read_text().splitlines() if line.startswith("0::")
        ]
    except (OSError, ValueError):
        own = "/"
    found = [os.cpu_count() or 1]
    for group in (PurePosixPath(own), *PurePosixPath(own).parents):
        try:
            quota, period = (CGROUPS / str(group).lstrip("/") / "cpu.max").read_text().split()
            found.append(int(quota) // int(period))
        except (OSError, ValueError):
            continue  # there is no such file, or it says "max"
    return found


class WorkerEnvs:
    """Workers with about as many environments each."""

    def __init__(
        self,
        section: EnvSection,
        num_envs: int,
        num_workers: int,
        policies: PoliciesSection = ONE_POLICY,
        look_up: LookUp = lambda: None,
    ) -> None:
        """Start them; EnvError when one cannot make its environments."""
        env, named = section.model_dump(mode="json"), policies.model_dump(mode="json")
        self._workers: list[Worker] = []
        with ExitStack() as stack:
            memory = new_memory()
            stack.callback(os.close, memory)
            with ExitStack() as on_failure:
                on_failure.callback(end_workers, self._workers, is_quiet=True)
                few, num_more = divmod(num_envs, num_workers)
                first = 0
                for number in range(num_workers):
                    share = few + (number < num_more)
                    order = Order(env, named, share, first)
                    self._workers.append(Worker(order, memory, look_up))
                    first += share
                for worker in self._workers:
                    worker.hear_look()
                self._shared = self._lay_out(memory)
                on_failure.pop_all()
        one = self._workers[0]
        self.name, self.autoreset = one.name, one.autoreset
        self.obs_spec, self.action_spec, _ = one.spaces
        self.num_envs = len(self._shared.rewards_C)
        self._steps = [self._shared.read(brought) for brought in range(8)]

    def reset(self, seed: int, first_env: int = 0) -> Obs:
        for worker in self._workers:
            worker.begin_reset(seed)
        for worker in self._workers:
            worker.hear()
        return self._shared.obs

    def step(self, actions: Actions) -> Step:
        for name, array in self._shared.actions.items():
            np.copyto(array, actions[name])
        for worker in self._workers:
            worker.begin_step()
        brought = 0
        for worker in self._workers:
            brought |= worker.hear()
        return self._steps[brought]

    def close(self) -> None:
        """End the workers, all at once; then raise what their environments had to say."""
        end_workers(self._workers)

    def _lay_out(self, memory: int) -> SharedColumns:
        """Only now is it known what goes into the memory."""
        obs, action, _ = self._workers[0].spaces
        for worker in self._workers:
            if (worker.spaces.obs, worker.spaces.action) != (obs, action):
                raise EnvError(f"{worker} has other spaces than the first one: they must be alike")
        widths = [worker.spaces.num_columns for worker in self._workers]
        *firsts, num_columns = accumulate(widths, initial=0)
        shared = SharedColumns.over(memory, obs, action, num_columns)
        shared.touch()
        for worker, first, width in zip(self._workers, firsts, widths, strict=True):
            worker.place = shared.columns(first, first + width).place
            worker.tell([num_columns, first])
        return shared
