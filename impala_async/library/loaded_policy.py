"""A trained policy for a program of one's own: it takes the observations of an environment as they
are, and gives actions as `env.step` takes them. It makes no environment.

C observations of a batch
"""

import os
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from impala_async.config.policies import PoliciesSection
from impala_async.envs.batch import ObsRows
from impala_async.envs.describe import fault_of_mask
from impala_async.envs.saved_spaces import load_spaces
from impala_async.envs.spaces import Spaces
from impala_async.envs.vector import LAST_REWARD, history_leaves, shown_parts
from impala_async.errors import CheckpointError, ConfigError, EnvError, SpacesError
from impala_async.files import path_of
from impala_async.models.actor_critic import shape_of
from impala_async.models.torso import device_of
from impala_async.policy import Policy, build_policy, check_log_probs
from impala_async.runs.folder import SPACES, RunFolder, find_run
from impala_async.schema import ArraySpec, ObsSpec, Schema, recurrent_state
from impala_async.training.checkpoint import open_newest_or
from impala_async.trajectory import are_moderate, how_large

State = dict[str, NDArray[Any]]
"""All that a policy remembers. Zeros are its memory when an episode begins."""


class Acted(NamedTuple):
    """The choice of a policy, and its state before the next observation. Those of a batch have a
    row for each observation."""

    action: Any
    """As `env.step` takes it, or for a batch that of a vector of environments."""
    log_prob: Any
    """The logarithm of its probability, or density: a float, or an array of float32."""
    state: State


@dataclass(frozen=True)
class OpenedPolicy:
    """A policy with the weights of a checkpoint, and all that it is used by."""

    policy: Policy
    spaces: Spaces
    schema: Schema
    shown: Mapping[str, ArraySpec]
    """The parts of an action, by the leaves that show the last one."""
    sees_reward: bool
    checkpoint: Path


