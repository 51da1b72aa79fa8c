"""Environments by name: one, a vector of them, or the batch that a sampler steps.

A name is a gymnasium id ("CartPole-v1"), an id that a module registers when it is imported
("package.module:Env-v0"), a class or factory in a module ("package.module:Name"), which gets no
time limit but its own. A class of gymnasium's VectorEnv, or a factory with a `num_envs` argument,
makes a whole vector at once. What makes a PettingZoo parallel environment makes columns of its
agents.
"""

import logging
import warnings
from typing import Any, Literal

import gymnasium as gym
from gymnasium.vector import VectorEnv

from impala_async.config.actor import SamplerName
from impala_async.config.env import EnvSection
from impala_async.config.policies import ONE_POLICY, PoliciesSection
from impala_async.envs.batch import EnvBatch
from impala_async.envs.faults import close_all
from impala_async.envs.find import blame, find_env, makes_vectors, registered
from impala_async.envs.kinds import is_no_kind, kind_of
from impala_async.envs.spaces import SpaceOptions
from impala_async.envs.vector import VectorEnvs
from impala_async.envs.wrappers import ATARI_VECTOR, WithHistory, is_atari, make_atari, wrap
from impala_async.errors import EnvError

logger = logging.getLogger(__name__)


def build_envs(
    sampler: SamplerName,
    section: EnvSection,
    num_envs: int,
    policies: PoliciesSection = ONE_POLICY,
) -> EnvBatch:
    """The batch of environments that a sampler steps.

    auto: the environment's own vector code where it can be used, else single ones in turn.
    Samplers with workers: what each of those steps, which is single ones where there are any.
    """
    if sampler == "auto":
        return build_usual(section, num_envs, policies)[1]
    if sampler == "vector" or (sampler != "serial" and _is_only_vector(section)):
        return _finish(_vector(section, num_envs, policies), section)
    return _finish(_serial(section, num_envs, policies), section)


def build_usual(
    section: EnvSection, num_envs: int, policies: PoliciesSection = ONE_POLICY
) -> tuple[Literal["serial", "vector"], EnvBatch]:
    """Build what `auto` takes where nothing is measured; return its name and the environments."""
    if _is_only_vector(section):
        return "vector", build_envs("vector", section, num_envs, policies)
    if _why_no_vector(section) is None:
        try:
            envs = _vector(section, num_envs, policies)
        except EnvError as error:
            serial = build_envs("serial", section, num_envs, policies)
            logger.warning("%s is stepped serially, its vector code cannot be used: %s",
                           section.id, error)  # fmt: skip
            return "serial", serial
        return "vector", _finish(envs, section)
    return "serial", build_envs("serial", section, num_envs, policies)


def _finish(envs: EnvBatch, section: EnvSection) -> EnvBatch:
    """Add what any batch may also show."""
    try:
        if section.last_action or section.last_reward:
            return WithHistory(envs, has_action=section.last_action, has_reward=section.last_reward)
    except EnvError:
        envs.close()
        raise
    return envs


def make_env(section: EnvSection) -> Any:
    """One environment, gymnasium's or PettingZoo's parallel one, in its wrappers.

    EnvError says what is wrong with the name, the arguments or a wrapper.
    """
    found = find_env(section.id)
    if callable(found) and makes_vectors(found):
        raise EnvError(
            f"{section.id} makes a whole vector of environments, and cannot be stepped serially: "
            "set actor.sampler to vector or auto"
        )
    with blame(section.id, _with(section)):
        if callable(found):
            env = found(**section.kwargs)
        elif section.preprocess == "auto" and is_atari(registered(found)):
            env = make_atari(found, section.kwargs)
        else:
            # The checker wraps every step for good, and what it would find is checked here anyway.
            env = gym.make(found, **{"disable_env_checker": True, **section.kwargs})
    if kind_of(env) is None:
        raise EnvError(f"{section.id} made {is_no_kind(env)}")
    return wrap(env, section.wrappers)


