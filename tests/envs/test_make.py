"""Environments by name: single ones, wrapped, and the batch that each sampler steps."""

import logging
import re
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Text
from gymnasium.vector import SyncVectorEnv

from bench.probes import Counting, CountingVector
from impala_async.config.actor import SamplerName
from impala_async.config.env import EnvSection
from impala_async.config.load import load_config
from impala_async.config.policies import PoliciesSection
from impala_async.config.section import Named
from impala_async.envs import make as make_module
from impala_async.envs.make import KINDS, build_envs, build_usual, make_env, wrap
from impala_async.envs.vector import SerialEnvs, VectorEnvs
from impala_async.errors import EnvError

HERE = "tests.envs.test_make"
PROBES = "bench.probes"
MODULE = "a_module_of_a_test"
BOX = Box(0, 1)
SINGLE, VECTOR = f"{PROBES}:Counting", f"{PROBES}:CountingVector"


def section(env_id, **kwargs):
    return EnvSection(id=env_id, kwargs=kwargs)


def fails(one, sampler="serial", num_envs=2):
    """The error of making these environments: one line."""
    with pytest.raises(EnvError) as caught:
        build_envs(sampler, one, num_envs)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2
    return str(caught.value)


def first_step(one, num_envs=2):
    """The first step of the batch that `auto` makes."""
    envs = build_envs("auto", one, num_envs)
    envs.reset(0)
    step = envs.step({"": np.zeros(num_envs, np.int32)})
    envs.close()
    return step


class Closing(Counting):
    """Remembers which have been made, and which closed; a third one cannot be made."""

    made, closed, spaces = [], [], {}

    def __init__(self):
        super().__init__()
        vars(self).update(self.spaces)
        if len(self.made) == 2:
            raise RuntimeError("no third one")
        self.made.append(self)

    def close(self):
        self.closed.append(self)


@pytest.fixture(autouse=True)
def nothing_made():
    Closing.made.clear()
    Closing.closed.clear()


# -------------------- single environments


def test_environments_are_made_with_their_arguments_and_without_gymnasiums_checker(module):
    env = made = make_env(section("CartPole-v1", max_episode_steps=3))
    env.reset(seed=0)
    assert [env.step(0)[3] for _ in range(3)] == [False, False, True]
    while made is not made.unwrapped:
        assert not isinstance(made, gym.wrappers.PassiveEnvChecker)
        made = made.env
    envs = build_envs("vector", section("CartPole-v1", max_episode_steps=3), 2)
    envs.reset(0)
    steps = [envs.step({"": np.array([0, 1], np.int32)}).truncated.tolist() for _ in range(3)]
    assert steps == [[False] * 2] * 2 + [[True] * 2]
    assert first_step(section(VECTOR, lengths=(1, 2)), 3).terminated.tolist() == [True, False, True]
    module.make = lambda length: Counting(length + 1)
    assert first_step(section(SINGLE, length=1)).terminated.all()
    assert not first_step(section(f"{MODULE}:make", length=1)).terminated.any()


@pytest.mark.skipif(not hasattr(gym.wrappers, "RepeatAction"), reason="gymnasium before 1.3")
def test_actions_are_repeated_as_the_page_says():
    page = (Path(__file__).resolve().parents[2] / "docs/environments.md").read_text("utf-8")
    (shown,) = re.findall(r"\{name = .*RepeatAction.*\}\}", page)
    one = load_config(None, [f"env.id={SINGLE}", "env.kwargs.length=6", f"env.wrappers=[{shown}]"])
    envs = build_envs("auto", one.env, 2)
    envs.reset(0)
    action = {"": np.array([0, 1], np.int32)}
    step = envs.step(action)
    assert step.rewards.tolist() == [1 + 2 + 3 + 4, 50]
    assert not step.terminated.any()
    step = envs.step(action)
    assert step.rewards.tolist() == [5 + 6, 31]
    assert step.terminated.all()
    assert one.env.frames_per_step == 4


def test_an_id_without_a_version_is_the_latest_which_gymnasium_tells():
    for sampler in ("serial", "vector"):
        with pytest.warns(UserWarning, match="Using the latest versioned environment"):
            build_envs(sampler, section("CartPole"), 2).close()


def test_what_is_wrong_with_a_name_or_an_argument_is_told_by_any_sampler():
    for sampler in ("serial", "vector", "auto"):
        assert "Did you mean: `CartPole`?" in fails(section("CartPoe-v1"), sampler)
        assert "'max_steps'" in fails(section("CartPole-v1", max_steps=2), sampler)
    with pytest.raises(EnvError, match=r"to be made with kwargs .*'lots'") as caught:
        make_env(section(f"{PROBES}:ActionReward", num_actions="lots"))
    assert caught.value.__cause__ is not None


