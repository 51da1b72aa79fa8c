"""Which device a learner takes, and what its machine cannot hold is refused before it is built."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from impala_async.config.model import ModelSection
from impala_async.errors import ConfigError, SpacesError
from impala_async.learner import hardware
from impala_async.learner.hardware import GIB, check_memory, make_current, pick_device
from impala_async.schema import (
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

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_auto_takes_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_there, device in ((True, CUDA), (False, CPU)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda is_there=is_there: is_there)
        assert pick_device("auto") == device
    assert pick_device("cpu") == CPU


def test_a_device_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match=r"^learner\.device: 'cuda:1' is not on .* has 1 GPUs"):
        pick_device("cuda:1")


def test_only_a_gpu_with_a_number_is_made_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    for name in ("cpu", "cpu:0", "cuda", "cuda:1"):
        make_current(torch.device(name))
    assert current == [torch.device("cuda:1")]


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with 4 GiB to spare."""
    free = SimpleNamespace(available=4 * GIB)
    monkeypatch.setattr(hardware.psutil, "virtual_memory", lambda: free)


def check(schema: Schema, num_slots: int = 4) -> None:
    check_memory(config_of(schema, learner={"batch_columns": 16}), schema, num_slots)


def test_slots_that_do_not_fit_are_refused_with_the_numbers_and_the_keys(free: None) -> None:
    wide = ObsSpec((ArraySpec("obs", (1 << 14,), "uint8"),))
    schema = replace(small_schema(), obs=wide, rows=63)
    check(schema, num_slots=220)
    says = (
        r"4\.\d GiB for 256 batches and .* 4\.0 GiB are free: lower .*_size or learner\.queue_size$"
    )
    with pytest.raises(SpacesError, match=says):
        check(schema, num_slots=256)


@pytest.mark.parametrize("num_choices", [10**8, 2**31 - 1])
def test_a_model_that_does_not_fit_is_refused_without_being_built(
    num_choices: int, free: None
) -> None:
    action = ActionSpec((ActionPart("action", "discrete", (num_choices,)),))
    with pytest.raises(SpacesError, match=r"GiB for the model"):
        check(replace(small_schema(), action=action))


def test_a_wide_core_that_does_not_fit_is_refused(free: None) -> None:
    schema = replace(small_schema(), state=recurrent_state("lstm", 10**5))
    config = config_of(schema, model={"core": "lstm", "core_size": 10**5})
    with pytest.raises(SpacesError, match=r"GiB for the model"):
        check_memory(config, schema, 4)


def test_the_mask_of_legal_actions_needs_no_weights(free: None) -> None:
    """It may be wider than all that the network sees."""
    num_choices = 10**6
    wide = ObsSpec((*small_schema().obs.leaves, ArraySpec("legal", (num_choices,), "int8")))
    action = ActionSpec((ActionPart("", "discrete", (num_choices,)),), legal="legal")
    schema = replace(small_schema(rows=1), obs=wide, action=action)
    model = {"hidden_sizes": [64, 64]}
    check_memory(config_of(schema, learner={"batch_columns": 1}, model=model), schema, 1)


def test_every_policy_wants_weights(free: None) -> None:
    names = ("main", "other", "third")
    schema = small_schema()
    several = replace(schema, obs=ObsSpec((*schema.obs.leaves, policy_leaf(names))), policies=names)
    model = {"hidden_sizes": [5200, 5200]}
    check_memory(config_of(schema, model=model), schema, 4)
    with pytest.raises(SpacesError, match=r"4\.\d GiB for the model"):
        check_memory(config_of(several, model=model), several, 4)


class Measures(torch.nn.Module):
    """Asks for a value while it is made, which a meta tensor has not."""

    num_out = 3

    def __init__(self, obs: ObsSpec, section: ModelSection) -> None:
        super().__init__()
        self.size = int(torch.tensor(obs.leaves[0].shape).prod())


def test_a_network_of_one_s_own_that_cannot_be_estimated_is_let_through(free: None) -> None:
    schema = small_schema()
    model = {"name": "tests.learner.test_hardware:Measures", "hidden_sizes": None}
    check_memory(config_of(schema, model=model), schema, 4)
