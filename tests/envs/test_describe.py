import json
import os
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, MultiDiscrete

from impala_async.config.actor import SamplerName
from impala_async.config.env import EnvSection
from impala_async.config.policies import ONE_POLICY, PoliciesSection
from impala_async.envs.agents import AgentEnvs
from impala_async.envs.describe import NUM_STEPS, describe, random_actions, read_answer, try_steps
from impala_async.envs.vector import SerialEnvs, WithHistory
from impala_async.errors import EnvError
from impala_async.schema import ActionPart, ActionSpec, ArraySpec, ObsSpec, policy_leaf
from tests.columns import flat_schema
from tests.envs.test_agents import Lives

ROOT = Path(__file__).resolve().parents[2]
CARTPOLE = flat_schema(4, 2, rows=1)

NOISY = """
import atexit, os, sys
from tests.envs.test_agents import Lives
print("imported")
atexit.register(print, "exiting")

class Noisy(Lives):
    def __init__(self):
        super().__init__()
        print("made")
        os.write(1, b"made by C code\\n")
        print("torch" in sys.modules, file=sys.stderr)

    def close(self):
        print("closed")
"""


def ask(env, sampler="auto", policies=ONE_POLICY, path=None):
    """The answer of a child."""
    dumped = [part.model_dump(mode="json") for part in (env, policies)]
    asked = {"env": dumped[0], "sampler": sampler, "policies": dumped[1]}
    return subprocess.run(
        [sys.executable, "-m", "impala_async.envs.describe"],
        input=json.dumps(asked).encode(),
        capture_output=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{path}"},
        timeout=60,
    )


def section(env_id, **kwargs):
    return EnvSection(id=env_id, kwargs=kwargs)


def described(env, sampler="auto"):
    with ExitStack() as opened:
        return describe(env, sampler, opened=opened)


def test_an_environment_is_described_as_it_is_stepped():
    for sampler in get_args(SamplerName):
        answer = described(section("CartPole-v1"), sampler)
        assert read_answer(json.dumps(answer).encode()) == (CARTPOLE.obs, CARTPOLE.action, 1)
    vector = section("bench.probes:CountingVector")
    assert described(vector, "vector")["obs"]["leaves"][0]["shape"] == (3,)
    with pytest.raises(EnvError, match="cannot be stepped serially"):
        described(vector, "serial")


def test_a_child_answers_with_spaces_and_columns_whatever_the_environment_prints(tmp_path):
    (tmp_path / "noisy_module.py").write_text(NOISY)
    policies = PoliciesSection(names=("main", "other"))
    child = ask(section("noisy_module:Noisy"), "serial", policies, tmp_path)
    assert child.returncode == 0, child.stderr
    assert child.stdout.count(b"\n") == 1
    shown = ArraySpec("", (3,), "float32"), policy_leaf(("main", "other"))
    assert read_answer(child.stdout) == (ObsSpec(shown), CARTPOLE.action, 2)
    said = child.stderr.decode().split("\n")
    expected = ["imported", "made", "made by C code", "closed", "exiting", "False"]
    assert set(expected) <= set(said), "all of it goes to stderr, and torch was not there"


CLOSING = """
import os
from bench.probes import Counting

class Closing(Counting):
    def reset(self, **how):
        os.closerange(3, 256)
        return super().reset(**how)
"""


def test_an_environment_that_closes_what_is_not_its_own_is_named(tmp_path):
    (tmp_path / "closing_module.py").write_text(CLOSING)
    child = ask(section("closing_module:Closing"), "serial", path=tmp_path)
    assert (child.returncode, child.stdout) == (2, b"")
    told = b"error: closing_module:Closing closed a descriptor that is not its own (Bad file descri"
    assert told in child.stderr
    assert b"Traceback" not in child.stderr


def test_an_error_is_answered_on_one_line():
    for env, text in (
        (section("bench.probes:Failing", after=1), "failed in step: RuntimeError: this probe"),
        (section("tests.actor.worlds:Unmade", how="KeyboardInterrupt"), "KeyboardInterrupt"),
    ):
        child = ask(env)
        assert (child.returncode, child.stdout.count(b"\n")) == (2, 1)
        with pytest.raises(EnvError, match=f"^{env.id}.* {text}") as caught:
            read_answer(child.stdout)
        assert str(caught.value) == json.loads(child.stdout)["error"]


def test_what_is_no_answer_or_no_schema_is_refused_as_such():
    for answer in (b"", b"[]", b"{}", b"\xff", b"Traceback", b'{"obs": 1}', b"1"):
        with pytest.raises(EnvError, match="answered nonsense"):
            read_answer(answer)
    for leaf, text in (
        (ArraySpec("a\nb", (2,), "float32"), "a part with an unprintable name"),
        (ArraySpec("", (), "int64", (2**40,)), "obs.leaves.0.choices.0"),
        (ArraySpec("", (2**20, 2**10), "uint8"), "lower trajectory.rows"),
    ):
        spaces = {"obs": asdict(ObsSpec((leaf,))), "action": asdict(CARTPOLE.action)}
        with pytest.raises(EnvError, match=f"^its spaces are refused: .*{text}"):
            read_answer(json.dumps({**spaces, "num_columns": 1}).encode())


