"""The sampler: policy and environments in a loop that writes trajectories, for all columns at once.
A trajectory's buffer is taken at the beginning of the step that needs it, not at the end of the
step that filled the last one: a finished message is never held back by the wait for a buffer.

Runs on: sampler thread
"""

from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from impala_async.actor.unroll import Finished, MessageBuffer, Unroll
from impala_async.envs.batch import EnvBatch, Step
from impala_async.policy import Action, AnyPolicy
from impala_async.schema import Schema
from impala_async.weights import Weights


class Sampler:
    """Samples NEXT_STEP: all columns share a cursor and travel in one message. The step after an
    end is a row of its own (masked), so nothing needs to be added."""

    def __init__(
        self,
        schema: Schema,
        envs: EnvBatch,
        policy: AnyPolicy,
        rng: Any,
        *,
        take_buffer: Callable[[], MessageBuffer],
        newest: Callable[[], Weights | None],
        seed: int,
        num_agents: int = 1,
        is_to_cut: Callable[[], bool] | None = None,
    ) -> None:
        """Reset the environments. `take_buffer` gives one that nobody reads any more, `newest` at
        trajectory boundaries weights that are newer than those in use; both may wait. Each
        environment has `num_agents` columns. `is_to_cut` says within a trajectory whether others
        wait for it; none: nobody ever does."""
        self._env_s, self._act_s, self._num_steps = 0.0, 0.0, 0
        self._num_agents, self._num_acts, self._num_env_steps = num_agents, 0, 0
        self._envs, self._policy, self._rng = envs, policy, rng
        self._take_buffer, self._newest, self._is_to_cut = take_buffer, newest, is_to_cut
        self._obs = envs.reset(seed)
        # The columns carry it from row to row: as it is before the row that comes next.
        self._state: Mapping[str, NDArray[np.float32]] = policy.first_state(envs.num_envs)
        self._unrolls = self._make_unrolls(schema)
        self._is_any_waiting = True

    def step(self) -> list[Finished]:
        """Step every column once; the messages this completed, to be sent before the next call.
        One that is complete as soon as it begins (T = 1) comes without a step: newer weights may
        wait for it."""
        if self._is_any_waiting and (finished := self._begin()):
            return finished
        before = perf_counter()
        chosen = self._policy.act(self._obs, self._state, self._rng)
        acted = perf_counter()
        step = self._envs.step(chosen.actions)
        self._act_s += acted - before
        self._env_s += perf_counter() - acted
        self._num_steps += 1
        if self._num_agents > 1:
            self._count_agents(step)
        self._obs, self._state = step.obs, chosen.state
        finished = self._write(chosen, step)
        if self._is_to_cut is not None and not finished and self._is_to_cut():
            finished = [message for unroll in self._unrolls for message in unroll.cut()]
        self._is_any_waiting = bool(finished)
        return finished

    def take_times(self) -> tuple[float, float, int]:
        """Seconds that environments and policy took since the last call, and for how many steps."""
        times = self._env_s, self._act_s, self._num_steps
        self._env_s, self._act_s, self._num_steps = 0.0, 0.0, 0
        return times

    def take_agents(self) -> float:
        """How many agents of an environment acted, and learn, in a step since the last call: the
        mean over steps in which any did. 1 where none did."""
        mean = self._num_acts / self._num_env_steps if self._num_env_steps else 1.0
        self._num_acts = self._num_env_steps = 0
        return mean

    def _count_agents(self, step: Step) -> None:
        masked = np.zeros(len(step.rewards), np.bool_) if step.masked is None else step.masked
        num_acts = self._num_agents - masked.reshape(-1, self._num_agents).sum(axis=1)
        self._num_acts += int(num_acts.sum())
        self._num_env_steps += int(np.count_nonzero(num_acts))

    def _make_unrolls(self, schema: Schema) -> list[Unroll]:
        return [Unroll(schema, self._obs)]

    def _state_of(self, place: int) -> Mapping[str, NDArray[np.float32]]:
        return self._state

    def _begin(self) -> list[Finished]:
        """Open the trajectories that are due, with the newest weights; messages this completes.
        Columns in mid-trajectory act with them too, and keep the version of their first row."""
        due = [place for place, unroll in enumerate(self._unrolls) if unroll.needs_buffer]
        buffers = [self._take_buffer() for _ in due]
        weights = self._newest()
        if weights is not None:
            self._policy.load(weights)
        for place, buffer in zip(due, buffers, strict=True):
            self._unrolls[place].begin(buffer, self._policy.version, self._state_of(place))
        self._is_any_waiting = False
        return []

    def _write(self, chosen: Action, step: Step) -> list[Finished]:
        # Who is not trained plays on, and remembers: its rows are masked, no resets.
        if step.fresh is not None:
            _forget(self._state, step.fresh)
        return self._unrolls[0].append(
            chosen.actions,
            chosen.log_probs,
            step.rewards,
            step.terminated,
            step.truncated,
            step.obs,
            step.masked,
        )


