import os
import subprocess
import sys
from functools import partial
from importlib.metadata import EntryPoint

import gymnasium as gym
import pytest
from gymnasium.envs.registration import registry
from numpy.testing import runstring

from bench.probes import Counting, CountingVector
from impala_async import __main__ as console
from impala_async.envs import find
from impala_async.envs.find import find_callable, find_env, makes_vectors, registered
from impala_async.errors import EnvError

PROBES = "bench.probes"
MODULE = "a_module_of_a_test"


def test_an_id_stands_for_itself_and_a_name_in_a_module_for_what_it_names(module, register):
    for env_id in ("CartPole-v1", "CartPole"):
        assert find_env(env_id) == env_id
    assert find_env("gymnasium.envs.classic_control:Acrobot-v1") == "Acrobot-v1"
    assert find_env(f"{PROBES}:Counting") is Counting
    assert find_callable("env.wrappers", f"{PROBES}:Counting") is Counting
    module.make = lambda: Counting()
    module.short = partial(Counting, length=2)
    module.Vector = CountingVector
    for name in ("make", "short", "Vector"):
        assert find_env(f"{MODULE}:{name}") is getattr(module, name)
    # A registered one brings its time limit, and goes before a class of its name.
    module.Twice = Counting
    register("Twice", entry_point=Counting, max_episode_steps=1)
    assert find_env(f"{MODULE}:Twice") == "Twice"


def test_ids_without_a_version_are_their_latest():
    found = [registered(each) for each in ("CartPole", "CartPole-v0", "CartPole-v9", "not an id")]
    assert [spec and spec.id for spec in found] == ["CartPole-v1", "CartPole-v0", None, None]


def test_vectors_are_told_from_single_environments():
    assert all(map(makes_vectors, (CountingVector, lambda num_envs: None)))
    single = (Counting, lambda size: None, dict.fromkeys, "CartPole-v1")
    assert not any(map(makes_vectors, single))


EXTRA = "It is {0}:{1}, with pip install 'impala-async[{0}]'."
PYTHONS = "name a subclass of gymnasium.Env, or a function of your own that makes one"
GAME = "If it is one of Atari's games, it is ALE/{}-v5."


@pytest.mark.filterwarnings("ignore:.*Overriding environment")  # where minatar is installed
def test_an_unknown_name_is_an_error_that_helps(monkeypatch):
    # Another test may have imported ale_py, which registers older names of its games.
    for env_id in [each for each, spec in registry.items() if "ale_py" in str(spec.entry_point)]:
        monkeypatch.delitem(registry, env_id)
    for env_id, text in (
        ("CartPoe-v1", "Did you mean: `CartPole`?"),
        ("CartPole-v7", "versioned environments: [ `v0`, `v1` ]."),
        ("Nothing-v0", "`Nothing` doesn't exist."),
        ("not an id", "(namespace is optional))"),
        ("MiniGrid-NoSuch-v0", EXTRA.format("minigrid", "MiniGrid-NoSuch-v0")),
        ("MinAtar/NoSuch-v1", EXTRA.format("minatar", "MinAtar/NoSuch-v1")),
        ("nowhere/Thing-v0", "Write package:nowhere/Thing-v0 for an env"),
        ("json.decoder.Maze", "exist. Write json.decoder:Maze for a class or a function."),
        ("__main__", "`__main__` doesn't exist."),
        ("colorsys", "exist. It is a module: write colorsys:Name for a class or a fun"),
        ("Pong-v5", GAME.format("Pong")),
        ("SpaceInvadersNoFrameskip-v4", GAME.format("SpaceInvaders")),
        ("Cartpole-v4", "Did you mean: `CartPole`?"),
        ("CartPole-v5", "versioned environments: [ `v0`, `v1` ]."),
        (f"{PROBES}:Countng", "Did you mean: `Counting`?"),
        (f"{PROBES}:Nothing-v0", "neither has nor registers 'Nothing-v0'."),
        (
            f"{PROBES}:__name__",
            "wants a class, or a function that makes a new one each time, got a str",
        ),
        ("no_such:Thing-v0", "; Python looks for no_such among what is installed"),
        (":Thing", "Empty module name"),
        ("my/odd:Ok", "write my.odd:Ok, and have it in the current folder or on PYTHONPATH"),
        ("subprocess:Popen", PYTHONS),
        ("os:system", PYTHONS),
        ("builtins:exec", PYTHONS),
    ):
        with pytest.raises(EnvError) as caught:
            find_env(env_id)
        assert text in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_missing_package_of_an_extra_is_told_with_the_extra(monkeypatch):
    for name in ("ale_py", "minigrid"):
        # A module that is None in sys.modules cannot be imported, installed or not.
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


def test_what_is_no_environment_or_no_wrapper_is_not_called(module):
    for name, text in (
        (f"{PROBES}:Countig", "Did you mean: `Counting`"),
        ("math:pi", r"^env.wrappers: math:pi is of type float, and cannot be called"),
        ("os:system", "comes with Python"),
        ("numpy.testing:runstring", "or with what impala-async needs"),
        ("impala_async.files:find_bytes", "is one of impala-async's own, and is not called"),
    ):
        with pytest.raises(EnvError, match=text):
            find_callable("env.wrappers", name)
    # By way of a module of one's own.
    module.run = os.system
    module.later = partial(partial(subprocess.run), "true")
    module.text, module.door = runstring, partial(console.main, [])
    module.Thing = type("Thing", (), {"step": print})
    for name in ("run", "later", "text", "door", "Thing"):
        with pytest.raises(EnvError, match="no environment"):
            find_env(f"{MODULE}:{name}")


def test_a_namespace_that_a_package_announces_is_registered(module, monkeypatch):
    def announced(*, group, name):
        points = [EntryPoint("Announced", f"{MODULE}:register", "gymnasium.envs")]
        return points if (group, name) == ("gymnasium.envs", "Announced") else []

    def fail():
        raise RuntimeError("no licence")

    monkeypatch.setattr(find, "entry_points", announced)
    module.register = fail
    with pytest.raises(EnvError, match=f"to be registered by {MODULE}:register: Runtime"):
        find_env("Announced/Thing-v3")
    module.register = partial(gym.register, "Announced/Thing-v3", entry_point=Counting)
    try:
        assert find_env("Announced/Thing-v3") == "Announced/Thing-v3"
        del registry["Announced/Thing-v3"]
        assert find_env(f"{MODULE}:Announced/Thing-v3") == "Announced/Thing-v3"
        # Known now, so nobody is asked again.
        monkeypatch.setattr(find, "entry_points", None)
        assert find_env("Announced/Thing-v3") == "Announced/Thing-v3"
    finally:
        del registry["Announced/Thing-v3"]
