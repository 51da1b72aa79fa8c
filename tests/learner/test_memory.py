"""What this machine cannot hold is refused before anything of it is built."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from impala_async.config.model import ModelSection
from impala_async.config.run import RunConfig
from impala_async.learner import memory
from impala_async.learner.memory import GIB, check_memory
from impala_async.spec import (
    ActionPart,
    ActionSpec,
    ArraySpec,
    ObsSpec,
    Schema,
    policy_leaf,
    recurrent_state,
)
from tests.learner.columns import small_schema
from tests.learner.server_harness import config_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with 4 GiB to spare."""
    free = SimpleNamespace(available=4 * GIB)
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: free)


CPU = torch.device("cpu")


def check(schema: Schema, num_slots: int = 4) -> None:
    check_memory(config_of(schema, learner={"batch_columns": 16}), schema, num_slots, CPU)


def test_what_fits_is_let_through() -> None:
    check(small_schema())


def test_slots_that_do_not_fit_are_refused_with_the_numbers_and_the_keys() -> None:
    wide = ObsSpec((ArraySpec("obs", (1 << 14,), "uint8"),))
    schema = replace(small_schema(), obs=wide, rows=63)
    check(schema, num_slots=220)
    says = r"4\.\d GiB for 256 batches, .* 4\.0 GiB are free: lower .*_size or learner\.queue_size$"
    with pytest.raises(ValueError, match=says):
        check(schema, num_slots=256)


@pytest.mark.parametrize("num_choices", [10**7, 2**31 - 1])
def test_a_model_that_does_not_fit_is_refused_without_being_built(num_choices: int) -> None:
    action = ActionSpec((ActionPart("action", "discrete", (num_choices,)),))
    with pytest.raises(ValueError, match=r"GiB for the model"):
        check(replace(small_schema(), action=action))


def test_a_wide_core_that_does_not_fit_is_refused() -> None:
    schema = replace(small_schema(), state=recurrent_state("lstm", 10**5))
    config = config_of(schema, model={"core": "lstm", "core_size": 10**5})
    with pytest.raises(ValueError, match=r"GiB for the model"):
        check_memory(config, schema, 4, CPU)


def image_schema(rows: int) -> Schema:
    stack = ObsSpec((ArraySpec("", (4, 84, 84), "uint8"),))
    return Schema(stack, ActionSpec((ActionPart("", "discrete", (6,)),)), rows)


def image_config(schema: Schema, model: str, columns: int, **algorithm: Any) -> RunConfig:
    return config_of(
        schema,
        learner={"batch_columns": columns},
        model={"name": model, "hidden_sizes": None},
        algorithm=algorithm,
    )


def test_an_update_that_does_not_fit_is_refused() -> None:
    schema = image_schema(rows=50)
    check_memory(image_config(schema, "impala_resnet", 16), schema, 3, CPU)
    big = image_config(schema, "impala_resnet", 64)
    says = r"0\.\d GiB for 3 batches, 0\.\d GiB for the model and 7\.\d GiB for an update"
    with pytest.raises(ValueError, match=rf"{says}, .* or choose a smaller network$"):
        check_memory(big, schema, 3, CPU)
    # There it is the memory of another that holds it.
    check_memory(big, schema, 3, torch.device("cuda"))
    parts = image_config(schema, "impala_resnet", 64, name="ppo", num_minibatches=4)
    check_memory(parts, schema, 3, CPU)


MEASURE = """
import re, sys
from pathlib import Path
import numpy as np
import torch
from impala_async.config.algorithm import AlgorithmSection
from impala_async.policy import Policy
from impala_async.trajectory import columns_over
from impala_async.training.batch import Batch
from impala_async.training.step import UpdateStep
from tests.learner.test_memory import image_config, image_schema

torch.set_num_threads(1)
name, columns, rows = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
schema = image_schema(rows)
policy = Policy(schema, image_config(schema, name, columns).model, seed=0)
step = UpdateStep(policy, AlgorithmSection(), "cpu")

def most():
    # Unlike getrusage's, this one begins with the program, not with the process that started it.
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

def update(num_columns):
    sizes = (schema.layout.obs_bytes, schema.layout.small_bytes)
    planes = [np.zeros((num_columns, size), np.uint8) for size in sizes]
    of = columns_over(schema, *planes)
    of.mask_CT.fill(True)
    before = most()
    step.run(Batch.over(of), torch.ones(num_columns, dtype=torch.bool), 0)
    return most() - before

# The optimizer and what else is made once.
update(1)
print(update(columns) * 1024)
"""


@pytest.mark.parametrize(("name", "columns"), [("nature_cnn", 24), ("impala_resnet", 8)])
def test_the_estimate_of_an_update_is_about_what_one_takes(name: str, columns: int) -> None:
    schema = image_schema(rows=20)
    config = image_config(schema, name, columns)
    estimated = memory._update_bytes(config, schema, memory._plan(config, schema))
    measured = subprocess.run(
        [sys.executable, "-c", MEASURE, name, str(columns), "20"],
        check=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert int(measured.stdout) / 1.5 < estimated < 1.5 * int(measured.stdout)


def test_the_mask_of_legal_actions_needs_no_weights() -> None:
    """It may be wider than all that the network sees."""
    num_choices = 10**6
    wide = ObsSpec((*small_schema().obs.leaves, ArraySpec("legal", (num_choices,), "int8")))
    action = ActionSpec((ActionPart("", "discrete", (num_choices,)),), legal="legal")
    schema = replace(small_schema(rows=1), obs=wide, action=action)
    model = {"hidden_sizes": [64, 64]}
    check_memory(config_of(schema, learner={"batch_columns": 1}, model=model), schema, 1, CPU)


def test_every_policy_wants_weights() -> None:
    names = ("main", "other", "third")
    schema = small_schema()
    several = replace(schema, obs=ObsSpec((*schema.obs.leaves, policy_leaf(names))), policies=names)
    model = {"hidden_sizes": [5200, 5200]}
    check_memory(config_of(schema, model=model), schema, 4, CPU)
    with pytest.raises(ValueError, match=r"4\.\d GiB for the model"):
        check_memory(config_of(several, model=model), several, 4, CPU)


class Constant(torch.nn.Module):
    """Makes a tensor of its own in its forward pass."""

    num_out = 3

    def __init__(self, obs: ObsSpec, section: ModelSection) -> None:
        super().__init__()

    def forward(self, obs: dict[str, torch.Tensor]) -> torch.Tensor:
        rows = next(iter(obs.values())).flatten(1).float()
        return rows.sum(1, keepdim=True) * torch.tensor([1.0, 2.0, 3.0])


class Looks(Constant):
    """Asks for a value, which a meta tensor has not."""

    def forward(self, obs: dict[str, torch.Tensor]) -> torch.Tensor:
        features = super().forward(obs)
        return features if features.sum().item() > 0 else -features


class Measures(Constant):
    """Asks for one while it is made."""

    def __init__(self, obs: ObsSpec, section: ModelSection) -> None:
        super().__init__(obs, section)
        self.size = int(torch.tensor(obs.leaves[0].shape).prod())


@pytest.mark.parametrize("name", ["Constant", "Looks", "Measures"])
def test_a_network_of_one_s_own_that_cannot_be_estimated_is_let_through(name: str) -> None:
    schema = small_schema()
    model = {"name": f"tests.learner.test_memory:{name}", "hidden_sizes": None}
    check_memory(config_of(schema, model=model), schema, 4, CPU)