def test_those_made_so_far_are_closed_when_a_later_one_fails():
    assert "no third one" in fails(section(f"{HERE}:Closing"), num_envs=4)
    assert len(Closing.made) == 2
    assert Closing.closed == Closing.made


def test_what_failed_first_is_told_though_they_cannot_be_closed(monkeypatch):
    def close(_):
        raise AttributeError("no simulator to stop")

    monkeypatch.setattr(Closing, "close", close)
    assert "no third one" in fails(section(f"{HERE}:Closing"), num_envs=4)
    Closing.made.clear()
    wrong = Named(name="gymnasium.wrappers:TimeLimit", kwargs={"size": "even"})
    with pytest.raises(EnvError, match="to wrap"):
        wrap(Closing(), [wrong])


def test_one_environment_is_not_stepped_in_two_columns(module):
    only = Counting()
    module.only = lambda: only
    one = section(f"{MODULE}:only")
    limit = Named(name="gymnasium.wrappers:TimeLimit", kwargs={"max_episode_steps": 9})
    wrapped = one.model_copy(update={"wrappers": (limit,)})
    for each in (one, wrapped):
        build_envs("serial", each, 1).close()
        assert f"{MODULE}:only made one environment twice: wants a new" in fails(each)


class Crooked(Counting):
    """It may fail to say what it wraps."""

    wraps_what = True

    @property
    def unwrapped(self):
        if self.wraps_what:
            return self
        raise RecursionError("too deep")


def test_an_environment_that_cannot_say_what_it_wraps_is_blamed(module):
    module.Crooked = Crooked
    build_envs("serial", section(f"{MODULE}:Crooked"), 1).close()
    module.Crooked = type("Crooked", (Crooked,), {"wraps_what": False})
    assert "failed to say what it wraps: RecursionError: too deep" in fails(
        section(f"{MODULE}:Crooked")
    )


def take_ctrl_c():
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class TakesCtrlC(Counting):
    """Takes a signal for itself, as simulators do."""

    def __init__(self):
        super().__init__()
        take_ctrl_c()

    def reset(self, **kwargs):
        take_ctrl_c()
        return super().reset(**kwargs)


class TakersOfCtrlC(SyncVectorEnv):
    def __init__(self, num_envs):
        super().__init__([TakesCtrlC] * num_envs)


def test_an_environment_keeps_no_signal_from_the_process_that_has_it(tmp_path, monkeypatch):
    taking = f"from {HERE} import *\ntake_ctrl_c()\n"
    (tmp_path / "takes_when_imported.py").write_text(taking)
    monkeypatch.syspath_prepend(tmp_path)
    before = signal.getsignal(signal.SIGINT)
    for sampler in ("serial", "vector", "auto"):
        name = "TakersOfCtrlC" if sampler == "vector" else "TakesCtrlC"
        envs = build_envs(sampler, section(f"takes_when_imported:{name}"), 1)
        assert signal.getsignal(signal.SIGINT) == before
        envs.reset(0)
        assert signal.getsignal(signal.SIGINT) == before
        del sys.modules["takes_when_imported"]


class ClosingVector(SyncVectorEnv):
    def __init__(self, num_envs):
        super().__init__([Closing] * num_envs)


@pytest.mark.parametrize("name", ["Closing", "ClosingVector"])
@pytest.mark.parametrize("key", [None, "last_reward", "last_action"])
def test_an_unsupported_environment_is_closed(monkeypatch, name, key):
    one, spaces, says = EnvSection(id=f"{HERE}:{name}"), {"action_space": Text(3)}, "supported are"
    if key is not None:
        one, spaces = one.model_copy(update={key: True}), {"observation_space": Dict({key: BOX})}
        says = f"env.{key}: the observation has a key of that name already"
    monkeypatch.setattr(Closing, "spaces", spaces)
    assert says in fails(one, "auto", 1)
    assert len(Closing.closed) == 1


# -------------------- what a sampler steps