class Patient(gym.Env[Any, Any]):
    """Does as it should, but for what a test changes."""

    observation_space = Dict(look=Box(-1, 1, (2,)), action_mask=Box(0, 1, (5,), np.int8))
    action_space = MultiDiscrete([2, 3])
    mask = (0, 1, 1, 0, 1)
    reward = 0.0
    look = 0.0
    length = 10

    def reset(self, *, seed=None, options=None):
        self.age = 0
        self.actions = getattr(self, "actions", [])
        return self.show(), {}

    def step(self, action):
        self.actions.append(action.tolist())
        self.age += 1
        return self.show(), self.reward, self.age == self.length, False, {}

    def show(self):
        look = np.float32([0, self.look])
        is_over = self.age == self.length
        return {"look": look, "action_mask": np.int8([0] * 5 if is_over else self.mask)}


def test_a_sound_environment_is_played_through_the_ends_of_episodes_by_legal_actions():
    env = Patient()
    try_steps(SerialEnvs([env]))
    # Every eleventh step resets, and an end may forbid everything.
    assert len(env.actions) == NUM_STEPS - NUM_STEPS // 11
    assert {first for first, _ in env.actions} == {1}
    assert {second for _, second in env.actions} == {0, 2}


def test_an_agent_that_comes_later_has_no_legal_action_yet():
    space = Dict(x=Box(0, 9, (3,), np.float32), action_mask=Box(0, 1, (2,), np.int8))
    mask = np.int8([0, 1])

    def masked(world, obs):
        obs.update({agent: {"x": x, "action_mask": mask} for agent, x in obs.items()})

    world = Lives((9, 9), starts=[0, 2], change=masked)
    world.observation_space = lambda agent: space
    for policies in (ONE_POLICY, PoliciesSection(names=("main", "other"))):
        try_steps(AgentEnvs([world], EnvSection(id="Lives"), policies))


class WholeNumber(Patient):
    observation_space = Dict(n=Box(-(2**63), 2**63 - 1, (), np.int64))

    def __init__(self, value):
        self.value = value

    def show(self):
        return {"n": np.int64(7 if self.age == 0 else self.value)}


def test_what_no_learner_could_train_on_is_named():
    for change, says in (
        ({"reward": np.nan}, "Patient: step gave a reward that is not finite: nan"),
        ({"reward": -np.inf}, "step gave a reward that is not finite: -inf"),
        ({"reward": 1e38}, "step gave a reward that is beyond 1e+15: 1e+38"),
        ({"look": 1e38}, "Patient: reset gave an observation 'look' that is beyond 1e+15: 1e+38"),
        ({"look": np.nan}, "Patient: reset gave an observation 'look' that is not finite"),
        ({"mask": (1, 1, 0, 0, 0)}, "gave a mask of legal actions, 'action_mask', without"),
        ({"mask": (0, 0, 1, 1, 1)}, "without any legal one: every item of an action needs at"),
    ):
        kind = type("Patient", (Patient,), change)
        # The value of the column at fault is shown, not that of the other.
        with pytest.raises(EnvError) as caught:
            try_steps(SerialEnvs([Patient(), kind()], EnvSection(id="Patient")))
        assert says in str(caught.value)
    for value in (10**15 + 1, -(2**63)):
        with pytest.raises(EnvError, match=r"step gave an observation 'n' that is beyond 1e\+15"):
            try_steps(SerialEnvs([WholeNumber(value)]))


def test_the_first_number_outside_its_box_is_told_of_once(capfd):
    for change, wrapped, says in (
        ({"look": 1.0}, SerialEnvs, ""),
        ({"look": 7.5}, SerialEnvs, "Patient: look is 7.5, outside its Box of -1.0 to 1.0: "),
        ({"look": -1.25}, with_history, "look is -1.25, outside"),
        ({"mask": (0, 1, 1, 0, 3)}, SerialEnvs, "action_mask is 3, outside its Box of 0 to 1"),
    ):
        kind = type("Patient", (Patient,), change)
        try_steps(wrapped([Patient(), kind()]))
        told = capfd.readouterr().err
        assert told.count("\n") == bool(says)
        assert says in told


def with_history(envs):
    return WithHistory(SerialEnvs(envs), has_action=True, has_reward=True)


def test_random_actions_have_the_shapes_and_the_dtypes_of_their_parts():
    go, keys = ActionPart("go", "discrete", (4,)), ActionPart("keys", "discrete", (2, 2, 3), (3,))
    spec = ActionSpec((go, keys, ActionPart("push", "continuous", (), (2, 2))))
    actions = random_actions(spec, {}, 500, np.random.default_rng(3))
    for part in spec.parts:
        values = actions[part.name]
        assert (values.shape, values.dtype) == ((500, *part.shape), part.array.dtype)
    assert set(actions["go"]) == {0, 1, 2, 3}
    assert actions["keys"].max(0).tolist() == [1, 1, 2]
    assert abs(actions["push"].std() - 1) < 0.1
