import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

from impala_async.config.actor import SamplerName
from impala_async.config.env import EnvSection
from impala_async.config.policies import PoliciesSection
from impala_async.envs.describe import describe, read_answer
from impala_async.errors import EnvError
from impala_async.spec import ActionPart, ActionSpec, ArraySpec, ObsSpec, Schema, policy_leaf

ROOT = Path(__file__).resolve().parents[2]
CARTPOLE = (
    ObsSpec((ArraySpec("", (4,), "float32"),)),
    ActionSpec((ActionPart("", "discrete", (2,)),)),
)

NOISY = """
import atexit, os, sys
import gymnasium as gym
import numpy as np
print("imported")
atexit.register(print, "exiting")

class Noisy(gym.Env):
    observation_space = gym.spaces.Dict({"a": gym.spaces.Box(0, 255, (2, 3), np.uint8)})
    action_space = gym.spaces.Discrete(3)

    def __init__(self):
        print("made")
        os.write(1, b"made by C code\\n")
        print("torch" in sys.modules, file=sys.stderr)

    def reset(self, *, seed=None, options=None):
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), 0.0, False, False, {}

    def close(self):
        print("closed")
"""


def ask(section: str, *args: str, path: Path | None = None) -> subprocess.CompletedProcess[bytes]:
    """What a child answers."""
    return subprocess.run(
        [sys.executable, "-m", "impala_async.envs.describe", *args],
        input=section.encode(),
        capture_output=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{path}"},
        timeout=60,
    )


def section(env_id: str, **kwargs: Any) -> EnvSection:
    return EnvSection(id=env_id, kwargs=kwargs)


def test_an_environment_is_described_by_its_spaces() -> None:
    assert describe(section("CartPole-v1")) == (*CARTPOLE, 1)
    obs, action, _ = describe(section("Acrobot-v1"), "serial")
    assert obs == ObsSpec((ArraySpec("", (6,), "float32"),))
    assert action.parts[0].choices == (3,)


def test_the_sampler_decides_what_is_described() -> None:
    vector = section("bench.probes:CountingVector")
    obs, *_ = describe(vector, "vector")
    assert obs == ObsSpec((ArraySpec("", (3,), "float32"),))
    with pytest.raises(EnvError, match="cannot be stepped serially"):
        describe(vector, "serial")


def test_a_child_answers_with_what_a_schema_is_made_of() -> None:
    child = ask(section("CartPole-v1").model_dump_json(), "serial")
    assert child.returncode == 0, child.stderr
    assert read_answer(child.stdout) == (*CARTPOLE, 1)
    raw = json.loads(child.stdout) | {"rows": 7, "state": []}
    assert Schema.from_json(json.dumps(raw).encode()) == Schema(*CARTPOLE, rows=7)


def test_what_an_environment_prints_does_not_spoil_the_answer(tmp_path: Path) -> None:
    (tmp_path / "noisy_module.py").write_text(NOISY)
    child = ask(section("noisy_module:Noisy").model_dump_json(), path=tmp_path)
    assert child.returncode == 0, child.stderr
    assert child.stdout.count(b"\n") == 1
    obs, action, _ = read_answer(child.stdout)
    assert obs == ObsSpec((ArraySpec("a", (2, 3), "uint8"),))
    assert action.parts[0].choices == (3,)
    said = child.stderr.decode().split("\n")
    expected = ["imported", "made", "made by C code", "closed", "exiting", "False"]
    assert set(expected) <= set(said), "all of it goes to stderr, and torch was not there"


@pytest.mark.parametrize(
    ("given", "args", "text"),
    [
        ('{"id": "CartPoe-v1"}', [], "Did you mean: `CartPole`?"),
        ('{"id": "CartPole-v1", "idd": 1}', [], "env.idd"),
        ("not json", [], "Invalid JSON"),
        ('{"id": "CartPole-v1"}', ["fastest"], "got fastest"),
        ('{"id": "tests.actor.worlds:Unmade", "kwargs": {"how": "SystemExit"}}', [], "SystemExit"),
        (
            '{"id": "tests.actor.worlds:Unmade", "kwargs": {"how": "KeyboardInterrupt"}}',
            [],
            "KeyboardInterrupt",
        ),
    ],
)
def test_an_error_is_answered_on_one_line(given: str, args: list[str], text: str) -> None:
    child = ask(given, *args)
    assert child.returncode == 2
    assert child.stdout.count(b"\n") == 1
    assert text in json.loads(child.stdout)["error"]
    with pytest.raises(EnvError) as caught:
        read_answer(child.stdout)
    assert str(caught.value) == json.loads(child.stdout)["error"]


@pytest.mark.parametrize("answer", [b"", b"[]", b"{}", b"\xff", b"Traceback", b'{"obs": 1}', b"1"])
def test_nonsense_is_no_answer(answer: bytes) -> None:
    with pytest.raises(EnvError, match="answered nonsense"):
        read_answer(answer)


def test_the_asking_side_does_not_import_gymnasium() -> None:
    code = "import sys, impala_async.envs.describe; print({'gymnasium', 'torch'} & {*sys.modules})"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=ROOT, check=True)
    assert child.stdout.strip() == b"set()"


def test_a_child_that_is_told_of_policies_describes_their_leaf() -> None:
    policies = PoliciesSection(names=("main", "other")).model_dump_json()
    child = ask(section("tests.envs.test_agents:Lives").model_dump_json(), "auto", policies)
    assert child.returncode == 0, child.stderr
    answer = read_answer(child.stdout)
    assert answer.obs.leaves[1] == policy_leaf(("main", "other"))
    assert answer.num_columns == 2
    alone = ask(section("CartPole-v1").model_dump_json(), "auto", policies)
    assert alone.returncode == 2
    assert "single agent" in json.loads(alone.stdout)["error"]


@pytest.mark.parametrize("sampler", get_args(SamplerName))
def test_what_is_described_does_not_depend_on_where_it_is_stepped(sampler: SamplerName) -> None:
    assert describe(section("CartPole-v1"), sampler) == (*CARTPOLE, 1)