def test_each_sampler_steps_what_it_can():
    for env_id, stepped in (
        ("CartPole-v1", {"serial": "serial", "vector": "vector", "auto": "vector"}),
        ("Acrobot-v1", {"serial": "serial", "auto": "serial"}),
        (SINGLE, {"serial": "serial", "auto": "serial"}),
        (VECTOR, {"vector": "vector", "auto": "vector"}),
    ):
        kinds = {"serial": SerialEnvs, "vector": VectorEnvs}
        # Workers step single environments where there are any.
        workers = stepped.get("serial") or stepped.get("vector")
        for sampler in get_args(SamplerName):
            kind = stepped.get(sampler, workers if sampler not in ("serial", "vector") else None)
            if kind is None:
                other = "serial" if sampler == "vector" else "vector"
                assert f"sampler to {other} or auto" in fails(section(env_id), sampler)
                continue
            envs = build_envs(sampler, section(env_id), 3)
            assert isinstance(envs, kinds[kind])
            assert (envs.name, envs.num_envs, len(envs.reset(0)[""])) == (env_id, 3, 3)
            envs.close()
        found, envs = build_usual(section(env_id), 2)
        assert found == stepped["auto"]
        envs.close()


def test_no_time_limit_is_none_for_every_sampler():
    endless = section("CartPole-v1", max_episode_steps=-1)
    assert isinstance(build_envs("auto", endless, 2), SerialEnvs)
    assert "set actor.sampler to serial or auto" in fails(endless, "vector")


def test_vector_code_shows_nothing_so_single_environments_are_taken_to_be_seen():
    seen = section("CartPole-v1", render_mode="human")
    assert isinstance(build_envs("auto", seen, 2), SerialEnvs)
    assert "vector code that shows nothing, and env.kwargs.render_mode is human: set" in fails(
        seen, "vector"
    )


def no_metadata(num_envs):
    env = CountingVector(num_envs)
    env.metadata = {}
    return env


class Unsaid(gym.vector.VectorEnv):
    """It does not say how many environments it has."""


def test_what_has_vector_code_alone_is_stepped_by_it_or_its_own_error_is_told(register):
    register("Alone-v0", entry_point=None, vector_entry_point=CountingVector)
    for sampler in ("auto", "vector", "parallel"):
        assert isinstance(build_envs(sampler, section("Alone-v0"), 2), VectorEnvs)
        assert "'length'" in fails(section("Alone-v0", length=4), sampler)
    assert "makes a whole vector of environments" in fails(section("Alone-v0"), "serial")


def test_vector_code_that_cannot_be_used_is_told_and_auto_falls_back(register, caplog):
    # The arguments of the second one suit the single environment only.
    register("NoMode-v0", entry_point=Counting, vector_entry_point=no_metadata)
    register("Other-v0", entry_point=Counting, vector_entry_point=CountingVector)
    for one, why in (
        (section("NoMode-v0"), "autoreset_mode'] is missing; set it to AutoresetMode.NEXT_STEP or"),
        (section("Other-v0", length=4), "'length'"),
    ):
        assert why in fails(one, "vector")
        with caplog.at_level(logging.WARNING):
            assert isinstance(build_envs("auto", one, 2), SerialEnvs)
        assert f"{one.id} is stepped serially, its vector code cannot be used" in caplog.text
        assert why in caplog.text


def test_a_vector_of_the_wrong_kind_or_size_is_refused(module):
    closed = []

    class Closing(CountingVector):
        def close(self):
            closed.append(self)

    Closing.__name__ = "CountingVector"
    module.too_many = lambda num_envs: Closing(num_envs + 1)
    module.none = lambda num_envs: Counting()
    module.unsaid = lambda num_envs: Unsaid()
    must = "environments, and must make a gymnasium.vector.VectorEnv of 2"
    for name, made in (
        ("too_many", "a CountingVector of 3"),
        ("none", "a Counting of no number of"),
        ("unsaid", "a Unsaid of no number of"),
    ):
        assert fails(section(f"{MODULE}:{name}"), "auto") == f"{MODULE}:{name} made {made} {must}"
    assert len(closed) == 1
    # No other sampler would help it.
    wrapped = EnvSection(id=f"{MODULE}:too_many", wrappers=["gymnasium.wrappers:ClipReward"])
    assert fails(wrapped, "vector").endswith("which go around single environments: drop these")


def test_a_life_that_ends_while_its_game_goes_on_ends_no_episode():
    pytest.importorskip("ale_py")
    pong = EnvSection(id="ALE/Pong-v5", kwargs={"life_loss_info": True})
    for sampler in ("auto", "vector", "serial"):
        assert "env.kwargs.life_loss_info ends an episode that goes on: use" in fails(pong, sampler)


# As ale_py's, whose games are stacks of frames.
class Game(gym.Env):
    observation_space, action_space = Box(0, 255, (4, 8, 8), np.uint8), gym.spaces.Discrete(2)


