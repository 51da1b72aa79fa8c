"""The target network follows the live one as told; the KL's weight follows the KL, strictly."""

import json
import math

import pytest
import torch

from impala_async.config.algorithm import AlgorithmSection
from impala_async.config.model import ModelSection
from impala_async.models.torso import MLPTorso
from impala_async.policy import Policy
from impala_async.training.algorithms import MAX_KL_COEFF, MIN_KL_COEFF, Target, adapted
from impala_async.training.step import UpdateStep
from tests.training.conftest import ALIVE_B, are_equal


@pytest.fixture
def policy(make_step):
    return make_step(normalize_obs=True).policy


def target_of(policy, **settings):
    return Target(policy, AlgorithmSection(name="appo", **settings))


def drift(policy, amount=1.0):
    with torch.no_grad():
        for tensor in policy.tensors:
            tensor.add_(amount)


def tensors_of(owner):
    """The weights of a policy or of a target."""
    return {name: tensor.clone() for name, tensor in owner.model.state_dict().items()}


class Keeps(MLPTorso):
    """A torso of the user's own that keeps what it has computed, for a look at it."""

    def forward(self, obs):
        self.features = super().forward(obs)
        return self.features


def test_it_is_made_of_a_torso_that_keeps_what_it_has_computed(schema, make_batch):
    policy = Policy(schema, ModelSection(name=f"{__name__}:Keeps"), seed=0)
    policy.compute_in(torch.bfloat16)
    step = UpdateStep(policy, AlgorithmSection(name="appo"))
    assert step.target.model.precision == torch.bfloat16
    assert are_equal(tensors_of(policy).values(), tensors_of(step.target).values())
    assert step.run(make_batch(), ALIVE_B, 0).num_updates == 1
    assert not are_equal(tensors_of(policy).values(), tensors_of(step.target).values())


@pytest.mark.parametrize("tau", [1.0, 0.25])
def test_it_is_a_copy_that_stays_until_its_time_and_then_goes_part_of_the_way(policy, tau):
    """Statistics go all of it."""
    target = target_of(policy, tau=tau, target_update_every_updates=3)
    buffers = {name for name, _ in policy.model.named_buffers()}
    for _ in range(2):
        before = tensors_of(target)
        for _ in range(2):
            drift(policy)
            target.note_update(policy.model, kl=0.0)
            assert are_equal(before.values(), tensors_of(target).values())
        drift(policy)
        target.note_update(policy.model, kl=0.0)
        live = tensors_of(policy)
        for name, moved in tensors_of(target).items():
            share = 1.0 if name in buffers else tau
            torch.testing.assert_close(moved, before[name] + share * (live[name] - before[name]))
    assert buffers


@pytest.mark.parametrize(
    ("kl", "factor"),
    [(0.0, 0.5), (0.0049, 0.5), (0.005, 1), (0.01, 1), (0.02, 1), (0.0201, 1.5), (9.0, 1.5)],
)
def test_the_coefficient_follows_the_kl_strictly(kl, factor):
    assert adapted(0.8, kl, 0.01) == pytest.approx(0.8 * factor)
    assert adapted(0.8, kl, None) == 0.8


def test_the_coefficient_has_ends_from_which_there_is_a_way_back():
    for kl, end, back in ((0.0, MIN_KL_COEFF, 1.5), (9.0, MAX_KL_COEFF, 0.5)):
        coeff = 0.8
        for _ in range(3000):
            coeff = adapted(coeff, kl, 0.01)
        assert coeff == end
        assert adapted(coeff, 9.0 - kl, 0.01) == pytest.approx(end * back)
    # One from outside never goes against its way; that of 0 is none at all.
    for coeff in (0.0, MIN_KL_COEFF / 10, MAX_KL_COEFF * 10):
        assert adapted(coeff, 0.0, 0.01) <= coeff <= adapted(coeff, 9.0, 0.01)
    assert adapted(0.0, 9.0, 0.01) == 0.0


def test_it_is_adapted_when_the_target_moves_by_the_last_kl(policy):
    target = target_of(policy, kl_coeff=1.0, kl_target=0.1, target_update_every_updates=2)
    found = []
    for kl in (9.0, 0.1, 0.0, 0.21, 9.0, 0.01):
        target.note_update(policy.model, kl)
        found.append(target.kl_coeff)
    assert found == [1, 1, 1, 1.5, 1.5, 0.75]


@pytest.mark.parametrize("kl", [math.inf, -math.inf, math.nan])
def test_a_kl_that_is_not_finite_can_be_saved_and_is_too_far(policy, kl):
    target = target_of(policy, kl_coeff=1.0, target_update_every_updates=2)
    for _ in range(2):
        target.note_update(policy.model, kl)
        json.dumps(target.state(), allow_nan=False)
    assert target.kl_coeff == 1.5


def test_its_state_goes_on_where_it_was_but_for_settings_of_the_kl_that_changed(policy, make_step):
    settings = {"kl_coeff": 1.0, "kl_target": 0.1, "target_update_every_updates": 3, "tau": 0.9}
    for changes, coeff in (
        ({}, 1.5),
        ({"tau": 0.5}, 1.5),
        ({"kl_coeff": 0.2}, 0.2),
        ({"kl_coeff": 0.0, "kl_target": 0.01}, 0.0),
        ({"kl_target": 0.3}, 1.0),
        ({"kl_target": None}, 1.0),
    ):
        target = target_of(policy, **settings)
        for _ in range(4):
            drift(policy)
            target.note_update(policy.model, kl=1.0)
        tensors = tensors_of(target)
        resumed = target_of(make_step(seed=4, normalize_obs=True).policy, **settings | changes)
        resumed.restore(tensors, json.loads(json.dumps(target.state())))
        assert resumed.kl_coeff == coeff, changes
        assert are_equal(tensors_of(resumed).values(), tensors.values()), changes
        # It moves when it would have moved.
        for is_moved in (False, True):
            resumed.note_update(policy.model, kl=1.0)
            assert are_equal(tensors_of(resumed).values(), tensors.values()) != is_moved


def test_without_a_number_it_moves_when_a_batch_is_begun(make_step, make_batch):
    step = make_step(name="appo", num_minibatches=2, kl_coeff=0.5, lr=0.05)
    target = step.target.model

    def run(seed, *, is_first_pass):
        step.run(make_batch(seed=seed), ALIVE_B, 0, is_first_pass=is_first_pass)
        return step.target.kl_coeff

    def weights(model):
        return [weight.clone() for weight in model.parameters()]

    first = weights(step.policy.model)
    assert [run(1, is_first_pass=number == 0) for number in range(3)] == [0.5] * 3
    assert are_equal(weights(target), first)
    before = weights(step.policy.model)
    # By the KL of the last update of the batch before.
    assert run(2, is_first_pass=True) == 0.75
    assert are_equal(weights(target), before)
    assert not are_equal(weights(step.policy.model), before)
