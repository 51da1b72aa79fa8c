"""Gymnasium's environments as batches, and a batch that shows the last action and reward as well.

The arrays that they return are the batch's, or the environment's own: good until the next `step` or
`reset`, and then overwritten.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from operator import attrgetter
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Tuple
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray

from impala_async.config.env import EnvSection
from impala_async.envs.batch import BOOL, FLOAT, Actions, EnvBatch, Obs, ObsRows, Step, as_numbers
from impala_async.envs.faults import RUNNING, Blame, close_all, env_name
from impala_async.envs.spaces import USUAL_MASK, Spaces, short
from impala_async.errors import EnvError
from impala_async.processes import signals_kept
from impala_async.schema import ActionSpec, ArraySpec, ObsSpec

logger = logging.getLogger(__name__)

SUPPORTED_MODES = (AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP)
# Where infos have them; the second is gymnasium's name of old.
FINAL_OBS = {"final_obs", "final_observation"}
LAST_ACTION = "last_action"
LAST_REWARD = "last_reward"


def spread_seed(seed: int) -> int:
    """A seed far from those of the neighbours of `seed`: gymnasium adds the number of a column."""
    return int(np.random.SeedSequence(seed).generate_state(1)[0]) % (2**31 - 2**16)


def reset_one(env: Any, seed: int | None) -> Any:
    """An observation to begin with. Where an older `reset` gives that alone, two numbers would
    pass for a pair."""
    obs, info = env.reset(seed=seed)
    if not isinstance(info, Mapping | None):
        raise TypeError(f"its info is a {type(info).__name__}, no dict")
    if info and USUAL_MASK in info and not (isinstance(obs, Mapping) and USUAL_MASK in obs):
        tell_unread_mask(f"info[{USUAL_MASK!r}]")
    return obs


@cache
def tell_unread_mask(where: str) -> None:
    """Tell it once: other frameworks look there."""
    told = "%s is not looked at, and all actions are legal: a mask of legal ones is %r in a Dict"
    logger.warning(f"{told} observation", where, USUAL_MASK)


class OwnEnvs:
    """A batch that calls environments itself."""

    autoreset = AutoresetMode.NEXT_STEP

    def __init__(
        self,
        envs: Sequence[Any],
        section: EnvSection | None,
        spaces_of: Callable[[Any], tuple[gym.Space[Any], gym.Space[Any]]],
        num_columns: int,
        num_envs: int,
    ) -> None:
        section = section or EnvSection(id=env_name(envs[0]))
        self.name, self.num_envs = section.id, num_columns
        self._envs = list(envs)
        # A fault may be that of a wrapper.
        whose = f"wrapped {self.name}" if section.wrappers else self.name
        self._stepping = Blame(whose, "in step", num_envs)
        self._resetting = Blame(whose, "in reset", num_envs)
        with Blame(self.name, "to say what its spaces are"):
            (observation_space, action_space), *others = map(spaces_of, envs)
        for number, (_, other) in enumerate(others, 1):
            # The actions of all are made for one space; observations are checked as they come.
            if other != action_space:
                raise EnvError(
                    f"{self.name}: the action space of environment {number} is {short(other)}, and "
                    f"that of environment 0 is {short(action_space)}: they must be alike"
                )
        self.spaces = Spaces(observation_space, action_space, section)
        self.obs_spec, self.action_spec = self.spaces.obs_spec, self.spaces.action_spec
        self._rows = ObsRows(self.spaces.leaves, num_columns)
        self._result = Step(
            self._rows.arrays,
            rewards=np.zeros(num_columns, np.float32),
            terminated=np.zeros(num_columns, np.bool_),
            truncated=np.zeros(num_columns, np.bool_),
        )

    @signals_kept()
    def reset(self, seed: int, first_env: int = 0) -> Obs:
        """Environment i gets the seed that SyncVectorEnv would give it."""
        first_seed = self._first_seed(seed, first_env)
        with self._resetting:
            for index in range(len(self._envs)):
                RUNNING.place[0] = first_env + index + 1
                self._reset_env(index, first_seed + index)
            self._rows.check_choices(self._rows.arrays)
        return self._rows.arrays

    def close(self) -> None:
        close_all(self._envs, self.name)

    def _reset_env(self, index: int, seed: int | None) -> None:
        raise NotImplementedError

    def _first_seed(self, seed: int, first_env: int) -> int:
        self._stepping.first = self._resetting.first = first_env
        return spread_seed(seed) + first_env


class SerialEnvs(OwnEnvs):
    """Single environments, stepped one after the other; NEXT_STEP, done here."""

    def __init__(
        self, envs: Sequence[gym.Env[Any, Any]], section: EnvSection | None = None
    ) -> None:
        num_envs = len(envs)
        look = attrgetter("observation_space", "action_space")
        super().__init__(envs, section, look, num_envs, num_envs)
        with Blame(self.name, "to say what it wraps"):
            inner = getattr(envs[0], "unwrapped", envs[0])
            has_masks = callable(getattr(inner, "action_masks", None))
        if has_masks and self.action_spec.legal is None:
            tell_unread_mask("its method action_masks")
        # A list is faster to look at, column by column.
        self._is_over = [False] * num_envs
        self._idle = np.zeros(num_envs, np.bool_)

    def step(self, actions: Actions) -> Step:
        obs, rewards, all_terminated, all_truncated, *_ = result = self._result
        is_over, write = self._is_over, self._rows.write
        if True in is_over:
            self._idle.fill(False)
            result = result._replace(idle=self._idle)
        place, first = RUNNING.place, self._stepping.first + 1
        with self._stepping:
            for column, action in enumerate(self.spaces.each(actions)):
                place[0] = first + column
                if is_over[column]:
                    with self._resetting:
                        self._reset_env(column, None)
                    continue
                shown, reward, terminated, truncated, _ = self._envs[column].step(action)
                rewards[column] = as_numbers(reward, "reward", FLOAT)
                write(column, shown, " in step")
                terminated = as_numbers(terminated, "terminated", BOOL)
                truncated = as_numbers(truncated, "truncated", BOOL)
                if terminated or truncated:
                    is_over[column] = True
                    all_terminated[column] = terminated
                    all_truncated[column] = truncated
            self._rows.check_choices(obs)
        return result

    def _reset_env(self, index: int, seed: int | None) -> None:
        self._rows.write(index, reset_one(self._envs[index], seed))
        self._result.rewards[index] = 0
        self._result.terminated[index] = self._result.truncated[index] = False
        self._is_over[index], self._idle[index] = False, True


class VectorEnvs(OwnEnvs):
    """A gymnasium VectorEnv that resets its own columns, NEXT_STEP or SAME_STEP."""

    def __init__(self, env: VectorEnv[Any, Any, Any], section: EnvSection | None = None) -> None:
        given = (env.metadata or {}).get("autoreset_mode")
        modes = [mode for mode in SUPPORTED_MODES if given in (mode, mode.value)]
        if not modes:
            does = "whichever the environment does"
            if given in (AutoresetMode.DISABLED, AutoresetMode.DISABLED.value):
                does = "and let the environment reset its columns so"
            raise EnvError(
                f"{env_name(env)}: metadata['autoreset_mode'] is {given or 'missing'}; set it to "
                f"{' or '.join(map(str, SUPPORTED_MODES))}, {does}"
            )
        self.autoreset = modes[0]
        look = attrgetter("single_observation_space", "single_action_space")
        super().__init__([env], section, look, env.num_envs, env.num_envs)
        if type(env).__module__.startswith("gymnasium.envs."):
            # Their space is the policy's, and to be asked about each step is a seventh of one.
            env.action_space.contains = _holds_all  # type: ignore[assignment]
        self._idle: NDArray[np.bool_] | None = None
        """Those that the next step only resets."""

    @signals_kept()
    def reset(self, seed: int, first_env: int = 0) -> Obs:
        RUNNING.place[0] = 0
        first_seed = self._first_seed(seed, first_env)
        with self._resetting:
            obs, _ = self._envs[0].reset(seed=first_seed)
            flat_obs = self._rows.read(obs)
        self._idle = None
        return flat_obs

    def step(self, actions: Actions) -> Step:
        num_envs, own_rewards = self.num_envs, self._result.rewards
        with self._stepping:
            given = self._envs[0].step(self.spaces.batch(actions))
            obs, rewards, terminated, truncated, infos = given
            own_rewards[:] = as_numbers(rewards, "rewards", FLOAT, num_envs)
            terminated = as_numbers(terminated, "terminated", BOOL, num_envs)
            truncated = as_numbers(truncated, "truncated", BOOL, num_envs)
            flat_obs = self._rows.read(obs, " in step")
        is_over = terminated | truncated
        idle, self._idle = self._idle, None
        if idle is not None:
            own_rewards[idle] = 0
            if (is_over & idle).any():
                raise EnvError(
                    f"{self.name} says {AutoresetMode.NEXT_STEP}, but ends an episode on the "
                    "step after an end, which must only reset it"
                )
        final_obs = None
        if np.count_nonzero(is_over):
            if self.autoreset is AutoresetMode.SAME_STEP:
                final_obs = self._read_final_obs(infos, is_over)
            elif isinstance(infos, Mapping) and not FINAL_OBS.isdisjoint(infos):
                raise EnvError(
                    f"{self.name} says {AutoresetMode.NEXT_STEP}, but gives final observations "
                    f"beside the reset ones, as {AutoresetMode.SAME_STEP} does: set "
                    "metadata['autoreset_mode'] to that"
                )
            else:
                self._idle = is_over
        return Step(flat_obs, own_rewards, terminated, truncated, final_obs, idle)

    def _read_final_obs(self, infos: Any, is_over: Any) -> Obs:
        """Final observations come as one per column (None elsewhere), or batched."""
        rows = self._rows
        given: Any = infos.get("final_obs") if isinstance(infos, Mapping) else None
        is_per_column = isinstance(given, np.ndarray) and given.dtype == np.dtype(object)
        # A tuple of arrays is what a batch of a Tuple looks like.
        of_columns = list if isinstance(self.spaces.observation_space, Tuple) else list | tuple
        try:
            if not is_per_column and not isinstance(given, of_columns):
                return rows.read(given, rows=is_over)
            for column in np.flatnonzero(is_over).tolist():
                rows.write(column, given[column])
            rows.check_choices(rows.arrays, is_over)
        except (EnvError, IndexError) as error:
            raise EnvError(
                f"{self.name} says {AutoresetMode.SAME_STEP}, which needs "
                f"infos['final_obs'] of every column that ended: {error}"
            ) from error
        return rows.arrays


def _holds_all(actions: Any) -> bool:
    return True


def shown_parts(spec: ActionSpec) -> dict[str, ArraySpec]:
    """The parts of an action, under the names of the leaves that show the last one."""
    return {
        f"{LAST_ACTION}/{part.name}" if part.name else LAST_ACTION: part.array
        for part in spec.parts
    }


def history_leaves(shown: Mapping[str, ArraySpec], *, has_reward: bool) -> list[ArraySpec]:
    """The leaves that a run adds to an observation: of the last action, then the last reward."""
    leaves = [replace(part, name=name) for name, part in shown.items()]
    return [*leaves, ArraySpec(LAST_REWARD, (), "float32")] if has_reward else leaves


class WithHistory:
    """A batch that also shows the last action and reward, as leaves: 0 where an episode begins."""

    def __init__(self, envs: EnvBatch, *, has_action: bool, has_reward: bool) -> None:
        self._envs = envs
        self.name, self.num_envs, self.autoreset = envs.name, envs.num_envs, envs.autoreset
        self.action_spec, self.spaces = envs.action_spec, envs.spaces
        self._shown = shown_parts(envs.action_spec) if has_action else {}
        added = history_leaves(self._shown, has_reward=has_reward)
        self.obs_spec = ObsSpec((*envs.obs_spec.leaves, *added))
        self._added: Obs = {
            leaf.name: np.zeros((envs.num_envs, *leaf.shape), leaf.dtype) for leaf in added
        }
        for leaf in envs.obs_spec.leaves:
            if leaf.name in self._added:
                key = leaf.name.partition("/")[0]
                raise EnvError(f"env.{key}: the observation has a key of that name already")

    def reset(self, seed: int, first_env: int = 0) -> Obs:
        for array in self._added.values():
            array.fill(0)
        return {**self._envs.reset(seed, first_env), **self._added}

    def step(self, actions: Actions) -> Step:
        step, added = self._envs.step(actions), self._added
        for name, part in self._shown.items():
            added[name][...] = actions[part.name]
        if LAST_REWARD in added:
            added[LAST_REWARD][...] = step.rewards
        final_obs = step.final_obs
        if final_obs is not None:
            final_obs = {**final_obs, **{name: array.copy() for name, array in added.items()}}
        if (fresh := step.fresh) is not None:
            for array in added.values():
                array[fresh] = 0
        return step._replace(obs={**step.obs, **added}, final_obs=final_obs)

    def close(self) -> None:
        self._envs.close()
