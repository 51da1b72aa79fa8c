"""PettingZoo's parallel environments: each agent is a column, played by a policy for an episode.

Column `e * A + a` is agent a of the A possible agents of environment e. It is idle from the row
after the agent's end until all are gone and the next step resets them; and before an agent comes.
"""

import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from impala_async.config.env import EnvSection
from impala_async.config.policies import ONE_POLICY, SHUFFLED, PoliciesSection
from impala_async.envs.batch import BOOL, FLOAT, Actions, Step, as_numbers
from impala_async.envs.faults import RUNNING, Blame, env_name
from impala_async.envs.find import find_callable
from impala_async.envs.spaces import short
from impala_async.envs.vector import OwnEnvs, reset_one
from impala_async.errors import EnvError
from impala_async.schema import ObsSpec, policy_leaf

Deal = Callable[[np.random.Generator], NDArray[np.uint8]]
"""Draws for one environment and one episode: a number of a policy for each agent."""


def make_deal(section: PoliciesSection, agents: Sequence[Any]) -> Deal:
    """Who plays whom: numbers in the order of `policies.names`, for agents in theirs."""
    names, whose = section.names, f"policies.mapping: {section.mapping}"
    if section.mapping == SHUFFLED:
        num_rounds = -(-len(agents) // len(names))

        def shuffle(rng: np.random.Generator) -> NDArray[np.uint8]:
            """Deal all policies in a random order, and again in another while agents are left."""
            rounds = np.concatenate([rng.permutation(len(names)) for _ in range(num_rounds)])
            # Or the agents of a round would never be played by one policy.
            return rng.permutation(rounds[: len(agents)].astype(np.uint8))

        return shuffle
    function = find_callable("policies.mapping", section.mapping)

    def deal(rng: np.random.Generator) -> NDArray[np.uint8]:
        with Blame(whose, "to say who plays whom"):
            given = function(list(agents), rng)
        is_whole = isinstance(given, Mapping) and set(given) == set(agents)
        if not is_whole or any(name not in names for name in given.values()):
            raise EnvError(
                f"{whose} must give a dict with a policy ({', '.join(names)}) for each agent "
                f"({', '.join(map(str, agents))}), it gave {' '.join(reprlib.repr(given).split())}"
            )
        return np.array([names.index(given[agent]) for agent in agents], np.uint8)

    deal(np.random.default_rng(0))  # so that it fails before anything else is made
    return deal


def is_parallel(env: Any) -> bool:
    """Whether all agents of an environment act at once: others have `agent_iter`."""
    has_agents = not isinstance(env, gym.Env) and hasattr(env, "possible_agents")
    return has_agents and not hasattr(env, "agent_iter")


@dataclass
class _World:
    """One environment: the columns of its agents, who plays, and who has played."""

    env: Any
    columns: dict[Any, int]
    # Its own, so that who plays whom does not depend on what other environments drew.
    rng: np.random.Generator = field(default_factory=np.random.default_rng)
    playing: list[Any] = field(default_factory=list)
    seen: set[Any] = field(default_factory=set)


class AgentEnvs(OwnEnvs):
    """Parallel environments, stepped one after the other; NEXT_STEP, with idle columns."""

    def __init__(
        self,
        envs: Sequence[Any],
        section: EnvSection | None = None,
        policies: PoliciesSection = ONE_POLICY,
    ) -> None:
        agents, num_envs = _agents_of(envs[0]), len(envs)
        super().__init__(envs, section, _shared_spaces, num_envs * len(agents), num_envs)
        self._worlds = [
            _World(env, {agent: i for i, agent in enumerate(agents, e * len(agents))})
            for e, env in enumerate(envs)
        ]
        self._idle = np.zeros(self.num_envs, np.bool_)
        self._result = self._result._replace(idle=self._idle)
        self._deal: Deal | None = None
        if not policies.names:
            return
        # A leaf says who plays a column; its first values come with the first reset.
        self._deal, leaf = make_deal(policies, agents), policy_leaf(policies.names)
        if leaf.name in self._rows.arrays:
            raise EnvError(
                f"policies.names: the observation of {self.name} has a key {leaf.name!r} already, "
                "which is to say who plays: rename it by a wrapper (env.wrappers)"
            )
        self.obs_spec = ObsSpec((*self.obs_spec.leaves, leaf))
        self._policies = self._rows.arrays[leaf.name] = np.zeros(self.num_envs, leaf.dtype)
        self._is_untrained = np.array([name not in policies.trained for name in policies.names])
        self._untrained = np.zeros(self.num_envs, np.bool_)
        self._result = self._result._replace(untrained=self._untrained)

    def step(self, actions: Actions) -> Step:
        for array in (self._result.rewards, self._result.terminated, self._result.truncated):
            array.fill(0)
        self._idle.fill(True)
        with self._stepping:
            adapted = list(self.spaces.each(actions))
            for index, world in enumerate(self._worlds):
                RUNNING.place[0] = self._stepping.first + index + 1
                if world.playing:
                    self._step_world(world, adapted)
                else:
                    with self._resetting:
                        self._reset_env(index, None)
            self._rows.check_choices(self._rows.arrays)
        return self._result

    def _reset_env(self, index: int, seed: int | None) -> None:
        world = self._worlds[index]
        if seed is not None:
            # Not what an environment draws of the same seed: who begins must not tell who plays.
            world.rng = np.random.default_rng((seed, 1))
        obs = reset_one(world.env, seed)
        if self._deal is not None:
            columns = list(world.columns.values())
            self._policies[columns] = dealt = self._deal(world.rng)
            self._untrained[columns] = self._is_untrained[dealt]
        world.playing, world.seen = [], set()
        self._look_at_agents(world, obs)
        if not world.playing:
            raise EnvError(f"{self.name} has no agents after a reset")

    def _step_world(self, world: _World, actions: list[Any]) -> None:
        env, columns, step = world.env, world.columns, self._result
        given = {agent: actions[columns[agent]] for agent in env.agents}
        obs, rewards, terminated, truncated, _ = env.step(given)
        playing = []
        for agent in world.playing:
            column = columns[agent]
            reward = self._part(rewards, agent, "rewards")
            is_terminated = self._part(terminated, agent, "terminations")
            is_truncated = self._part(truncated, agent, "truncations")
            self._idle[column] = False
            step.rewards[column] = as_numbers(reward, "reward", FLOAT)
            step.terminated[column] = as_numbers(is_terminated, "terminated", BOOL)
            step.truncated[column] = as_numbers(is_truncated, "truncated", BOOL)
            is_over = step.terminated[column] or step.truncated[column]
            # An agent that is gone may show nothing more: then its last observation stays.
            if not is_over or obs.get(agent) is not None:
                self._rows.write(column, self._part(obs, agent, "observations"), " in step")
            if is_over:
                continue
            if agent not in env.agents:
                raise EnvError(f"{self.name}: {agent} is gone, neither terminated nor truncated")
            playing.append(agent)
        world.playing = playing
        self._look_at_agents(world, obs, terminated, truncated)

    def _part(self, given: Mapping[Any, Any], agent: Any, what: str) -> Any:
        try:
            return given[agent]
        except KeyError:
            told = f"its {what} must have all agents that act, and lack {agent}"
            raise EnvError(f"{self.name} in step: {told}") from None

    def _look_at_agents(self, world: _World, obs: dict[Any, Any], *flags: dict[Any, Any]) -> None:
        """Let those play who are listed for the first time since the reset.

        One that plays again is refused: its column is idle, and would not show it. After its end
        an agent may stay listed as long as one of its flags says so.
        """
        for agent in world.env.agents:
            if agent not in world.seen:
                if agent not in world.columns:
                    raise EnvError(f"{self.name}: {agent} is not among its possible_agents")
                self._rows.write(world.columns[agent], obs[agent])
                world.seen.add(agent)
                world.playing.append(agent)
            elif agent not in world.playing and not any(each.get(agent) for each in flags):
                raise EnvError(f"{self.name}: {agent} comes back after its end without a reset")


def _agents_of(env: Any) -> list[Any]:
    return [] if env.possible_agents is None else list(env.possible_agents)


def _shared_spaces(env: Any) -> tuple[gym.Space[Any], gym.Space[Any]]:
    if not (agents := _agents_of(env)):
        raise EnvError(f"{env_name(env)} has no possible_agents")
    first, *others = agents
    for kind, look in (("observation", env.observation_space), ("action", env.action_space)):
        for other in others:
            if look(other) != look(first):
                raise EnvError(
                    f"{env_name(env)}: a policy plays any agent, but the {kind} space of {first} "
                    f"is {short(look(first))} and that of {other} is {short(look(other))}: make "
                    "them alike by a wrapper (env.wrappers)"
                )
    return env.observation_space(first), env.action_space(first)
