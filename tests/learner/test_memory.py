"""What this machine cannot hold is refused before anything of it is built."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

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
from tests.learner.world import config_of


@pytest.fixture(autouse=True)
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with 4 GiB to spare."""
    free = SimpleNamespace(available=4 * GIB)
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: free)


def check(schema: Schema, num_slots: int = 4) -> None:
    check_memory(config_of(schema, learner={"batch_columns": 16}), schema, num_slots)


def test_what_fits_is_let_through() -> None:
    check(small_schema())


def test_slots_that_do_not_fit_are_refused_with_the_numbers_and_the_keys() -> None:
    wide = ObsSpec((ArraySpec("obs", (1 << 20,), "uint8"),))
    schema = replace(small_schema(), obs=wide, rows=63)
    check(schema, num_slots=3)
    with pytest.raises(ValueError, match=r"4\.\d GiB for 4 batches .* 4\.0 GiB are free: lower"):
        check(schema, num_slots=4)


@pytest.mark.parametrize("num_choices", [10**7, 2**31 - 1])
def test_a_model_that_does_not_fit_is_refused_without_being_built(num_choices: int) -> None:
    action = ActionSpec((ActionPart("action", "discrete", (num_choices,)),))
    with pytest.raises(ValueError, match=r"GiB for the model"):
        check(replace(small_schema(), action=action))


def test_a_wide_core_that_does_not_fit_is_refused() -> None:
    schema = replace(small_schema(), state=recurrent_state("lstm", 10**5))
    config = config_of(schema, model={"core": "lstm", "core_size": 10**5})
    with pytest.raises(ValueError, match=r"GiB for the model"):
        check_memory(config, schema, 4)


def test_the_mask_of_legal_actions_needs_no_weights() -> None:
    """It may be wider than all that the network sees."""
    num_choices = 10**6
    wide = ObsSpec((*small_schema().obs.leaves, ArraySpec("legal", (num_choices,), "int8")))
    action = ActionSpec((ActionPart("", "discrete", (num_choices,)),), legal="legal")
    schema = replace(small_schema(rows=1), obs=wide, action=action)
    model = {"hidden_sizes": [64, 64]}
    check_memory(config_of(schema, learner={"batch_columns": 1}, model=model), schema, 1)


def test_every_policy_wants_weights() -> None:
    names = ("main", "other", "third")
    schema = small_schema()
    several = replace(schema, obs=ObsSpec((*schema.obs.leaves, policy_leaf(names))), policies=names)
    model = {"hidden_sizes": [5200, 5200]}
    check_memory(config_of(schema, model=model), schema, 4)
    with pytest.raises(ValueError, match=r"4\.\d GiB for the model"):
        check_memory(config_of(several, model=model), several, 4)