class LoadedPolicy:
    """Acts as the actors of the run did. `load_policy` makes it."""

    def __init__(self, opened: OpenedPolicy, *, seed: int) -> None:
        self._policy, self._spaces, self._shown = opened.policy, opened.spaces, opened.shown
        self.observation_space = opened.spaces.observation_space
        self.action_space = opened.spaces.action_space
        self.checkpoint = opened.checkpoint
        self._sees_reward = opened.sees_reward
        self._generator = torch.Generator(opened.policy.device).manual_seed(seed)
        named = [replace(part, name=name) for name, part in opened.shown.items()]
        self._state = {spec.name: spec for spec in (*opened.schema.state, *named)}

    def __getstate__(self) -> dict[str, Any]:
        """The tensor that torch makes of a generator is gone before another process opens it."""
        return {**vars(self), "_generator": self._generator.get_state().numpy()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._generator = torch.Generator(self._policy.device)
        self._generator.set_state(torch.from_numpy(state["_generator"]))

    def act(
        self,
        obs: Any,
        state: State | None = None,
        *,
        last_reward: ArrayLike | None = None,
        is_greedy: bool = True,
    ) -> Acted:
        """Choose an action for an observation, or for each of a batch of them.

        Pass the `state` back that the step before returned; None begins an episode, in a batch all
        of them: to begin one of these, set its rows to 0. `last_reward` is what the last step gave,
        0 where an episode begins; only a run with env.last_reward looks at it. Without `is_greedy`
        the action is sampled.
        """
        if not isinstance(is_greedy, bool | np.bool_):
            raise ConfigError(f"is_greedy: wants True or False, got {is_greedy!r}")
        num_columns = self._num_columns(obs)
        leaves = self._read(obs, num_columns)
        before = self._read_state(state, num_columns)
        leaves |= {name: before[name] for name in self._shown}
        if self._sees_reward:
            leaves[LAST_REWARD] = _reward(state, last_reward, num_columns)
        generator = None if is_greedy else self._generator
        actions, log_probs, after = self._policy.act(leaves, before, generator)
        check_log_probs(log_probs)
        after |= {name: actions[part.name] for name, part in self._shown.items()}
        if num_columns is None:
            (action,) = self._spaces.each(actions)
            return Acted(action, float(log_probs[0]), {n: part[0] for n, part in after.items()})
        return Acted(self._spaces.batch(actions), log_probs, after)

    def _num_columns(self, obs: Any) -> int | None:
        """How many observations a batch has; None for one observation."""
        leaf = self._spaces.leaves[0]
        try:
            shape = np.shape(leaf.of(obs))
        except ValueError:  # it is ragged
            return None
        return shape[0] if len(shape) == len(leaf.spec.shape) + 1 else None

    def _read(self, obs: Any, num_columns: int | None) -> dict[str, NDArray[Any]]:
        """The leaves of a batch; EnvError for what is not of the space."""
        # Rows of this call alone, as another thread may act at the same time.
        rows = ObsRows(self._spaces.leaves, 1 if num_columns is None else num_columns)
        if num_columns is None:
            rows.write(0, obs)
            leaves = rows.arrays
            rows.check_choices(leaves)
        else:
            read = rows.read(obs)
            # A view that runs backwards, as of an image that is flipped, is none of torch's.
            leaves = {name: np.ascontiguousarray(array) for name, array in read.items()}
        for leaf in self._spaces.obs_spec.leaves:
            values = leaves[leaf.name]
            if leaf.may_be_large and not (is_moderate := are_moderate(values)).all():
                got = values[~is_moderate][:1]
                what = f"it is {how_large(got)}: {got[0]:g}"
                raise EnvError(f"{leaf.name or 'observation'}: wants moderate numbers, {what}")
        chooses_C = np.ones(num_columns or 1, np.bool_)
        if fault := fault_of_mask(self._spaces.action_spec, leaves, chooses_C):
            raise EnvError(f"observation: has {fault}")
        return dict(leaves)

    def _read_state(self, state: State | None, num_columns: int | None) -> State:
        lead = 1 if num_columns is None else num_columns
        if state is None:
            return {n: np.zeros((lead, *s.shape), s.dtype) for n, s in self._state.items()}
        if not isinstance(state, Mapping):
            got = type(state).__name__
            raise SpacesError(f"state: wants that of the step before, or None, got {got}")
        if set(state) != set(self._state):
            wants = ", ".join(self._state) or "no array"
            raise SpacesError(f"state: wants {wants}, got {', '.join(map(str, state)) or 'none'}")
        read = {}
        for name, spec in self._state.items():
            array = _numbers(state[name], spec)
            if array is None:
                got = " ".join(reprlib.repr(state[name]).split())
                raise SpacesError(f"state: {name}: wants that of the step before, got {got}")
            shape = spec.shape if num_columns is None else (lead, *spec.shape)
            if array.shape != shape:
                raise SpacesError(f"state: {name}: wants shape {shape}, got {array.shape}")
            read[name] = array.reshape(lead, *spec.shape)
        return read


def _numbers(given: Any, spec: ArraySpec) -> NDArray[Any] | None:
    """A new array; None for what no policy can have returned."""
    try:
        array = np.array(given, spec.dtype)
    except (TypeError, ValueError, OverflowError):
        return None
    if spec.is_float:
        return array if are_moderate(array).all() else None
    last = np.reshape(spec.choices, spec.shape) - 1
    # Another shape is told as that.
    has_shape = array.shape[array.ndim - last.ndim :] == last.shape
    is_beyond = has_shape and ((array < 0) | (array > last)).any()
    return array if np.asarray(given).dtype.kind in "iu" and not is_beyond else None


def load_policy(
    path: str | os.PathLike[str],
    *,
    policy: str | None = None,
    device: str = "cpu",
    seed: int = 0,
) -> LoadedPolicy:
    """The policy of a run: of its newest checkpoint, or of the one whose folder is named.

    `policy` names a member of a team. `device` is cpu, cuda, or auto: a GPU if there is one. `seed`
    is for sampled actions.
    """
    if type(seed) is not int or not 0 <= seed < 1 << 63:
        raise ConfigError(f"seed: wants a whole number from 0 up, of 63 bits, got {seed!r}")
    return LoadedPolicy(open_policy(path_of("path", path), policy, device), seed=seed)


def open_policy(path: Path, member: str | None = None, device: str = "cpu") -> OpenedPolicy:
    folder, checkpoints, named = find_run(path)
    config = folder.load_config()
    env, model = config.env, config.model
    _check_member(config.policies, member)
    spaces = Spaces(*_spaces_of(folder), env)
    shown = shown_parts(spaces.action_spec) if env.last_action else {}
    added = history_leaves(shown, has_reward=env.last_reward)
    obs = ObsSpec((*spaces.obs_spec.leaves, *added))
    state = recurrent_state(model.core, model.core_size)
    schema = Schema(obs, spaces.action_spec, config.trajectory.rows, state)
    checkpoint = open_newest_or(named, checkpoints)
    # First without memory, as a damaged file may ask for any. A torso of one's own is made once.
    is_ours = ":" not in model.name
    shape = shape_of(model, schema.inputs, schema.action) if is_ours else None
    if shape is not None:
        checkpoint.check_fits(shape.state_dict(), member)
    built = build_policy(schema, model, PoliciesSection(), seed=config.seed, device=_device(device))
    (policy,) = built.members.values()
    checkpoint.load_into(policy, member)
    return OpenedPolicy(policy, spaces, schema, shown, env.last_reward, checkpoint.path)


def _spaces_of(folder: RunFolder) -> tuple[Any, Any]:
    saved = folder.read_json(SPACES)
    if saved is None:
        raise CheckpointError(
            f"{folder.path} has no {SPACES}: its learner was of an earlier release, or made no "
            f"environment; python -m impala_async.evaluate {folder.path} writes it, where the "
            "environment can be made"
        )
    try:
        return load_spaces(saved)
    except SpacesError as error:
        raise CheckpointError(f"{folder.path / SPACES}: {error}") from None


def _check_member(section: PoliciesSection, policy: str | None) -> None:
    if policy is None and section.names:
        raise ConfigError(f"policy: wants one of this team: {', '.join(section.names)}; got none")
    if policy is not None and policy not in section.names:
        wants = f"one of {', '.join(section.names)}" if section.names else "none, as there is one"
        raise ConfigError(f"policy: wants {wants}, got {policy!r}")


def _device(name: str) -> torch.device:
    try:
        device = device_of(name)
        # Asked of torch, since a GPU may be there and be of no use.
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        why = str(error).partition("\n")[0]
        raise ConfigError(f"device: wants cpu, cuda or auto, got {name!r}: {why}") from None
    return device


def _reward(
    state: State | None, last_reward: ArrayLike | None, num_columns: int | None
) -> NDArray[np.float32]:
    lead = 1 if num_columns is None else num_columns
    if last_reward is None:
        if state is not None:
            raise ConfigError("last_reward: this run sees it (env.last_reward): wants it, got none")
        last_reward = np.zeros(lead)
    try:
        rewards = np.asarray(last_reward, np.float32).reshape(-1)
    except (TypeError, ValueError):
        raise ConfigError(f"last_reward: wants a number, got {last_reward!r}") from None
    if rewards.shape != (lead,):
        raise ConfigError(f"last_reward: wants {lead} of them, got {len(rewards)}")
    if not are_moderate(rewards).all():
        raise ConfigError(f"last_reward: wants moderate numbers, got {last_reward}")
    # The state of a policy without a memory is empty, and is easily left out.
    if state is None and rewards.any():
        got = f"got {rewards[rewards != 0][0]:g}; pass back the state of the step before"
        raise ConfigError(f"last_reward: wants 0 without a state, which begins an episode, {got}")
    return rewards
