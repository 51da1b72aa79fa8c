"""The kinds of single environments: how each is told, and the batch that steps those of it.

A new kind is a line of `KINDS`, and a module with its batch.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium as gym

from impala_async.config.policies import PoliciesSection
from impala_async.envs.agents import AgentEnvs, is_parallel
from impala_async.envs.batch import EnvBatch
from impala_async.envs.spaces import SpaceOptions
from impala_async.envs.vector import SerialEnvs


class Kind(NamedTuple):
    """`has_agents`: several policies can play it, which its batch is told of."""

    what: str
    fits: Callable[[Any], bool]
    batch: Callable[[list[Any], SpaceOptions, PoliciesSection, str], EnvBatch]
    has_agents: bool = False


def _serial(envs: list[Any], options: SpaceOptions, _: PoliciesSection, name: str) -> EnvBatch:
    return SerialEnvs(envs, options, name)


KINDS = (
    Kind("gymnasium.Env", lambda env: isinstance(env, gym.Env), _serial),
    Kind("parallel environment of PettingZoo", is_parallel, AgentEnvs, has_agents=True),
)


def kind_of(env: Any) -> Kind | None:
    """The kind of an environment, if it is one."""
    return next((kind for kind in KINDS if kind.fits(env)), None)


def is_no_kind(env: Any) -> str:
    """Say in a clause that something is no environment."""
    nots = " and ".join(f"no {kind.what}" for kind in KINDS)
    return f"a {type(env).__name__}, which is {nots}"
