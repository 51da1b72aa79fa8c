"""Acting by numpy gives what acting by torch gives, from the same memory and random numbers."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from impala_async.algo.distributions import sample_by_numpy
from impala_async.config.model import ModelSection
from impala_async.policy import Policy
from impala_async.schema import ActionPart, ActionSpec, ArraySpec, ObsSpec, Schema, recurrent_state
from impala_async.training.snapshot import Snapshot
from impala_async.weights import Version

VECTOR = ObsSpec((ArraySpec("", (2, 3), "float32"),))
CHOICE = ActionSpec((ActionPart("", "discrete", (5,)),))
SCHEMA = Schema(VECTOR, CHOICE, rows=3)
MASKED = Schema(
    ObsSpec((ArraySpec("seen", (3,), "float32"), ArraySpec("legal", (5,), "int8"))),
    ActionSpec(CHOICE.parts, legal="legal"),
    rows=3,
)


def both(schema=SCHEMA, **section):
    """A policy that acts by numpy, and its twin that acts by torch; clearly not uniform."""
    quick = Policy(schema, ModelSection(**section), seed=3)
    with torch.no_grad():
        for parameter in quick.model.parameters():
            parameter.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(1))
    slow = quick.twin()
    assert quick._quick is not None
    slow._quick = None
    return quick, slow


@pytest.fixture
def calls(monkeypatch):
    """Counts what goes through numpy."""
    made = []

    def call(logits_CA, generator):
        made.append(len(logits_CA))
        return sample_by_numpy(logits_CA, generator)

    monkeypatch.setattr("impala_async.policy.sample_by_numpy", call)
    return made


def rows_of(schema, num_columns, seed=0):
    rng = np.random.default_rng(seed)
    return {
        leaf.name: rng.normal(0, 2, (num_columns, *leaf.shape)).astype(leaf.dtype)
        for leaf in schema.obs.leaves
    }


@pytest.mark.parametrize("num_columns", [1, 8, 300])
@pytest.mark.parametrize(
    "section",
    [{}, {"activation": "relu"}, {"hidden_sizes": [7]}, {"shared_torso": True}],
    ids=str,
)
def test_actions_are_those_of_torch_and_log_probs_but_for_rounding(section, num_columns, calls):
    quick, slow = both(**section)
    first, second = (torch.Generator().manual_seed(5) for _ in range(2))
    for seed in range(20):
        obs = rows_of(SCHEMA, num_columns, seed)
        mine, theirs = quick.act(obs, {}, first), slow.act(obs, {}, second)
        np.testing.assert_array_equal(mine.actions[""], theirs.actions[""])
        assert mine.actions[""].dtype == theirs.actions[""].dtype
        np.testing.assert_allclose(mine.log_probs, theirs.log_probs, rtol=1e-5, atol=1e-5)
        assert mine.log_probs.dtype == np.float32
        assert mine.state == {}
    # Both have drawn as many random numbers, but only one of them by numpy.
    assert torch.equal(first.get_state(), second.get_state())
    assert len(calls) == 20


@pytest.mark.parametrize(
    "schema",
    [
        MASKED,
        replace(SCHEMA, action=ActionSpec((ActionPart("", "discrete", (2, 3), (2,)),))),
        replace(SCHEMA, action=ActionSpec((ActionPart("", "discrete", (4,), (1,)),))),
    ],
    ids=["masked", "two actions", "an action in a list"],
)
def test_what_is_no_single_choice_goes_through_torch(schema, calls):
    policy = Policy(schema, ModelSection(), seed=0)
    obs = rows_of(schema, 6)
    if schema is MASKED:
        obs["legal"][:] = np.eye(5, dtype=np.int8)[[0, 1, 2, 3, 4, 0]]
    actions = policy.act(obs, {}, torch.Generator()).actions[""]
    assert actions.shape == (6, *schema.action.parts[0].shape)
    if schema is MASKED:
        assert actions.tolist() == [0, 1, 2, 3, 4, 0]
    assert not calls


def test_weights_that_are_loaded_are_acted_with():
    quick, slow = both()
    other = Policy(SCHEMA, ModelSection(), seed=9)
    weights = Snapshot(other.layout, other.tensors).take().as_version(Version(1, 7))
    for policy in (quick, slow):
        policy.load(weights)
    obs = rows_of(SCHEMA, 4)
    mine = quick._quick(obs)
    theirs = other.model.act({"": torch.from_numpy(obs[""])}, ())[0].detach().numpy()
    np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)


def test_the_observation_is_left_as_it_is():
    quick, _ = both(hidden_sizes=[4])
    obs = rows_of(SCHEMA, 4)
    before = obs[""].copy()
    quick.act(obs, {}, torch.Generator())
    np.testing.assert_array_equal(obs[""], before)


@pytest.mark.parametrize(
    ("schema", "section"),
    [
        (SCHEMA, {"core": "lstm", "core_size": 4}),
        (SCHEMA, {"normalize_obs": True}),
        (replace(SCHEMA, obs=ObsSpec((ArraySpec("", (3,), "uint8"),))), {}),
        (replace(SCHEMA, obs=ObsSpec((ArraySpec("", (), "int64", (4,)),))), {}),
        (replace(SCHEMA, action=ActionSpec((ActionPart("", "continuous", (), (2,)),))), {}),
        (replace(SCHEMA, obs=ObsSpec((ArraySpec("", (48, 48, 3), "uint8"),))),
         {"name": "nature_cnn"}),
    ],
    ids=str,
)  # fmt: skip
def test_what_it_does_not_know_goes_through_torch(schema, section):
    model = ModelSection(**section)
    schema = replace(schema, state=recurrent_state(model.core, model.core_size))
    assert Policy(schema, model, seed=0)._quick is None
