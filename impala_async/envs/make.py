"""Environments by name: one, a vector of them, or the batch that a sampler steps.

A name is a gymnasium id ("CartPole-v1"), an id that a module registers when it is imported
("package.module:Env-v0"), or a class or factory in a module ("package.module:Name"), which gets
no time limit but its own. A class of gymnasium's VectorEnv, or a factory with a `num_envs`
argument, makes a whole vector at once.
"""

import difflib
import importlib.util
import inspect
import logging
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal

import gymnasium as gym
from gymnasium.envs import registration
from gymnasium.vector import VectorEnv

from impala_async.config import EnvSection
from impala_async.envs.faults import Blame, close_all, one_line
from impala_async.envs.vector import EnvBatch, SerialEnvs, VectorEnvs
from impala_async.errors import EnvError

logger = logging.getLogger(__name__)

Sampling = Literal["auto", "serial", "vector"]
Factory = Callable[..., Any]


def build_envs(sampler: Sampling, section: EnvSection, num_envs: int) -> EnvBatch:
    """The batch of environments that a sampler steps.

    auto: the environment's own vector code where it can be used, else single ones in turn.
    """
    if sampler == "serial":
        return _serial(section, num_envs)
    if sampler == "vector" or _is_only_vector(section):
        return _vector(section, num_envs)
    if not has_vector_env(section):
        return _serial(section, num_envs)
    try:
        return _vector(section, num_envs)
    except EnvError as error:
        envs = _serial(section, num_envs)
        logger.warning("%s is stepped serially, its vector code cannot be used: %s",
                       section.id, error)  # fmt: skip
        return envs


def make_env(section: EnvSection) -> gym.Env[Any, Any]:
    """One environment; EnvError says what is wrong with the name or the arguments."""
    found = _find(section.id)
    if callable(found) and _makes_vectors(found):
        raise EnvError(
            f"{section.id} makes a whole vector of environments, and cannot be stepped serially: "
            "set actor.sampler to vector or auto"
        )
    with Blame(section.id, _with(section)):
        if callable(found):
            env = found(**section.kwargs)
        else:
            # The checker wraps every step for good, and what it would find is checked here anyway.
            env = gym.make(found, **{"disable_env_checker": True, **section.kwargs})
    if not isinstance(env, gym.Env):
        raise EnvError(f"{section.id} made a {type(env).__name__}, which is no gymnasium.Env")
    return env


def make_vector_env(section: EnvSection, num_envs: int) -> VectorEnv[Any, Any, Any]:
    """The environment's own vector; EnvError when it has none."""
    found = _find(section.id)
    if not has_vector_env(section):
        raise EnvError(
            f"{section.id} has no vector code of its own (no vector_entry_point): set "
            "actor.sampler to serial or auto"
        )
    with Blame(section.id, _with(section)):
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


def has_vector_env(section: EnvSection) -> bool:
    """Whether an environment brings vector code of its own."""
    found = _find(section.id)
    if callable(found):
        return _makes_vectors(found)
    spec = _registered(found)
    return spec is not None and spec.vector_entry_point is not None


def _serial(section: EnvSection, num_envs: int) -> SerialEnvs:
    envs: list[gym.Env[Any, Any]] = []
    try:
        envs.extend(make_env(section) for _ in range(num_envs))
        return SerialEnvs(envs)
    except EnvError:
        close_all(envs)
        raise


def _vector(section: EnvSection, num_envs: int) -> VectorEnvs:
    env = make_vector_env(section, num_envs)
    try:
        return VectorEnvs(env)
    except EnvError:
        close_all([env])
        raise


def _is_only_vector(section: EnvSection) -> bool:
    found = _find(section.id)
    return callable(found) and _makes_vectors(found)


def _find(env_id: str) -> str | Factory:
    """The gymnasium id, or the class or factory, that a name stands for."""
    module_name, has_module, name = env_id.rpartition(":")
    if not has_module:
        if _registered(env_id) is None:
            _explain_unknown(env_id)
        return env_id
    with Blame(env_id, f"to import {module_name}"):
        module = importlib.import_module(module_name)
    # The registered one goes first: it brings its time limit and wrappers.
    if name in registration.registry:
        return name
    entry = getattr(module, name, None)
    if callable(entry):
        return entry  # type: ignore[no-any-return]
    if _registered(name) is None:
        raise EnvError(f"{env_id}: {_not_in(module, name)}")
    return name


def _registered(gym_id: str) -> registration.EnvSpec | None:
    """What gymnasium knows under an id; without a version, its latest."""
    if spec := registration.registry.get(gym_id):
        return spec
    try:
        namespace, name, version = registration.parse_env_id(gym_id)
    except gym.error.Error:
        return None
    latest = registration.find_highest_version(namespace, name)
    if version is not None or latest is None:
        return None
    return registration.registry.get(registration.get_env_id(namespace, name, latest))


def _explain_unknown(gym_id: str) -> None:
    """Raise what gymnasium has to say about an id that it does not know."""
    try:
        gym.spec(gym_id)
    except gym.error.NamespaceNotFound as error:
        raise EnvError(
            f"env.id {gym_id!r}: {one_line(error)} Write package:{gym_id} for an environment that "
            "is registered when its package is imported."
        ) from error
    except gym.error.Error as error:
        raise EnvError(f"env.id {gym_id!r}: {one_line(error)}{_colon_hint(gym_id)}") from error


def _colon_hint(gym_id: str) -> str:
    """For a name like package.module.Name, of a package that is there."""
    module, _, name = gym_id.rpartition(".")
    package = module.partition(".")[0]
    try:
        is_there = package.isidentifier() and importlib.util.find_spec(package) is not None
    except ValueError:  # __main__ has no spec
        is_there = False
    if not is_there:
        return ""
    return f" Write {module}:{name} for an environment that this module holds."


def _not_in(module: ModuleType, name: str) -> str:
    """Say that a module neither has nor registers a name, and which names come close."""
    names = [key for key, value in vars(module).items() if callable(value) and key[:1] != "_"]
    close = difflib.get_close_matches(name, [*names, *registration.registry], n=1)
    hint = f" Did you mean: `{close[0]}`?" if close else ""
    return f"{module.__name__} neither has nor registers {name!r}.{hint}"


def _makes_vectors(entry: Factory) -> bool:
    if isinstance(entry, type):
        return issubclass(entry, VectorEnv)
    try:
        return "num_envs" in inspect.signature(entry).parameters
    except (TypeError, ValueError):
        return False


def _make_registered_vector(gym_id: str, num_envs: int, kwargs: dict[str, Any]) -> Any:
    with warnings.catch_warnings():
        # Missing metadata: `VectorEnvs` refuses it, and says how to mend it.
        warnings.filterwarnings("ignore", "(?s).*AutoresetMode", UserWarning)
        mode = gym.VectorizeMode.VECTOR_ENTRY_POINT
        return gym.make_vec(gym_id, num_envs=num_envs, vectorization_mode=mode, **kwargs)


def _with(section: EnvSection) -> str:
    return f"to be made with kwargs {section.kwargs}" if section.kwargs else "to be made"