def test_atari_that_is_preprocessed_here_is_a_stack(register, monkeypatch):
    register("Pong-v9", entry_point="ale_py.env:AtariEnv")
    found = [make_module.is_atari(each) for each in ("Pong-v9", "CartPole-v1", Counting)]
    assert found == [True, False, False]
    register("Game-v0", entry_point=Game)
    monkeypatch.setattr(make_module, "is_atari", lambda found: found == "Game-v0")
    monkeypatch.setattr(make_module, "_make_atari", lambda gym_id, kwargs: Game())
    for settings, is_stack in (
        ({}, True),
        ({"frame_stack": "off"}, False),
        ({"preprocess": "off"}, False),
        ({"preprocess": "off", "frame_stack": "on"}, True),
        ({"wrappers": (f"{HERE}:watched",)}, False),
    ):
        envs = build_envs("auto", EnvSection(id="Game-v0", **settings), 1)
        assert envs.obs_spec.leaves[0].is_stack is is_stack, settings


# -------------------- wrappers


def add(env, summand=1.0):
    return gym.wrappers.TransformReward(env, lambda reward: reward + summand)


def double(env):
    return gym.wrappers.TransformReward(env, lambda reward: 2 * reward)


def no_env(env):
    return object()


def watched(env):
    return env


def named(name, **kwargs):
    return Named(name=f"{HERE}:{name}", kwargs=kwargs)


def test_the_first_wrapper_is_the_innermost():
    for wrappers, reward in (
        ([], 1),
        ([named("add"), named("double")], 4),
        ([named("double"), named("add")], 3),
        ([named("add", summand=10.0)], 11),
    ):
        assert first_step(EnvSection(id=SINGLE, wrappers=wrappers)).rewards.tolist() == [reward] * 2


@pytest.mark.parametrize(
    ("wrapper", "text"),
    [
        (named("ad"), "Did you mean: `add`?"),
        (named("add", sumand=2), "to wrap Closing with kwargs {'sumand': 2}: TypeError"),
        (named("no_env"), "no_env made a object, which is no gymnasium.Env"),
    ],
    ids=str,
)
def test_a_wrapper_that_fails_is_named_and_the_environment_closed(wrapper, text):
    with pytest.raises(EnvError) as caught:
        wrap(Closing(), [named("double"), wrapper])
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(Closing.closed) == 1


def spell(env):
    return gym.wrappers.TransformReward(env, str)


def test_a_fault_in_a_step_may_be_that_of_a_wrapper():
    with pytest.raises(EnvError, match=r"^wrapped .*: reward in step: wants a number, got '1"):
        first_step(EnvSection(id=SINGLE, wrappers=[named("spell")]))


def test_wrappers_go_around_single_environments_alone():
    cartpole = EnvSection(id="CartPole-v1", wrappers=(named("add"),))
    assert first_step(cartpole).rewards.tolist() == [2, 2]
    vector = EnvSection(id=VECTOR, wrappers=(named("add"),))
    for one in (cartpole, vector):
        assert "has env.wrappers, which go around single environments" in fails(one, "vector")
    assert "nor have env.wrappers or env.num_spares: drop these" in fails(vector, "auto")


# -------------------- kinds and policies


def test_a_new_kind_is_a_line_of_the_table_and_its_batch(module, monkeypatch):
    """An environment of another library has its own names for everything."""
    module.other_env = lambda: SimpleNamespace(inner=gym.make("CartPole-v1"))
    one = EnvSection(id=f"{MODULE}:other_env", wrappers=[named("watched")])
    assert "which is no gymnasium.Env and no parallel environment of PettingZoo" in fails(one)

    def step(envs, section):
        return SerialEnvs([env.inner for env in envs], section)

    kind = ("environment of others", lambda env: hasattr(env, "inner"), step)
    monkeypatch.setattr(make_module, "KINDS", (*KINDS, kind))
    envs = build_envs("auto", one, 2)
    assert (envs.num_envs, envs.reset(0)[""].shape) == (2, (2, 4))
    envs.close()


PAIR = PoliciesSection(names=("main", "other"))


def test_agents_are_dealt_policies_and_a_single_one_has_one():
    for sampler in ("auto", "serial"):
        one = EnvSection(id="tests.envs.test_agents:Lives", last_action=True)
        envs = build_envs(sampler, one, 2, PAIR)
        assert [leaf.name for leaf in envs.obs_spec.leaves] == ["", "policy", "last_action"]
        assert set(envs.reset(0)["policy"].tolist()) == {0, 1}
        envs.close()
    for env_id, sampler in (("CartPole-v1", "auto"), ("CartPole-v1", "vector"), (SINGLE, "serial")):
        with pytest.raises(EnvError, match=r"policies.names: .* has a single agent.*drop the sect"):
            build_envs(sampler, section(env_id), 2, PAIR)
