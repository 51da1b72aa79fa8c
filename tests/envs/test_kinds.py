"""A kind of environments is a line of the table, and a module with its batch."""

from typing import Any

import gymnasium as gym
import pytest

from impala_async.config.env import EnvSection
from impala_async.config.section import Named
from impala_async.envs import make
from impala_async.envs.make import KINDS, build_envs
from impala_async.envs.vector import SerialEnvs
from impala_async.errors import EnvError


class Other:
    """An environment of another library: it has its own names for everything."""

    def __init__(self) -> None:
        self.inner = gym.make("CartPole-v1", disable_env_checker=True)


def watched(env: Other) -> Other:
    return env


def broken(env: Other) -> int:
    return 1


def step_others(envs: list[Any], options: Any, name: str) -> SerialEnvs:
    return SerialEnvs([env.inner for env in envs], options, name)


def other_env() -> Other:
    return Other()


def test_a_new_kind_is_made_wrapped_and_stepped(monkeypatch: pytest.MonkeyPatch) -> None:
    section = EnvSection(id=f"{__name__}:other_env", wrappers=[Named(name=f"{__name__}:watched")])
    with pytest.raises(EnvError, match=r"made a Other, which is no gymnasium\.Env and no parallel"):
        build_envs("auto", section, 2)
    kind = ("environment of others", lambda env: isinstance(env, Other), step_others)
    monkeypatch.setattr(make, "KINDS", (*KINDS, kind))
    envs = build_envs("auto", section, 2)
    assert (envs.num_envs, envs.reset(0)[""].shape) == (2, (2, 4))
    envs.close()
    section = EnvSection(id=f"{__name__}:other_env", wrappers=[Named(name=f"{__name__}:broken")])
    with pytest.raises(EnvError, match=r"broken made a int, .* and no environment of others"):
        build_envs("auto", section, 2)
