"""Gradients that are written out are those of torch, but for rounding."""

import dataclasses
import math
from functools import partial

import pytest
import torch

from impala_async.config.run import AlgorithmSection, ModelSection
from impala_async.models.torso import MLPTorso
from impala_async.policy import Policy
from impala_async.schema import ActionPart, ActionSpec, ArraySpec, ObsSpec, Schema
from impala_async.training.by_hand import ByHand, is_plain
from impala_async.training.step import UpdateStep
from tests.training.conftest import ALIVE_B, PLAIN, is_same, random_batch, remembered

MODELS = {
    "plain": {},
    "one torso": {"shared_torso": True},
    "relu, deep": {"activation": "relu", "hidden_sizes": (32, 8, 16)},
    "normal": {"normalize_obs": True},
}
ALGORITHMS = {
    "plain": {},
    "sum": {"reduction": "sum", "reward_clip": "unit", "lambda": 0.9},
    "normal": {"normalize_advantages": True, "normalize_returns": True, "rho_bar": 2.0},
    "ppo": {"name": "ppo"},
    "rows": {"shuffle_rows": True, "num_minibatches": 4, "normalize_advantages": True},
    "ppo, rows": {"name": "ppo", "shuffle_rows": True, "num_minibatches": 3},
    "ppo, gae": {"name": "ppo", "returns": "gae", "lambda": 0.9},
    "ppo, rows, gae": {
        "name": "ppo",
        "returns": "gae",
        "shuffle_rows": True,
        "num_minibatches": 3,
    },
    "ppo, sum": {"name": "ppo", "reduction": "sum", "clip": 0.5, "normalize_returns": True},
}


@pytest.fixture
def make_pair(schema, monkeypatch):
    """Two steps from the same start: by hand, and by torch."""

    def make(model, settings, schema=schema):
        section = AlgorithmSection.model_validate(PLAIN | settings)
        steps = []
        for by_hand in (is_plain, lambda *_: False):
            monkeypatch.setattr("impala_async.training.step.is_plain", by_hand)
            policy = Policy(schema, ModelSection.model_validate(model), seed=3)
            steps.append(UpdateStep(policy, section))
        return steps

    return make


@pytest.mark.parametrize("settings", ALGORITHMS.values(), ids=ALGORITHMS)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_it_learns_what_torch_does(make_pair, make_batch, monkeypatch, model, settings):
    calls = []
    monkeypatch.setattr(ByHand, "__call__", _noted(ByHand.__call__, calls))
    steps = make_pair(model, settings)
    for number in range(5):
        batch = make_batch(seed=number)
        # Nobody looks at a masked row.
        batch.log_probs_BT[~batch.mask_BT] = math.nan
        alive_B = ALIVE_B.index_fill(0, torch.tensor(1), number != 2)
        begun = [step.begin(batch) for step in steps]
        for is_first in (True, False):
            mine, theirs = (
                step.run(each, alive_B, 0, is_first_pass=is_first)
                for step, each in zip(steps, begun, strict=True)
            )
            assert mine.stats == pytest.approx(theirs.stats, rel=1e-4, abs=1e-6)
            assert list(mine.stats) == list(theirs.stats)
            for ours, torchs in zip(*(step.parameters for step in steps), strict=True):
                torch.testing.assert_close(ours.grad, torchs.grad, rtol=1e-4, atol=1e-6)
                torch.testing.assert_close(ours, torchs, rtol=1e-5, atol=1e-6)
    assert len(calls) == 5 * 2 * settings.get("num_minibatches", 1)


@pytest.mark.parametrize("dtype", ["uint8", "int64"])
def test_it_learns_from_whole_numbers_that_are_normalised_what_torch_does(make_pair, dtype):
    spaces = schema_of(ActionPart("", "discrete", (4,)), dtype=dtype)
    mine, theirs = make_pair({"normalize_obs": True}, {"lr": 1e-2}, spaces)
    for number in range(5):
        batch = random_batch(spaces, seed=number)
        batch.obs[""][:] = (batch.obs[""] + number) % 120
        for step in (mine, theirs):
            step.run(step.begin(batch), ALIVE_B, 0)
    (normalizer,) = mine.policy.model.normalizers
    assert normalizer.count > 0
    assert normalizer.mean.all()
    for ours, torchs in zip(mine.policy.tensors, theirs.policy.tensors, strict=True):
        torch.testing.assert_close(ours, torchs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["impala", "ppo"])