def make_vector_env(section: EnvSection, num_envs: int) -> VectorEnv[Any, Any, Any]:
    """The environment's own vector; EnvError when it has none."""
    why_not = _why_no_vector(section)
    if why_not is not None:
        raise EnvError(f"{section.id} {why_not}: set actor.sampler to serial or auto")
    found = find_env(section.id)
    if section.wrappers:
        raise EnvError(
            f"env.wrappers: {section.id} makes a whole vector of environments, and wrappers go "
            "around single ones: drop them, or put them on in a function that makes the vector"
        )
    with blame(section.id, _with(section)):
        if callable(found):
            env = found(num_envs=num_envs, **section.kwargs)
        else:
            env = _make_registered_vector(found, num_envs, section.kwargs)
    if not isinstance(env, VectorEnv):
        raise EnvError(
            f"{section.id} made a {type(env).__name__}, which is no gymnasium.vector.VectorEnv"
        )
    if env.num_envs != num_envs:
        raise EnvError(f"{section.id} made {env.num_envs} environments, asked for {num_envs}")
    return env


def _why_no_vector(section: EnvSection) -> str | None:
    """Why an environment cannot be stepped by vector code of its own, if it cannot."""
    found = find_env(section.id)
    if callable(found):
        return None if makes_vectors(found) else "makes single environments"
    spec = registered(found)
    if spec is None or spec.vector_entry_point is None:
        return "has no vector code of its own (no vector_entry_point)"
    if section.wrappers:
        return "has env.wrappers, which go around single environments"
    if is_atari(spec) and section.preprocess == "off":
        return "has vector code that preprocesses, and env.preprocess is off"
    return None


def _is_only_vector(section: EnvSection) -> bool:
    found = find_env(section.id)
    return callable(found) and makes_vectors(found)


def _serial(section: EnvSection, num_envs: int, policies: PoliciesSection) -> EnvBatch:
    envs: list[Any] = []
    try:
        envs.extend(make_env(section) for _ in range(num_envs))
        kind = kind_of(envs[0])
        assert kind is not None, "make_env refuses what is none"
        if policies.names and not kind.has_agents:
            raise _only_one_policy(section)
        return kind.batch(envs, _options(section), policies, section.id)
    except EnvError:
        close_all(envs, section.id)
        raise


def _vector(section: EnvSection, num_envs: int, policies: PoliciesSection) -> VectorEnvs:
    if policies.names:
        raise _only_one_policy(section)
    env = make_vector_env(section, num_envs)
    try:
        return VectorEnvs(env, _options(section), section.id)
    except EnvError:
        close_all([env], section.id)
        raise


def _only_one_policy(section: EnvSection) -> EnvError:
    return EnvError(
        f"policies.names: {section.id} has a single agent, and only the agents of a "
        "parallel environment of PettingZoo can have several: drop the section policies"
    )


def _options(section: EnvSection) -> SpaceOptions:
    return SpaceOptions(
        mask_key=section.action_mask_key,
        is_stacked=_is_stacked(section),
        is_squashed=section.squash_actions,
    )


def _is_stacked(section: EnvSection) -> bool:
    """Whether frames are stacked: `auto` says so of Atari that nobody else has wrapped."""
    if section.frame_stack != "auto":
        return section.frame_stack == "on"
    found = find_env(section.id)
    is_ours = not callable(found) and is_atari(registered(found)) and not section.wrappers
    return is_ours and section.preprocess == "auto"


def _make_registered_vector(gym_id: str, num_envs: int, kwargs: dict[str, Any]) -> Any:
    if is_atari(registered(gym_id)):
        kwargs = ATARI_VECTOR | kwargs
    with warnings.catch_warnings():
        # Missing metadata: `VectorEnvs` refuses it, and says how to mend it.
        warnings.filterwarnings("ignore", "(?s).*AutoresetMode", UserWarning)
        mode = gym.VectorizeMode.VECTOR_ENTRY_POINT
        return gym.make_vec(gym_id, num_envs=num_envs, vectorization_mode=mode, **kwargs)


def _with(section: EnvSection) -> str:
    return f"to be made with kwargs {section.kwargs}" if section.kwargs else "to be made"
