"""The policy of a run, to act with: `load_policy`. No environment is made for it.

    from impala_async import load_policy

    policy = load_policy("runs/mine")
    action, state, log_prob = policy.act(obs)

Observations are those of the run's environment, behind its wrappers and its preprocessing; actions
are those that its `step` takes.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import Space
from numpy.typing import NDArray

from impala_async.config.run import RunConfig
from impala_async.envs.batch import ObsRows
from impala_async.envs.space_text import from_json
from impala_async.envs.spaces import Spaces
from impala_async.envs.vector import LAST_REWARD, history_leaves, last_actions
from impala_async.errors import CheckpointError, ConfigError, EnvError
from impala_async.policy import Policy, build_policy
from impala_async.runs.folder import SPACES, RunFolder, locate
from impala_async.schema import ObsSpec, Schema, policy_leaf, recurrent_state
from impala_async.training.checkpoint import checkpoint_of, entry
from impala_async.user_code import one_line

State = Mapping[str, NDArray[np.float32]]


class Acted(NamedTuple):
    """The action as `env.step` takes it, the memory to pass on, and the action's log-probability:
    a number, or one for each observation of a batch."""

    action: Any
    state: Mapping[str, NDArray[Any]]
    log_prob: Any


class LoadedPolicy:
    """Acts as the policy of a checkpoint. `path` is that checkpoint's, `env_steps` how long it was
    trained; the spaces are those of its environment."""

    def __init__(
        self, config: RunConfig, spaces: tuple[Space[Any], Space[Any]], policy: str | None
    ) -> None:
        """Begin with new weights; `policy` names one of a team."""
        self.config = config
        self.observation_space, self.action_space = spaces
        self.path, self.env_steps = Path(), 0
        self._spaces = Spaces(*spaces, config.env)
        env, action = config.env, self._spaces.action_spec
        self._shown = last_actions(action) if env.last_action else {}
        self._has_reward = env.last_reward
        names = config.policies.names
        added = [*history_leaves(self._shown, has_reward=env.last_reward)]
        leaves = *self._spaces.obs_spec.leaves, *([policy_leaf(names)] if names else []), *added
        memory = recurrent_state(config.model.core, config.model.core_size)
        schema = Schema(ObsSpec(leaves), action, config.trajectory.rows, memory, names)
        self._team = build_policy(schema, config.model, config.policies, seed=config.seed)
        self._policy = _member(self._team.members, policy)
        self._generator = torch.Generator().manual_seed(config.seed)

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """RuntimeError if they are of another model or other spaces."""
        self._team.load_tensors(tensors)

    def seed(self, seed: int) -> None:
        """Let what is drawn from here on, where `act` is not greedy, depend on this number."""
        self._generator.manual_seed(seed)

    def act(
        self,
        obs: Any,
        state: Mapping[str, NDArray[Any]] | None = None,
        *,
        greedy: bool = True,
        reward: Any = None,
    ) -> Acted:
        """Choose for one observation, or for a batch of them in arrays with one axis more.

        `state` is the one of the last call, or None where an episode begins. That of a batch has a
        row for each, which is all zeros where an episode begins. `reward` is what the
        last action brought, for a policy that sees it (`env.last_reward`). `greedy` takes the
        likeliest action, else one is drawn.
        """
        is_batch, seen = self._read(obs)
        num_rows = len(next(iter(seen.values())))
        before = self._before(state, num_rows)
        seen |= {name: before.pop(name) for name in self._shown}
        if self._has_reward:
            seen[LAST_REWARD] = self._rewards(reward, state is None, num_rows)
        chosen = self._policy.act(seen, before, None if greedy else self._generator)
        after = {**chosen.state, **{n: chosen.actions[s.name] for n, s in self._shown.items()}}
        if is_batch:
            return Acted(self._spaces.batch(chosen.actions), after, chosen.log_probs)
        (action,) = self._spaces.each(chosen.actions)
        if isinstance(action, np.ndarray) and not action.shape:
            action = action[()]
        return Acted(action, after, float(chosen.log_probs[0]))

    def _read(self, obs: Any) -> tuple[bool, dict[str, NDArray[Any]]]:
        """Whether it is a batch, and its leaves as one; EnvError for what is not of the space."""
        leaves = self._spaces.leaves
        first = leaves[0].of(obs)
        is_batch = first is not None and np.ndim(first) == len(leaves[0].spec.shape) + 1
        rows = ObsRows(leaves, len(first) if is_batch else 1)
        if is_batch:
            return True, dict(rows.read(obs))
        rows.write(0, obs)
        rows.check_choices(rows.arrays)
        return False, dict(rows.arrays)

    def _before(
        self, state: Mapping[str, NDArray[Any]] | None, num_rows: int
    ) -> dict[str, NDArray[Any]]:
        first = {
            **self._policy.first_state(num_rows),
            **{
                name: np.zeros((num_rows, *spec.shape), spec.dtype)
                for name, spec in self._shown.items()
            },
        }
        if state is None:
            return first
        for name, array in first.items():
            found = np.shape(state[name]) if name in state else None
            if found != array.shape:
                wants = f"wants the one that the last call returned, with {name} of {array.shape}"
                raise ConfigError(f"state: {wants}, got {found}")
        return {name: state[name] for name in first}

    def _rewards(self, reward: Any, is_first: bool, num_rows: int) -> NDArray[np.float32]:
        if reward is None and not is_first:
            raise ConfigError("reward: this policy sees the last one (env.last_reward): pass it on")
        rewards = np.zeros(num_rows, np.float32)
        rewards[:] = 0 if reward is None else reward
        return rewards


def load_policy(
    path: str | Path,
    *,
    policy: str | None = None,
    spaces: tuple[Space[Any], Space[Any]] | None = None,
) -> LoadedPolicy:
    """The policy of a run folder's newest checkpoint, of its best, or of one checkpoint in it.

    `policy` names one of a team. `spaces` are the environment's observation and action spaces, for
    a run folder that lacks them (`spaces.json`), as of a run with `env.probe = "actor"`. Raises
    CheckpointError, ConfigError or EnvError, each with a line about it.
    """
    folder, checkpoints, named = locate(Path(path))
    checkpoint = checkpoint_of(checkpoints, named)
    loaded = LoadedPolicy(folder.load_config(), spaces or _spaces_in(folder), policy)
    try:
        loaded.load(checkpoint.tensors["model"])
    except (KeyError, RuntimeError) as error:
        raise CheckpointError(
            f"{checkpoint.path} does not fit the model and spaces of {folder.path}: "
            f"{one_line(error)}"
        ) from None
    loaded.path = checkpoint.path
    loaded.env_steps = entry(checkpoint.state, "env_steps_trained", int)
    return loaded


def _spaces_in(folder: RunFolder) -> tuple[Space[Any], Space[Any]]:
    text = folder.read_json(SPACES)
    if text is None:
        raise CheckpointError(
            f"{folder.path} has no {SPACES}, as env.probe was actor or another release made it: "
            "pass spaces=(env.observation_space, env.action_space)"
        )
    try:
        return from_json(text["observation"]), from_json(text["action"])
    except (KeyError, TypeError, ValueError, AssertionError, EnvError) as error:
        what = f"{type(error).__name__}: {one_line(error)}"
        raise CheckpointError(f"{folder.path / SPACES} is damaged: {what}") from None


def _member(members: Mapping[str, Policy], name: str | None) -> Policy:
    if name is None and len(members) == 1:
        return next(iter(members.values()))
    if name is None or name not in members:
        names = ", ".join(filter(None, members)) or "none: this run has one policy"
        raise ConfigError(f"policy: wants one of {names}, got {name}")
    return members[name]
