import logging
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.registration import registry
from gymnasium.vector import SyncVectorEnv, VectorEnv

from bench import probes
from bench.probes import Counting, CountingVector, Probe
from impala_async.config.env import EnvSection
from impala_async.config.policies import PoliciesSection
from impala_async.envs.make import build_envs, build_usual, make_env, make_vector_env
from impala_async.envs.vector import SerialEnvs, VectorEnvs
from impala_async.errors import EnvError

PROBES = "bench.probes"


def section(env_id: str, **kwargs: Any) -> EnvSection:
    return EnvSection(id=env_id, kwargs=kwargs)


def no_metadata(num_envs: int) -> CountingVector:
    env = CountingVector(num_envs)
    env.metadata = {}
    return env


def too_many(num_envs: int) -> CountingVector:
    return CountingVector(num_envs + 1)


def no_vector(num_envs: int) -> Counting:
    return Counting()


class Closed(Counting):
    """Counts how many were made and closed; fails to be made as the third."""

    num_made = 0
    num_closed = 0

    def __init__(self) -> None:
        super().__init__()
        if Closed.num_made == 2:
            raise RuntimeError("no third one")
        Closed.num_made += 1

    def close(self) -> None:
        Closed.num_closed += 1


@pytest.fixture
def registered() -> Iterator[Callable[..., str]]:
    """Registers environments for the length of a test."""
    ids = []

    def register(env_id: str, **arguments: Any) -> str:
        gym.register(env_id, **arguments)
        ids.append(env_id)
        return env_id

    yield register
    for env_id in ids:
        del registry[env_id]


@pytest.fixture
def module() -> Iterator[ModuleType]:
    """A module that can be imported by name, with whatever a test puts into it."""
    made = ModuleType("a_module_of_a_test")
    sys.modules[made.__name__] = made
    yield made
    del sys.modules[made.__name__]


def fails(env_id: str, make: Callable[[EnvSection], Any] = make_env, **kwargs: Any) -> str:
    """The error of making this environment: one line."""
    with pytest.raises(EnvError) as caught:
        make(section(env_id, **kwargs))
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Acrobot-v1", "MountainCar-v0"])
def test_gymnasium_ids_are_made_with_their_time_limit(env_id: str) -> None:
    env = make_env(section(env_id, max_episode_steps=3))
    env.reset(seed=0)
    assert [env.step(0)[3] for _ in range(3)] == [False, False, True]
    env.close()


def test_a_class_in_a_module_is_made_with_its_arguments() -> None:
    env = make_env(section(f"{PROBES}:Counting", length=1))
    assert isinstance(env, Counting)
    env.reset()
    assert env.step(np.int64(0))[2]


def test_a_factory_in_a_module_is_called_with_its_arguments(module: ModuleType) -> None:
    module.make = lambda length: Counting(length + 1)  # type: ignore[attr-defined]
    env = make_env(section("a_module_of_a_test:make", length=1))
    env.reset()
    assert not env.step(np.int64(0))[2]


def test_an_id_that_a_module_registers_is_found_behind_its_name() -> None:
    env = make_env(section("gymnasium.envs.classic_control:Acrobot-v1"))
    assert env.spec is not None
    assert env.spec.id == "Acrobot-v1"
    env.close()


def test_a_registered_name_goes_before_a_class_of_that_name(
    module: ModuleType, registered: Callable[..., str]
) -> None:
    module.Twice = Counting  # type: ignore[attr-defined]
    registered("Twice", entry_point=Counting, max_episode_steps=1, kwargs={"length": 9})
    env = make_env(section("a_module_of_a_test:Twice"))
    env.reset()
    assert env.step(np.int64(0))[3], "the class alone has no time limit"


def test_an_id_without_a_version_is_the_latest_and_says_so() -> None:
    with pytest.warns(UserWarning, match="Using the latest versioned environment"):
        env = make_env(section("CartPole"))
    assert env.spec is not None
    assert env.spec.id == "CartPole-v1"
    with pytest.warns(UserWarning, match="Using the latest versioned environment"):
        vector = make_vector_env(section("CartPole"), 2)
    assert vector.num_envs == 2
    vector.close()


def test_an_old_version_is_made_and_says_that_it_is_old() -> None:
    with pytest.warns(DeprecationWarning, match="out of date"):
        make_env(section("CartPole-v0"))


