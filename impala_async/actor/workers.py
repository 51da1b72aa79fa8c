"""An actor's env workers together, and the batch of environments that they are to a sampler.

`Workers` starts them and lays out the memory that they share. `WorkerEnvs` is an `EnvBatch` over
all or half of them: its columns have the seeds that they would have in one process, so a policy
that chooses alike gets the same trajectories to the last bit.

Runs on: sampler thread
"""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path, PurePosixPath

import numpy as np

from impala_async.actor.env_worker import RESET, Order
from impala_async.actor.shared_memory import SharedColumns, new_memory
from impala_async.actor.worker import LookUp, Worker, end_workers
from impala_async.config.actor import SamplerName
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
    """Workers that stand side by side, as one batch. `send` and `receive` are a `step` in two."""

    def __init__(self, workers: Sequence[Worker], shared: SharedColumns) -> None:
        first = workers[0]
        self.name, self.autoreset = first.name, first.autoreset
        self.obs_spec, self.action_spec, _ = first.spaces
        self.num_envs = sum(worker.spaces.num_columns for worker in workers)
        self._workers = list(workers)
        self._shared = shared
        self._steps = [shared.read(brought) for brought in range(8)]

    def reset(self, seed: int, first_env: int = 0) -> Obs:
        """Start all columns anew, wherever these workers stand among those of the actor."""
        for worker in self._workers:
            if worker.is_stepping:  # for a sampler that was given up
                worker.hear()
            worker.tell(seed, RESET)
        for worker in self._workers:
            worker.hear()
        return self._shared.obs

    def step(self, actions: Actions) -> Step:
        self.send(actions)
        return self.receive()

    def send(self, actions: Actions) -> None:
        """Begin a step; until `receive`, nothing of the last one may be looked at."""
        for name, array in self._shared.actions.items():
            np.copyto(array, actions[name])
        for worker in self._workers:
            worker.begin_step()

    def receive(self) -> Step:
        """Wait for the step that was begun."""
        brought = 0
        for worker in self._workers:
            brought |= worker.hear()
        return self._steps[brought]

    def close(self) -> None:
        """End the workers, all at once; then raise what their environments had to say."""
        end_workers(self._workers)


class Workers:
    """The workers of an actor, with about as many environments each. The batches that step them
    close them: `whole`, or both of `halves`."""

    def __init__(
        self,
        sampler: SamplerName,
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
                first = 0
                for share in shares(num_envs, num_workers):
                    order = Order(sampler, env, named, share, first)
                    self._workers.append(Worker(order, memory, look_up))
                    first += share
                for worker in self._workers:
                    worker.hear_look()
                self._widths = [worker.spaces.num_columns for worker in self._workers]
                self._shared = self._lay_out(memory)
                on_failure.pop_all()

    @property
    def can_alternate(self) -> bool:
        """Whether both halves have as many columns."""
        middle = len(self._widths) // 2
        return sum(self._widths[:middle]) == sum(self._widths[middle:])

    def whole(self) -> WorkerEnvs:
        return self._batch(0, len(self._workers))

    def halves(self) -> list[WorkerEnvs]:
        assert self.can_alternate, "the config has even numbers"
        middle = len(self._workers) // 2
        return [self._batch(0, middle), self._batch(middle, len(self._workers))]

    def close(self) -> None:
        """End the workers, all at once; then raise what their environments had to say."""
        end_workers(self._workers)

    def _lay_out(self, memory: int) -> SharedColumns:
        """Only now is it known what goes into the memory."""
        obs, action, _ = self._workers[0].spaces
        for worker in self._workers:
            if (worker.spaces.obs, worker.spaces.action) != (obs, action):
                raise EnvError(f"{worker} has other spaces than the first one: they must be alike")
        *firsts, num_columns = accumulate(self._widths, initial=0)
        shared = SharedColumns.over(memory, obs, action, num_columns)
        shared.touch()
        for worker, first, width in zip(self._workers, firsts, self._widths, strict=True):
            worker.place = shared.columns(first, first + width).place
            worker.tell([num_columns, first])
        return shared

    def _batch(self, begin: int, end: int) -> WorkerEnvs:
        columns = self._shared.columns(sum(self._widths[:begin]), sum(self._widths[:end]))
        return WorkerEnvs(self._workers[begin:end], columns)


def shares(num_envs: int, num_workers: int) -> list[int]:
    """How many environments each worker has: as equal as they can be, and their halves too."""
    if num_envs % 2 == num_workers % 2 == 0:
        return shares(num_envs // 2, num_workers // 2) * 2
    few, num_more = divmod(num_envs, num_workers)
    return [few + (worker < num_more) for worker in range(num_workers)]