class SameStepSampler(Sampler):
    """Samples SAME_STEP: a step that ends an episode gives two rows, the transition and a masked
    one with the final observation. So cursors part, and each column travels in its own message.

    The masked row needs no act. It is written with the step itself, unless it opens a trajectory:
    then at the beginning of the next step, while the reset observation is still there.
    """

    def _make_unrolls(self, schema: Schema) -> list[Unroll]:
        num_envs = self._envs.num_envs
        self._slices = [slice(column, column + 1) for column in range(num_envs)]
        self._resetting: list[int] = []
        self._final_state = self._policy.first_state(num_envs)
        actions = {part.name: np.zeros(1, np.int32) for part in schema.action.parts}
        number, flag = np.zeros(1, np.float32), np.zeros(1, np.bool_)
        self._no_step = actions, number, number, flag, flag
        self._masked = np.ones(1, np.bool_)
        return [Unroll(schema, _cut(self._obs, one)) for one in self._slices]

    def _state_of(self, place: int) -> Mapping[str, NDArray[np.float32]]:
        # A masked row belongs to the episode that ended, and so does the state before it.
        state = self._final_state if place in self._resetting else self._state
        return _cut(state, self._slices[place])

    def _begin(self) -> list[Finished]:
        super()._begin()
        finished = self._write_resets()
        # With T = 1 the masked row was a whole trajectory.
        self._is_any_waiting = bool(finished)
        return finished

    def _write(self, chosen: Action, step: Step) -> list[Finished]:
        finished: list[Finished] = []
        is_over = (step.terminated | step.truncated).tolist()
        if self._state and any(is_over):
            self._final_state = {name: part.copy() for name, part in self._state.items()}
            _forget(self._state, step.terminated | step.truncated)
        for column, (unroll, one) in enumerate(zip(self._unrolls, self._slices, strict=True)):
            next_obs = step.obs
            if is_over[column]:
                assert step.final_obs is not None, "a SAME_STEP batch gives final observations"
                next_obs = step.final_obs
                self._resetting.append(column)
            finished += unroll.append(
                _cut(chosen.actions, one),
                chosen.log_probs[one],
                step.rewards[one],
                step.terminated[one],
                step.truncated[one],
                _cut(next_obs, one),
            )
        return finished + self._write_resets() if self._resetting else finished

    def _write_resets(self) -> list[Finished]:
        """Write the masked rows that are due, of columns that have a buffer for them."""
        due = [column for column in self._resetting if not self._unrolls[column].needs_buffer]
        self._resetting = [column for column in self._resetting if column not in due]
        finished: list[Finished] = []
        for column in due:
            obs = _cut(self._obs, self._slices[column])
            finished += self._unrolls[column].append(*self._no_step, obs, self._masked)
        return finished


def sampler_for(envs: EnvBatch) -> type[Sampler]:
    return SameStepSampler if envs.autoreset is AutoresetMode.SAME_STEP else Sampler


def _cut(arrays: Mapping[str, NDArray[Any]], columns: slice) -> dict[str, NDArray[Any]]:
    return {name: array[columns] for name, array in arrays.items()}


def _forget(state: Mapping[str, NDArray[np.float32]], columns: NDArray[np.bool_]) -> None:
    for part in state.values():
        part[columns] = 0.0