@pytest.mark.parametrize(
    ("env_id", "text"),
    [
        ("CartPoe-v1", "Did you mean: `CartPole`?"),
        ("CartPole-v7", "versioned environments: [ `v0`, `v1` ]"),
        ("Nothing-v0", "`Nothing` doesn't exist"),
        ("json.decoder.Maze", "Write json.decoder:Maze for an environment"),
        ("nowhere/Thing-v0", "package:nowhere/Thing-v0"),
        ("not an id", "Malformed environment ID"),
        (f"{PROBES}:Countng", "Did you mean: `Counting`?"),
        (f"{PROBES}:Nothing-v0", "neither has nor registers 'Nothing-v0'"),
        ("no_such_module:Thing", "No module named 'no_such_module'"),
        (":Thing", "Empty module name"),
    ],
)
@pytest.mark.parametrize(
    "make", [make_env, lambda s: make_vector_env(s, 2), lambda s: build_envs("auto", s, 2)]
)
def test_an_unknown_name_is_an_error_that_helps(
    env_id: str, text: str, make: Callable[[EnvSection], Any]
) -> None:
    assert text in fails(env_id, make)


def test_a_dotted_name_of_no_package_gets_no_hint() -> None:
    assert "Write" not in fails("no_such_package.Maze", make_env)
    assert "Write" not in fails(".Maze", make_env)


