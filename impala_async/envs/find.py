"""Names to what they stand for: a gymnasium id, or a class or factory in a module.

Ids register themselves on the way: a module that is named before a colon is imported, Atari's
("ALE/...") imports ale_py, and another namespace asks the packages that announce it.
"""

import inspect
import re
from collections.abc import Callable
from importlib.machinery import PathFinder
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any

import gymnasium as gym
from gymnasium.envs import registration
from gymnasium.vector import VectorEnv

from impala_async import user_code
from impala_async.envs.faults import Blame
from impala_async.errors import EnvError
from impala_async.processes import signals_kept

# As its games were named before they had a namespace, or are without it.
ATARI = re.compile(r"([A-Z]\w+?)(NoFrameskip-v\d|Deterministic-v\d|-v[45])")
# We have none either.
NO_ENVS = user_code.NOT_A_USERS | {user_code.package_of(Blame)}
Factory = Callable[..., Any]


def find_env(env_id: str) -> str | Factory:
    """The gymnasium id, or the class or factory, that a name stands for."""
    _, has_module, name = env_id.rpartition(":")
    module = _import(env_id, env_id) if has_module else None
    entry = getattr(module, name, None)
    # The registered one goes first: it brings its time limit and wrappers.
    if module is not None and callable(entry) and name not in registration.registry:
        has_both = all(callable(getattr(entry, each, None)) for each in ("reset", "step"))
        # A learner may have sent the name: what cannot make an environment is not called.
        if not has_both and (isinstance(entry, type) or user_code.package_of(entry) in NO_ENVS):
            raise EnvError(
                f"env.id {env_id!r} is no environment: name a subclass of gymnasium.Env, or a "
                "function of your own that makes one"
            )
        return entry  # type: ignore[no-any-return]
    _load_namespace(name)
    if registered(name) is None and module is not None:
        close = user_code.close_name(name, module, registration.registry)
        why = f"{module.__name__} neither has nor registers {name!r}.{close}"
        if entry is not None:
            kind = type(entry).__name__
            why = f"wants a class, or a function that makes a new one each time, got a {kind}"
        raise EnvError(f"{env_id}: {why}")
    if registered(name) is None:
        _explain_unknown(name)
    return name


def find_callable(key: str, name: str) -> Factory:
    """The class or function that a setting names as package.module:Name."""
    with Blame(name, "to be imported"):
        found = user_code.import_callable(f"{key}: {name}", name, EnvError)
    if user_code.package_of(found) in NO_ENVS:
        raise EnvError(f"{key}: {name} is one of impala-async's own, and is not called")
    return found


def registered(gym_id: str) -> registration.EnvSpec | None:
    """gymnasium's spec of an id; an id without a version stands for the latest one."""
    try:
        namespace, name, version = registration.parse_env_id(gym_id)
    except gym.error.Error:
        return None
    if version is None:
        version = registration.find_highest_version(namespace, name)
    return registration.registry.get(registration.get_env_id(namespace, name, version))


def makes_vectors(found: str | Factory) -> bool:
    """Whether a class or factory, or what is registered, makes whole vectors of environments
    alone."""
    if isinstance(found, str):
        spec = registered(found)
        return spec is not None and spec.entry_point is None and bool(spec.vector_entry_point)
    if isinstance(found, type):
        return issubclass(found, VectorEnv)
    try:
        return "num_envs" in inspect.signature(found).parameters
    except (TypeError, ValueError):
        return False


@signals_kept()
def _import(env_id: str, name: str) -> ModuleType:
    with Blame(env_id, "to be imported"):
        return user_code.import_module(env_id, name, EnvError)


def _load_namespace(gym_id: str) -> None:
    namespace, has_namespace, _ = gym_id.partition("/")
    if not has_namespace or registered(gym_id) is not None:
        return
    if namespace == "ALE":
        _import(gym_id, f"ale_py:{gym_id}")
    for announced in entry_points(group="gymnasium.envs", name=namespace):
        with Blame(gym_id, f"to be registered by {announced.value}"):
            announced.load()()


def _explain_unknown(gym_id: str) -> None:
    try:
        gym.spec(gym_id)
    except gym.error.Error as error:
        # Some ids begin with the package that registers them when it is imported.
        package = re.split("[/-]", gym_id)[0].lower()
        hint = ""
        is_unlike = isinstance(error, gym.error.NameNotFound) and "Did you mean" not in str(error)
        if extra := user_code.EXTRAS.get(package):
            hint = f" It is {package}:{gym_id}, with pip install 'impala-async[{extra}]'."
        elif is_unlike and (found := ATARI.fullmatch(gym_id)):
            hint = f" If it is one of Atari's games, it is ALE/{found[1]}-v5."
        elif gym_id.isidentifier() and PathFinder.find_spec(gym_id) is not None:
            hint = f" It is a module: write {gym_id}:Name for a class or a function in it."
        elif is_unlike and all(part.isidentifier() for part in gym_id.split(".")) and "." in gym_id:
            module, _, name = gym_id.rpartition(".")
            hint = f" Write {module}:{name} for a class or a function."
        elif isinstance(error, gym.error.NamespaceNotFound) or "." in gym_id:
            hint = (
                f" Write package:{gym_id} for an environment that is registered when its package "
                "is imported, and package.module:Name for a class or a function."
            )
        raise EnvError(f"env.id {gym_id!r}: {user_code.one_line(error)}{hint}") from error
