"""Which policy plays which agent of an environment, drawn anew for every episode."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from impala_async.config.policies import SHUFFLED, PoliciesSection
from impala_async.envs.faults import Blame
from impala_async.envs.find import find_callable
from impala_async.errors import EnvError
from impala_async.spec import ArraySpec, policy_leaf


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
        self._function = None if section.mapping == SHUFFLED else self._find(section.mapping)
        self.seed(0)
        self.draw()

    def _find(self, name: str) -> Callable[..., Any]:
        try:
            return find_callable(name)
        except EnvError as error:
            raise EnvError(f"policies.mapping: {error}") from error

    def seed(self, seed: int) -> None:
        """What is drawn from here on follows from the seed."""
        # Not the stream that an environment has of the same seed: who begins must not tell who
        # plays whom.
        self._rng = np.random.default_rng((seed, 1))

    def draw(self) -> NDArray[np.uint8]:
        """For one environment and one episode; EnvError when an own function gives no answer."""
        if self._function is None:
            return self._shuffled()
        with Blame(self._name, "to say who plays whom"):
            given = self._function(list(self._agents), self._rng)
        if not isinstance(given, Mapping):
            raise EnvError(
                f"{self._name} must give a dict from agent to policy, it gave a "
                f"{type(given).__name__}"
            )
        for agent in given:
            if agent not in self._agents:
                raise EnvError(
                    f"{self._name} names {agent!r}, which is none of the agents "
                    f"({', '.join(map(str, self._agents))})"
                )
        return np.array([self._number(agent, given) for agent in self._agents], np.uint8)

    def _shuffled(self) -> NDArray[np.uint8]:
        """In a random order, and again in another one while agents are left."""
        num_policies, num_agents = len(self._names), len(self._agents)
        rounds = [
            self._rng.permutation(num_policies) for _ in range(-(-num_agents // num_policies))
        ]
        dealt = np.concatenate(rounds)[:num_agents].astype(np.uint8)
        # Or the agents of a round would never be played by one policy.
        return self._rng.permutation(dealt)

    def _number(self, agent: Any, given: Mapping[Any, Any]) -> int:
        if agent not in given:
            raise EnvError(f"{self._name} says nobody plays {agent}: every agent needs a policy")
        if given[agent] not in self._names:
            raise EnvError(
                f"{self._name} lets {given[agent]!r} play {agent}, which is none of "
                f"policies.names ({', '.join(self._names)})"
            )
        return self._names.index(given[agent])