def test_a_module_that_breaks_is_an_error_with_its_cause(tmp_path: Any, monkeypatch: Any) -> None:
    (tmp_path / "broken_module.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(EnvError, match="import broken_module: ZeroDivisionError") as caught:
        make_env(section("broken_module:Thing"))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_typo_in_the_arguments_is_named() -> None:
    assert "'lenth'" in fails(f"{PROBES}:Counting", lenth=2)
    assert "'max_steps'" in fails("CartPole-v1", max_steps=2)
    assert "'max_steps'" in fails("CartPole-v1", lambda s: make_vector_env(s, 2), max_steps=2)
    assert "'max_steps'" in fails("CartPole-v1", lambda s: build_envs("auto", s, 2), max_steps=2)


def test_a_failing_constructor_keeps_its_cause() -> None:
    with pytest.raises(EnvError, match=r"to be made with kwargs .*'lots'") as caught:
        make_env(section(f"{PROBES}:ActionReward", num_actions="lots"))
    assert caught.value.__cause__ is not None


def test_what_is_no_environment_is_refused(module: ModuleType) -> None:
    module.make = lambda: object()  # type: ignore[attr-defined]
    assert "made a object, which is no gymnasium.Env and" in fails("a_module_of_a_test:make")


def test_the_checker_does_not_wrap_every_step() -> None:
    env: Any = make_env(section("CartPole-v1"))
    while env is not env.unwrapped:
        assert not isinstance(env, gym.wrappers.PassiveEnvChecker)
        env = env.env


def test_serial_makes_so_many_environments() -> None:
    envs = build_envs("serial", section("CartPole-v1"), 3)
    assert isinstance(envs, SerialEnvs)
    assert envs.num_envs == len(envs.reset(0)[""]) == 3
    envs.close()


def test_vector_makes_the_vector_code_of_the_environment_with_its_time_limit() -> None:
    envs = build_envs("vector", section("CartPole-v1", max_episode_steps=4), 3)
    assert isinstance(envs, VectorEnvs)
    envs.reset(0)
    actions = {"": np.array([0, 1, 0], np.int32)}
    steps = [envs.step(actions).truncated.tolist() for _ in range(4)]
    assert steps == [[False] * 3] * 3 + [[True] * 3]
    envs.close()


def test_vector_is_refused_without_vector_code() -> None:
    text = fails("Acrobot-v1", lambda s: build_envs("vector", s, 2))
    assert "vector_entry_point" in text
    assert "serial or auto" in text


def test_auto_takes_vector_code_where_there_is_some() -> None:
    assert isinstance(build_envs("auto", section("CartPole-v1"), 2), VectorEnvs)
    assert isinstance(build_envs("auto", section("Acrobot-v1"), 2), SerialEnvs)
    assert isinstance(build_envs("auto", section(f"{PROBES}:CountingVector"), 2), VectorEnvs)
    assert isinstance(build_envs("auto", section(f"{PROBES}:Counting"), 2), SerialEnvs)


def test_auto_falls_back_and_says_why_when_vector_code_cannot_be_used(
    registered: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    registered("NoMode-v0", entry_point=Counting, vector_entry_point=no_metadata)
    with caplog.at_level(logging.WARNING):
        envs = build_envs("auto", section("NoMode-v0"), 2)
    assert isinstance(envs, SerialEnvs)
    assert "autoreset_mode" in caplog.text
    # The arguments suit the single environment only.
    caplog.clear()
    registered("Other-v0", entry_point=Counting, vector_entry_point=CountingVector)
    assert isinstance(build_envs("auto", section("Other-v0", length=4), 2), SerialEnvs)
    assert "'length'" in caplog.text


def test_missing_metadata_is_refused_with_the_fix(registered: Callable[..., str]) -> None:
    registered("NoMode-v0", entry_point=Counting, vector_entry_point=no_metadata)
    text = fails("NoMode-v0", lambda s: build_envs("vector", s, 2))
    assert "autoreset_mode'] is missing; set it to AutoresetMode.NEXT_STEP or" in text


def test_a_vector_class_in_a_module_gets_its_number_of_columns() -> None:
    envs = build_envs("vector", section(f"{PROBES}:CountingVector", lengths=(1, 2)), 3)
    envs.reset(0)
    step = envs.step({"": np.zeros(3, np.int32)})
    assert step.terminated.tolist() == [True, False, True]


def test_a_vector_class_cannot_be_stepped_serially() -> None:
    text = fails(f"{PROBES}:CountingVector", lambda s: build_envs("serial", s, 2))
    assert "vector or auto" in text


def test_a_vector_of_the_wrong_kind_or_size_is_refused(module: ModuleType) -> None:
    module.too_many = too_many  # type: ignore[attr-defined]
    module.no_vector = no_vector  # type: ignore[attr-defined]

    def make(one: EnvSection) -> object:
        return build_envs("auto", one, 2)

    assert "of 3 environments, and must make a gymnasium.vector.VectorEnv of 2" in fails(
        "a_module_of_a_test:too_many", make
    )
    assert "made a Counting of no environments" in fails("a_module_of_a_test:no_vector", make)


def test_those_made_so_far_are_closed_when_a_later_one_fails(module: ModuleType) -> None:
    module.Closed = Closed  # type: ignore[attr-defined]
    assert "no third one" in fails(
        "a_module_of_a_test:Closed", lambda s: build_envs("serial", s, 4)
    )
    assert (Closed.num_made, Closed.num_closed) == (2, 2)


def test_an_unsupported_environment_is_closed(module: ModuleType) -> None:
    class Wordy(gym.Env):
        observation_space = gym.spaces.Box(0, 1, (1,))
        action_space = gym.spaces.Text(3)
        closed: list[object] = []  # noqa: RUF012

        def close(self) -> None:
            self.closed.append(self)

    class WordyVector(SyncVectorEnv):
        def __init__(self, num_envs: int) -> None:
            super().__init__([Wordy] * num_envs)

    module.Wordy = Wordy  # type: ignore[attr-defined]
    module.WordyVector = WordyVector  # type: ignore[attr-defined]
    for name in ("Wordy", "WordyVector"):
        text = fails(f"a_module_of_a_test:{name}", lambda s: build_envs("auto", s, 2))
        assert "supported are Discrete" in text
        assert len(Wordy.closed) == 2
        Wordy.closed.clear()


def test_an_environment_whose_keys_are_taken_is_closed(module: ModuleType) -> None:
    class Taken(Counting):
        closed: list[object] = []  # noqa: RUF012

        def __init__(self) -> None:
            super().__init__()
            self.observation_space = gym.spaces.Dict(last_reward=gym.spaces.Box(0, 1))

        def close(self) -> None:
            self.closed.append(self)

    module.Taken = Taken  # type: ignore[attr-defined]
    taken = EnvSection(id="a_module_of_a_test:Taken", last_reward=True)
    with pytest.raises(EnvError, match=r"env\.last_reward: the observation has a key"):
        build_envs("auto", taken, 2)
    assert len(Taken.closed) == 2


def test_probes_are_found_by_name() -> None:
    kinds = [kind for kind in vars(probes).values() if isinstance(kind, type)]
    names = [kind.__name__ for kind in kinds if kind.__module__ == PROBES and kind is not Probe]
    assert len(names) >= 10
    for name in names:
        envs = build_envs("auto", section(f"{PROBES}:{name}"), 2)
        envs.reset(0)
        assert envs.step({"": np.zeros(2, np.int32)}).rewards.shape == (2,)
        envs.close()


# -------------------------------------------------------------------------------------- wrappers


TENFOLD = {"name": "gymnasium.wrappers:TransformReward", "kwargs": {"func": lambda r: 10 * r}}


def wrapped(env_id: str, *wrappers: Any) -> EnvSection:
    return EnvSection(id=env_id, wrappers=wrappers)


def test_wrappers_go_around_each_single_environment() -> None:
    one = wrapped(f"{PROBES}:Counting", TENFOLD, "gymnasium.wrappers:FlattenObservation")
    for sampler in ("serial", "auto"):
        envs = build_envs(sampler, one, 2)  # type: ignore[arg-type]
        assert isinstance(envs, SerialEnvs)
        envs.reset(0)
        assert envs.step({"": np.zeros(2, np.int32)}).rewards.tolist() == [10, 10]


def test_wrappers_keep_auto_from_vector_code() -> None:
    one = wrapped("CartPole-v1", TENFOLD)
    envs = build_envs("auto", one, 2)
    assert isinstance(envs, SerialEnvs)
    envs.close()


@pytest.mark.parametrize("env_id", ["CartPole-v1", f"{PROBES}:CountingVector"])
def test_wrappers_are_refused_around_vector_code(env_id: str) -> None:
    with pytest.raises(EnvError, match=r"env\.wrappers.*single") as caught:
        build_envs("vector", wrapped(env_id, TENFOLD), 2)
    assert "\n" not in str(caught.value)


def test_a_function_may_wrap_the_vector_that_it_makes(module: ModuleType) -> None:
    """As the docs advise."""

    def make_tenfold(num_envs: int) -> VectorEnv[Any, Any, Any]:
        envs = CountingVector(num_envs=num_envs)
        return gym.wrappers.vector.TransformReward(envs, lambda rewards: 10 * rewards)

    module.make_tenfold = make_tenfold  # type: ignore[attr-defined]
    envs = build_envs("auto", section("a_module_of_a_test:make_tenfold"), 2)
    assert isinstance(envs, VectorEnvs)
    envs.reset(0)
    assert envs.step({"": np.zeros(2, np.int32)}).rewards.tolist() == [10, 10]
    envs.close()


PAIR = PoliciesSection(names=("main", "other"))
LIVES = "tests.envs.test_agents:Lives"


def test_agents_are_dealt_policies_whatever_the_sampler_may_be() -> None:
    for sampler in ("auto", "serial"):
        envs = build_envs(sampler, section(LIVES), 2, PAIR)  # type: ignore[arg-type]
        assert [leaf.name for leaf in envs.obs_spec.leaves] == ["", "policy"]
        envs.close()
    with_history = EnvSection(id=LIVES, last_action=True)
    envs = build_envs("auto", with_history, 2, PAIR)
    assert [leaf.name for leaf in envs.obs_spec.leaves] == ["", "policy", "last_action"]
    assert set(envs.reset(0)["policy"].tolist()) == {0, 1}
    envs.close()


@pytest.mark.parametrize(
    ("env_id", "sampler"),
    [("CartPole-v1", "auto"), ("CartPole-v1", "vector"), (f"{PROBES}:Counting", "serial")],
)
def test_a_single_agent_has_one_policy(env_id: str, sampler: Any) -> None:
    with pytest.raises(EnvError, match=r"policies.names: .* has a single agent.*drop the section"):
        build_envs(sampler, section(env_id), 2, PAIR)


@pytest.mark.parametrize("sampler", ["parallel", "alternating"])
def test_workers_step_single_environments_where_there_are_any(sampler: Any) -> None:
    envs = build_envs(sampler, section("CartPole-v1"), 2)
    assert isinstance(envs, SerialEnvs)
    envs.close()
    envs = build_envs(sampler, section(f"{PROBES}:CountingVector"), 2)
    assert isinstance(envs, VectorEnvs)
    envs.close()


def test_the_usual_batch_says_what_it_is() -> None:
    for env_id, name in (("CartPole-v1", "vector"), (f"{PROBES}:Counting", "serial")):
        found, envs = build_usual(section(env_id), 2)
        assert found == name
        envs.close()
