import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import Any

import gymnasium as gym
import pytest
from gymnasium.envs.registration import registry

from bench.probes import Counting, CountingVector
from impala_async.envs import find
from impala_async.envs.faults import Blame
from impala_async.envs.find import find_callable, find_env, makes_vectors, registered
from impala_async.errors import EnvError

PROBES = "bench.probes"


@pytest.fixture
def module() -> Iterator[ModuleType]:
    """A module that can be imported by name, with whatever a test puts into it."""
    made = ModuleType("a_module_of_a_test")
    sys.modules[made.__name__] = made
    yield made
    del sys.modules[made.__name__]


def test_a_registered_id_stands_for_itself() -> None:
    assert find_env("CartPole-v1") == "CartPole-v1"
    assert find_env("CartPole") == "CartPole"
    assert find_env("gymnasium.envs.classic_control:Acrobot-v1") == "Acrobot-v1"


def test_a_name_in_a_module_is_what_it_names() -> None:
    assert find_env(f"{PROBES}:Counting") is Counting
    assert find_callable("env.wrappers", f"{PROBES}:Counting") is Counting
    with pytest.raises(EnvError, match="Did you mean: `Counting`"):
        find_callable("env.wrappers", f"{PROBES}:Countig")
    with pytest.raises(EnvError, match="No module named 'no_such'"):
        find_callable("env.wrappers", "no_such:Thing")


def test_a_file_is_told_how_its_module_is_named() -> None:
    with pytest.raises(EnvError, match=r"^foo\.py:Env: a file .* write foo:Env, and have it in"):
        find_env("foo.py:Env")
    with pytest.raises(EnvError, match=r"write my\.foo:Env, "):
        find_callable("env.wrappers", "./my/foo.py:Env")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("./odd:Ok", "odd:Ok"),
        ("../odd:Ok", "odd:Ok"),
        ("my/odd:Ok", "my.odd:Ok"),
        ("/home/me/odd.py:Ok", "odd:Ok"),
        (".odd:Ok", "odd:Ok"),
    ],
)
def test_a_module_has_no_path(typed: str, meant: str) -> None:
    with pytest.raises(EnvError, match=f"^{re.escape(typed)}: .* without a path: write {meant}, "):
        find_env(typed)


@pytest.mark.parametrize(
    ("asked", "package"), [("MinAtar/NoSuch-v1", "minatar"), ("MiniGrid-NoSuch-v0", "minigrid")]
)
def test_an_id_of_a_package_that_is_not_imported_is_told_its_extra(
    asked: str, package: str
) -> None:
    with pytest.raises(EnvError) as caught:
        find_env(asked)
    says = f" It is {package}:{asked}, with pip install 'impala-async[{package}]'."
    assert str(caught.value).endswith(says)


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("Pong-v5", "ALE/Pong-v5"),
        ("PongNoFrameskip-v4", "ALE/Pong-v5"),
        ("SpaceInvaders-v4", "ALE/SpaceInvaders-v5"),
        ("Cartpole-v4", None),
        ("CartPole-v5", None),
        ("MyOwn-v0", None),
    ],
)
def test_an_atari_game_is_told_its_namespace(asked: str, meant: str | None) -> None:
    with pytest.raises(EnvError) as caught:
        find_env(asked)
    if meant is None:
        assert "Atari" not in str(caught.value)
    else:
        assert str(caught.value).endswith(f" If it is one of Atari's games, it is {meant}.")


def test_ids_without_a_version_are_their_latest() -> None:
    latest = registered("CartPole")
    assert latest is not None
    assert latest.id == "CartPole-v1"
    assert registered("CartPole-v9") is None
    assert registered("not an id") is None


def test_vectors_are_told_from_single_environments() -> None:
    assert makes_vectors(CountingVector)
    assert makes_vectors(lambda num_envs: None)
    assert not makes_vectors(Counting)
    assert not makes_vectors(lambda size: None)
    assert not makes_vectors(dict.fromkeys)


def test_a_missing_package_of_an_extra_is_told_with_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("ale_py", "minigrid"):
        # What is None in sys.modules cannot be imported, installed or not.
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(find, "registered", lambda gym_id: None)
    for env_id, extra in [
        ("ALE/Pong-v5", "atari"),
        ("ale_py:ALE/Pong-v5", "atari"),
        ("minigrid:MiniGrid-Empty-5x5-v0", "minigrid"),
    ]:
        with pytest.raises(EnvError) as caught:
            find_env(env_id)
        assert str(caught.value).endswith(f"; pip install 'impala-async[{extra}]'")
        assert "\n" not in str(caught.value)


