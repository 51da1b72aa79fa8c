"""A small policy and random batches for it, laid out as in a slot."""

import dataclasses
import json
from functools import partial

import numpy as np
import pytest
import torch

from impala_async.config.policies import PoliciesSection
from impala_async.config.run import AlgorithmSection, ModelSection
from impala_async.policy import Policy, Team
from impala_async.schema import ObsSpec, policy_leaf, recurrent_state
from impala_async.training.batch import Batch
from impala_async.training.step import UpdateStep
from impala_async.training.team_step import TeamStep
from tests.columns import Planes, flat_schema

# Without what the defaults have of the generic recipe: it would be in every number here.
PLAIN = {
    "name": "impala",
    "lr": 5e-4,
    "lr_end": None,
    "grad_clip": 40.0,
    "normalize_returns": False,
}
CORE_SIZE = 8
ALIVE_B = torch.ones(5, dtype=torch.bool)


def weights_of(step):
    return [tensor.clone() for tensor in step.policy.tensors]


def are_equal(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def remembered(step):
    """All that a step remembers."""
    captured = step.capture()
    tensors = {
        f"{group}/{name}": tensor
        for group, members in captured.tensors.items()
        for name, tensor in members.items()
    }
    return tensors, json.dumps(captured.state, allow_nan=False)


def is_same(first, second):
    """Whether two steps remember the same, to the last bit."""
    (mine, state), (theirs, other) = first, second
    is_alike = mine.keys() == theirs.keys() and state == other
    return is_alike and all(torch.equal(mine[name], theirs[name]) for name in mine)


def random_batch(schema, num_columns=5, seed=0):
    """Random columns with episode ends, in planes as a slot has them."""
    rng = np.random.default_rng(seed)
    planes = Planes(schema, num_columns)
    columns = planes.columns
    shape = columns.rewards_CT.shape
    columns.obs[""][:] = rng.normal(size=columns.obs[""].shape)
    (actions,), num_choices = columns.actions.values(), schema.action.num_choices
    actions[:] = (
        rng.integers(0, num_choices, shape) if num_choices else rng.normal(size=actions.shape)
    )
    columns.rewards_CT[:] = rng.normal(size=shape)
    columns.log_probs_CT[:] = rng.uniform(-2.5, -0.5, shape)
    kinds = rng.choice(["none", "terminated", "truncated"], shape, p=[0.6, 0.2, 0.2])
    columns.mask_CT[:] = True
    columns.mask_CT[:, 1:] = kinds[:, :-1] == "none"
    columns.terminated_CT[:] = (kinds == "terminated") & columns.mask_CT
    columns.truncated_CT[:] = (kinds == "truncated") & columns.mask_CT
    for array in (columns.rewards_CT, columns.log_probs_CT, actions):
        array[~columns.mask_CT] = 0
    return Batch.in_planes(schema, planes.obs, planes.small)


@pytest.fixture
def core():
    """The recurrent core of the policies; a module may say otherwise."""
    return None


@pytest.fixture
def schema(core):
    return flat_schema(3, 4, 6, state=recurrent_state(core, CORE_SIZE))


@pytest.fixture
def make_step(schema, core):
    """A fresh step around a fresh policy; keywords are the algorithm's settings."""

    def make(
        *,
        seed=0,
        hidden=(16, 16),
        activation=None,
        normalize_obs=False,
        is_graphed=False,
        **settings,
    ):
        model = {"hidden_sizes": hidden, "normalize_obs": normalize_obs, "activation": activation}
        model |= {} if core is None else {"core": core, "core_size": CORE_SIZE}
        policy = Policy(schema, ModelSection.model_validate(model), seed=seed)
        section = AlgorithmSection.model_validate(PLAIN | settings)
        return UpdateStep(policy, section, is_graphed=is_graphed)

    return make


@pytest.fixture
def by_torch(monkeypatch):
    """Updates are made by torch, whatever the network."""
    monkeypatch.setattr("impala_async.training.step.is_plain", lambda *_: False)


@pytest.fixture
def make_team_step(schema, core):
    """A fresh step of a fresh team: `a` and `b` learn, `past` is a copy of `a`."""

    def make(*, seed=0, train=None, copy_every_updates=2, normalize_obs=False, **settings):
        policies = PoliciesSection(
            names=("a", "b", "past"),
            copies={"past": "a"},
            copy_every_updates=copy_every_updates,
            train=train,
        )
        obs = ObsSpec((*schema.obs.leaves, policy_leaf(policies.names)))
        model = {"hidden_sizes": (16,), "normalize_obs": normalize_obs}
        model |= {} if core is None else {"core": core, "core_size": CORE_SIZE}
        team = Team(
            dataclasses.replace(schema, obs=obs, policies=policies.names),
            ModelSection.model_validate(model),
            policies,
            seed=seed,
        )
        return TeamStep(
            team, AlgorithmSection.model_validate(PLAIN | settings), policies, seed=seed
        )

    return make


@pytest.fixture
def make_batch(schema):
    return partial(random_batch, schema)