@pytest.mark.parametrize("log_std", [-12.0, -0.5, 2.5])
@pytest.mark.parametrize(
    ("shape", "model"),
    [((), {}), ((3,), {"normalize_obs": True}), ((2, 2), {"shared_torso": True})],
)
def test_it_learns_of_numbers_what_torch_does(make_pair, monkeypatch, shape, model, log_std, name):
    calls = []
    monkeypatch.setattr(ByHand, "__call__", _noted(ByHand.__call__, calls))
    spaces = schema_of(ActionPart("", "continuous", (), shape))
    steps = make_pair(model, {"name": name, "entropy_cost": 0.1}, spaces)
    # Beyond their range, too: there only steps towards it are taken.
    for step in steps:
        step.policy.model.policy_head.log_stds[0].data.fill_(log_std)
    for number in range(4):
        batch = random_batch(spaces, seed=number)
        squares_BTD = batch.actions[""].reshape(*batch.mask_BT.shape, -1).square()
        batch.log_probs_BT[:] = -squares_BTD.sum(-1) / 2
        mine, theirs = (step.run(batch, ALIVE_B, 0) for step in steps)
        assert mine.stats == pytest.approx(theirs.stats, rel=1e-3, abs=1e-5)
        assert list(mine.stats) == list(theirs.stats)
        for ours, torchs in zip(*(step.parameters for step in steps), strict=True):
            scale = float(torchs.grad.abs().max()) + 1e-6
            torch.testing.assert_close(ours.grad, torchs.grad, rtol=1e-3, atol=1e-5 * scale)
            torch.testing.assert_close(ours, torchs, rtol=1e-4, atol=1e-5)
    assert len(calls) == 4


def _noted(call, calls):
    def noting(*args, **kwargs):
        calls.append(1)
        return call(*args, **kwargs)

    return noting


@pytest.mark.parametrize("name", ["impala", "ppo"])
@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
def test_what_is_not_finite_is_found_as_torch_finds_it(make_pair, make_batch, value, name):
    steps = make_pair({}, {"name": name})
    batch = make_batch()
    batch.mask_BT[2, 1], batch.rewards_BT[2, 1] = True, value
    mine, theirs = (step.run(batch, ALIVE_B, 0) for step in steps)
    assert (
        mine.is_failed_B.tolist()
        == theirs.is_failed_B.tolist()
        == [False, False, True] + [False] * 2
    )
    assert mine.not_finite == theirs.not_finite


def test_a_choice_that_is_impossible_has_no_part_in_the_entropy(make_pair, make_batch):
    steps = make_pair({}, {})
    with torch.no_grad():
        for step in steps:
            step.policy.model.policy_head.bias[:2] = torch.tensor([3e38, -3e38])
    mine, theirs = (step.run(make_batch(), ALIVE_B, 0) for step in steps)
    assert mine.stats["policy/entropy"] == theirs.stats["policy/entropy"] == 0
    assert mine.not_finite == theirs.not_finite


def test_a_batch_without_a_valid_row_changes_nothing(make_pair, make_batch):
    step, _ = make_pair({}, {})
    before = remembered(step)
    assert not step.run(make_batch(), torch.zeros_like(ALIVE_B), 0).num_updates
    assert is_same(before, remembered(step))


def schema_of(*parts, dtype="float32"):
    return Schema(ObsSpec((ArraySpec("", (3,), dtype),)), ActionSpec(parts), 6)


def frozen_mlp(obs, section):
    """A torso of the user's own, if it is built of ours."""
    torso = MLPTorso(obs, section)
    torso.layers[0].requires_grad_(False)
    return torso


def test_other_networks_choices_and_algorithms_are_for_torch(schema):
    image = ObsSpec((ArraySpec("", (10, 10, 4), "uint8"),))
    two = ActionPart("", "discrete", (4, 4), (2,))
    numbers, squashed = (ActionPart("", kind, (), (2,)) for kind in ("continuous", "squashed"))
    impala = AlgorithmSection(name="impala")

    def fits(spaces=schema, section=impala, **model):
        policy = Policy(spaces, ModelSection.model_validate(model), seed=0)
        return is_plain(policy, section)

    assert fits()
    assert fits(section=AlgorithmSection(name="ppo"))
    assert fits(section=AlgorithmSection(name="ppo", returns="gae"))
    assert not fits(section=AlgorithmSection(name="appo"))
    assert not fits(section=AlgorithmSection(name="ppo", intrinsic_reward="a.b:C"))
    assert not fits(name=f"{__name__}:frozen_mlp")
    assert fits(schema_of(numbers), section=AlgorithmSection(name="ppo"))
    assert not fits(schema_of(numbers), state_dependent_std=True)
    for parts in ((two,), (squashed,), (numbers, dataclasses.replace(numbers, name="b"))):
        assert not fits(schema_of(*parts))
    assert not fits(Schema(image, schema.action, 6), name="small_cnn")
    policy = Policy(schema, ModelSection(), seed=0)
    policy.compute_in(torch.bfloat16)
    assert not is_plain(policy, impala)


def test_more_threads_are_for_torch(schema):
    fits = partial(
        is_plain, Policy(schema, ModelSection(), seed=0), AlgorithmSection(name="impala")
    )
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert not fits()
    finally:
        torch.set_num_threads(before)
    assert fits() == (before == 1)