def test_a_missing_package_that_we_do_not_know_is_told_without() -> None:
    with pytest.raises(EnvError) as caught:
        find_env("no_such_module:Thing-v0")
    assert "pip install" not in str(caught.value)
    assert str(caught.value).endswith(
        "; Python looks for no_such_module among what is installed on this host, in the current "
        "folder, and on PYTHONPATH"
    )


@pytest.mark.parametrize(("missing", "extra"), [("mujoco", "mujoco"), ("Box2D", "box2d")])
def test_what_gymnasium_misses_is_told_with_the_extra(missing: str, extra: str) -> None:
    error = gym.error.DependencyNotInstalled("not installed")
    error.__cause__ = ModuleNotFoundError(name=missing)
    with pytest.raises(EnvError) as caught, Blame("Cheetah", "to be made"):
        raise error
    assert str(caught.value) == (
        "Cheetah failed to be made: DependencyNotInstalled: not installed; pip install "
        f"'impala-async[{extra}]'"
    )


def test_what_is_there_but_cannot_be_called_is_told() -> None:
    with pytest.raises(
        EnvError, match=r"^env.wrappers: math:pi is of type float, and cannot be called"
    ):
        find.find_callable("env.wrappers", "math:pi")


def test_a_namespace_that_a_package_announces_is_registered(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def register() -> None:
        gym.register("Announced/Thing-v3", entry_point=Counting)

    def announced(*, group: str, name: str) -> list[EntryPoint]:
        points = [EntryPoint("Announced", "a_module_of_a_test:register", "gymnasium.envs")]
        return points if (group, name) == ("gymnasium.envs", "Announced") else []

    module.register = register  # type: ignore[attr-defined]
    monkeypatch.setattr(find, "entry_points", announced)
    try:
        assert find_env("Announced/Thing-v3") == "Announced/Thing-v3"
        del registry["Announced/Thing-v3"]
        assert find_env("a_module_of_a_test:Announced/Thing-v3") == "Announced/Thing-v3"
        # Known now, so nobody is asked again.
        monkeypatch.setattr(find, "entry_points", None)
        assert find_env("Announced/Thing-v3") == "Announced/Thing-v3"
    finally:
        del registry["Announced/Thing-v3"]


def test_a_namespace_that_nobody_announces_is_explained() -> None:
    with pytest.raises(EnvError, match="Write package:nowhere/Thing-v0"):
        find_env("nowhere/Thing-v0")


def test_a_package_that_fails_to_register_is_blamed(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def register() -> None:
        raise RuntimeError("no licence")

    def announced(**_: Any) -> list[EntryPoint]:
        return [EntryPoint("Announced", "a_module_of_a_test:register", "gymnasium.envs")]

    module.register = register  # type: ignore[attr-defined]
    monkeypatch.setattr(find, "entry_points", announced)
    with pytest.raises(EnvError, match="to be registered by a_module_of_a_test:register: Runtime"):
        find_env("Announced/Thing-v3")


@pytest.mark.parametrize(
    "name",
    ["subprocess:Popen", "os:system", "shutil:rmtree", "builtins:exec"],
)
def test_what_is_no_environment_is_refused_before_it_is_called(name: str) -> None:
    with pytest.raises(EnvError, match="no environment"):
        find_env(name)


def test_nor_is_it_called_by_way_of_a_module_of_ones_own(module: ModuleType) -> None:
    module.run = os.system  # type: ignore[attr-defined]
    module.later = partial(partial(subprocess.run), "true")  # type: ignore[attr-defined]
    module.Thing = type("Thing", (), {"step": print})  # type: ignore[attr-defined]
    for name in ("run", "later", "Thing"):
        with pytest.raises(EnvError, match="no environment"):
            find_env(f"{module.__name__}:{name}")
    with pytest.raises(EnvError, match="comes with Python"):
        find_callable("env.wrappers", f"{module.__name__}:run")


def test_classes_and_functions_that_make_environments_are_found(module: ModuleType) -> None:
    module.make = lambda: Counting()  # type: ignore[attr-defined]
    module.short = partial(Counting, length=2)  # type: ignore[attr-defined]
    module.Vector = CountingVector  # type: ignore[attr-defined]
    for name in ("make", "short", "Vector"):
        assert find_env(f"{module.__name__}:{name}") is getattr(module, name)
