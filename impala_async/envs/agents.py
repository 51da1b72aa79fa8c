"""PettingZoo's parallel environments: each agent is a column.

All agents share one policy, or each is played by one of several for an episode of its environment.

Column `e * A + a` is agent a of the A possible agents of environment e. An agent's episode ends
with the agent; from then on its column is idle, until all agents of its environment are gone and
the next step resets that. So is the column of an agent that is not there yet.

    row         t            t+1                   ...            r                r+1
    agent dies  transition   final observation     repeated       repeated         first of the next
                             idle                  idle           idle, resets     episode
"""

import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import Space
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from impala_async.config.policies import ONE_POLICY, SHUFFLED, PoliciesSection
from impala_async.envs.batch import Actions, Obs, Step, as_flag, as_reward, spread_seed
from impala_async.envs.faults import RUNNING, Blame, close_all, env_name
from impala_async.envs.find import find_callable
from impala_async.envs.observations import ObsRows, short
from impala_async.envs.spaces import USUAL, SpaceOptions, Spaces
from impala_async.errors import EnvError
from impala_async.schema import ArraySpec, ObsSpec, policy_leaf


class PolicyMapping:
    """Numbers of policies, in the order of `policies.names`, for agents in theirs.

    An own function is called once here already, so that it fails before anything else is made.
    """

    def __init__(self, section: PoliciesSection, agents: Sequence[Any]) -> None:
        self.leaf: ArraySpec = policy_leaf(section.names)
        self.is_trained = np.array([name in section.trained for name in section.names])
        self._name = f"policies.mapping: {section.mapping}"
        self._agents = list(agents)
        self._names = section.names
        self._function: Callable[..., Any] | None = None
        if section.mapping != SHUFFLED:
            self._function = find_callable("policies.mapping", section.mapping)
        self.seed(0)
        self.draw()

    def seed(self, seed: int) -> None:
        # Not the stream that an environment has of the same seed: who begins must not tell who
        # plays whom.
        self._rng = np.random.default_rng((seed, 1))

    def draw(self) -> NDArray[np.uint8]:
        """For one environment and one episode; EnvError when an own function gives no answer."""
        if self._function is None:
            return self._shuffled()
        with Blame(self._name, "to say who plays whom"):
            given = self._function(list(self._agents), self._rng)
        names, agents = self._names, self._agents
        is_whole = isinstance(given, Mapping) and set(given) == set(agents)
        if not is_whole or any(name not in names for name in given.values()):
            raise EnvError(
                f"{self._name} must give a dict with a policy ({', '.join(names)}) for each agent "
                f"({', '.join(map(str, agents))}), it gave {' '.join(reprlib.repr(given).split())}"
            )
        return np.array([names.index(given[agent]) for agent in agents], np.uint8)

    def _shuffled(self) -> NDArray[np.uint8]:
        """In a random order, and again in another one while agents are left."""
        num_policies, num_agents = len(self._names), len(self._agents)
        num_rounds = -(-num_agents // num_policies)
        rounds = [self._rng.permutation(num_policies) for _ in range(num_rounds)]
        # Or the agents of a round would never be played by one policy.
        return self._rng.permutation(np.concatenate(rounds)[:num_agents].astype(np.uint8))


def is_parallel(env: Any) -> bool:
    """Whether all agents of an environment act at once (those that take turns have `last`)."""
    has_agents = not isinstance(env, gym.Env) and hasattr(env, "possible_agents")
    return has_agents and not hasattr(env, "last")


@dataclass
class _World:
    """One environment: the columns of its agents, who plays, and who has played."""

    env: Any
    columns: dict[Any, int]
    # Its own, so that who plays whom does not depend on what other environments drew.
    mapping: PolicyMapping | None
    playing: list[Any] = field(default_factory=list)
    seen: set[Any] = field(default_factory=set)
    gone: set[Any] = field(default_factory=set)
    """Those whose episode is over, and who are listed no more."""


class AgentEnvs:
    """Parallel environments, stepped one after the other; NEXT_STEP, with idle columns."""

    autoreset = AutoresetMode.NEXT_STEP

    def __init__(
        self,
        envs: Sequence[Any],
        options: SpaceOptions = USUAL,
        policies: PoliciesSection = ONE_POLICY,
        name: str | None = None,
    ) -> None:
        first = envs[0]
        self.name = name or env_name(first)
        self._stepping = Blame(self.name, "in step", len(envs))
        self._resetting = Blame(self.name, "in reset", len(envs))
        agents = list(first.possible_agents)
        with Blame(self.name, "to say what its spaces are"):
            observation_space, action_space = _shared_spaces(self.name, first, agents)
        self._worlds = [
            _World(
                env,
                {agent: index * len(agents) + i for i, agent in enumerate(agents)},
                PolicyMapping(policies, agents) if policies.names else None,
            )
            for index, env in enumerate(envs)
        ]
        self.num_envs = num_columns = len(envs) * len(agents)
        spaces = Spaces(observation_space, action_space, options)
        self.obs_spec, self.action_spec = spaces.obs_spec, spaces.action_spec
        self._adapt = spaces.each
        self._rows = ObsRows(spaces.leaves, num_columns)
        self._idle = np.zeros(num_columns, np.bool_)
        self._result = Step(
            self._rows.arrays,
            rewards=np.zeros(num_columns, np.float32),
            terminated=np.zeros(num_columns, np.bool_),
            truncated=np.zeros(num_columns, np.bool_),
            idle=self._idle,
        )
        mapping = self._worlds[0].mapping
        if mapping is not None:
            self._add_policies(mapping.leaf)

    def reset(self, seed: int, first_env: int = 0) -> Obs:
        """Start all environments anew, each with a seed of its own."""
        first_seed = spread_seed(seed) + first_env
        self._stepping.first = self._resetting.first = first_env
        with self._resetting:
            for index, world in enumerate(self._worlds):
                RUNNING.place[0] = first_env + index + 1
                if world.mapping is not None:
                    world.mapping.seed(first_seed + index)
                self._reset_world(world, first_seed + index)
            self._rows.check_choices(self._rows.arrays)
        return self._rows.arrays

    def step(self, actions: Actions) -> Step:
        """Step every environment, or reset it when its last agent has gone."""
        for array in (self._result.rewards, self._result.terminated, self._result.truncated):
            array.fill(0)
        self._idle.fill(True)
        with self._stepping:
            adapted = list(self._adapt(actions))
            for number, world in enumerate(self._worlds, self._stepping.first + 1):
                RUNNING.place[0] = number
                if world.playing:
                    self._step_world(world, adapted)
                else:
                    self._reset_world(world, None)
            self._rows.check_choices(self._rows.arrays)
        return self._result

    def close(self) -> None:
        close_all((world.env for world in self._worlds), self.name)

    def _add_policies(self, leaf: ArraySpec) -> None:
        """A leaf says who plays a column; its first values come with the first reset."""
        name, obs = leaf.name, self._rows.arrays
        if name in obs:
            raise EnvError(
                f"policies.names: the observation of {self.name} has a key {name!r} already, which "
                "is to say who plays: rename it by a wrapper (env.wrappers)"
            )
        self.obs_spec = ObsSpec((*self.obs_spec.leaves, leaf))
        self._policies = obs[name] = np.zeros(self.num_envs, leaf.dtype)
        self._result = self._result._replace(untrained=np.zeros(self.num_envs, np.bool_))

    def _reset_world(self, world: _World, seed: int | None) -> None:
        obs, _ = world.env.reset(seed=seed)
        untrained = self._result.untrained
        if world.mapping is not None and untrained is not None:
            columns = list(world.columns.values())
            self._policies[columns] = drawn = world.mapping.draw()
            untrained[columns] = ~world.mapping.is_trained[drawn]
        world.playing, world.seen, world.gone = [], set(), set()
        self._welcome(world, obs)
        if not world.playing:
            raise EnvError(f"{self.name} has no agents after a reset")

    def _step_world(self, world: _World, actions: list[Any]) -> None:
        env, columns, step = world.env, world.columns, self._result
        given = {agent: actions[columns[agent]] for agent in env.agents}
        obs, rewards, terminated, truncated, _ = env.step(given)
        playing = []
        for agent in world.playing:
            column = columns[agent]
            self._idle[column] = False
            step.rewards[column] = as_reward(rewards[agent])
            step.terminated[column] = is_terminated = as_flag(terminated[agent], "terminated")
            step.truncated[column] = is_truncated = as_flag(truncated[agent], "truncated")
            is_over = is_terminated or is_truncated
            # An agent that is gone may show nothing more: then its last observation stays.
            if agent in obs or not is_over:
                self._rows.write(column, obs[agent], " in step")
            if is_over:
                continue
            if agent not in env.agents:
                raise EnvError(f"{self.name}: {agent} is gone, neither terminated nor truncated")
            playing.append(agent)
        world.playing = playing
        if len(playing) < len(world.seen):
            self._look_for_the_dead(world, terminated, truncated)
        self._welcome(world, obs)

    def _look_for_the_dead(
        self, world: _World, terminated: dict[Any, Any], truncated: dict[Any, Any]
    ) -> None:
        """Refuse one that plays again: its column is idle, and would not show it.

        An agent may stay listed after its end, as long as its flags say so.
        """
        for agent in world.seen.difference(world.playing):
            if agent not in world.env.agents:
                world.gone.add(agent)
                continue
            is_over = terminated.get(agent, True) or truncated.get(agent, True)
            if agent in world.gone or not is_over:
                raise EnvError(
                    f"{self.name}: {agent} comes back after its end, and may do so only after a "
                    "reset"
                )

    def _welcome(self, world: _World, obs: dict[Any, Any]) -> None:
        """Let those play who are there for the first time since the reset."""
        for agent in world.env.agents:
            if agent not in world.seen:
                if agent not in world.columns:
                    raise EnvError(f"{self.name}: {agent} is not among its possible_agents")
                self._rows.write(world.columns[agent], obs[agent])
                world.seen.add(agent)
                world.playing.append(agent)


def _shared_spaces(name: str, env: Any, agents: list[Any]) -> list[Space[Any]]:
    """The spaces of all agents, who must have the same ones, since they share a policy."""
    if not agents:
        raise EnvError(f"{name} has no possible_agents")
    found = []
    for kind, look in (("observation", env.observation_space), ("action", env.action_space)):
        space = look(agents[0])
        for other in agents[1:]:
            if look(other) != space:
                raise EnvError(
                    f"{name}: a policy plays any agent, but the {kind} space of {agents[0]} is "
                    f"{short(space)} and that of {other} is {short(look(other))}: make them alike "
                    "by a wrapper (env.wrappers)"
                )
        found.append(space)
    return found
