"""What an update step does besides the loss: parts of a batch, statistics, the target, and no
trace of what is skipped."""

import itertools
import json
import math

import pytest
import torch

from impala_async.algo import losses
from impala_async.config.run import AlgorithmSection, ModelSection
from impala_async.metrics.names import REGISTRY
from impala_async.policy import Policy
from impala_async.training import rewards
from impala_async.training.batch import Batch, living_mask
from impala_async.training.rewards import scale_of, sums_of
from impala_async.training.step import UpdateStep

PPO = {"name": "ppo", "num_minibatches": 3}
APPO = {"name": "appo", "kl_coeff": 0.5, "target_update_every_updates": 2}
EVERYTHING = {"normalize_obs": True, "normalize_returns": True, "lr": 1e-2}
CASES = {
    "impala": EVERYTHING,
    "appo": EVERYTHING | APPO,
    "ppo": EVERYTHING | PPO,
    "a2c": EVERYTHING | {"name": "a2c", "optimizer": "rmsprop_tf"},
}
EACH = pytest.mark.parametrize("settings", CASES.values(), ids=CASES.keys())
ALIVE = torch.ones(5, dtype=torch.bool)


def snapshot(step):
    """All that a step remembers."""
    captured = step.capture()
    tensors = {
        f"{group}/{name}": tensor
        for group, members in captured.tensors.items()
        for name, tensor in members.items()
    }
    return tensors, captured.state


def are_equal(first, second):
    (tensors, state), (other_tensors, other_state) = first, second
    assert tensors.keys() == other_tensors.keys()
    return state == other_state and all(torch.equal(tensors[k], other_tensors[k]) for k in tensors)


# -------------------- parts


def test_each_part_is_a_step_and_reports_are_means(make_step, make_batch):
    step, batch = make_step(**PPO), make_batch()
    singles = make_step(name="ppo")
    alive_B = torch.tensor([True, True, False, True, True])
    seen = []
    original = step._learn_from

    def noted(part, *rest, **named):
        seen.append(part.is_in_B)
        return original(part, *rest, **named)

    step._learn_from = noted
    result = step.run(batch, alive_B, 0)
    assert result.num_updates == 3
    assert torch.equal(torch.stack(seen).sum(0).bool(), alive_B)
    assert sorted(int(part.sum()) for part in seen) == [1, 1, 2]
    # The same as one update after the other with only these columns alive.
    stats = [singles.run(batch, part, 0).stats for part in seen]
    for mine, theirs in zip(step.parameters, singles.parameters, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    for name, value in result.stats.items():
        mean = sum(each[name] for each in stats) / 3
        assert value == pytest.approx(mean, rel=1e-3, abs=1e-5), name


def test_the_order_changes_from_update_to_update_and_is_the_seeds(make_step, make_batch):
    batch = make_batch()

    def parts_seen(step):
        seen, original = [], step._learn_from

        def noted(part, this):
            seen.append(part.is_in_B.tolist())
            return original(part, this)

        step._learn_from = noted
        step.run(batch, ALIVE, 0)
        step._learn_from = original
        return seen

    first, second = make_step(**PPO), make_step(**PPO)
    found = []
    for _ in range(4):
        found.append(parts_seen(first))
        assert found[-1] == parts_seen(second)
    assert any(parts != found[0] for parts in found)


def test_a_column_that_is_not_finite_fails_alone(make_step, make_batch):
    batch = make_batch()
    batch.rewards_BT[3, 0] = math.nan
    batch.mask_BT[3, 0] = True
    step = make_step(**PPO)
    result = step.run(batch, ALIVE, 0)
    # What its part had besides is learned from.
    assert result.num_updates >= 2
    assert result.is_failed_B.tolist() == [False, False, False, True, False]
    assert all(math.isfinite(value) for value in result.stats.values())
    assert all(parameter.isfinite().all() for parameter in step.parameters)


def test_a_part_without_a_valid_row_is_left_out_and_no_failure(make_step, make_batch):
    batch = make_batch()
    batch.mask_BT[2] = False
    step = make_step(name="ppo", num_minibatches=5)
    result = step.run(batch, ALIVE, 0)
    assert result.num_updates == 4
    assert not result.is_failed_B.any()


def test_of_a_whole_batch_that_fails_only_the_living_columns_are_named(make_step, make_batch):
    batch, alive_B = make_batch(), torch.tensor([True, False, True, True, True])
    batch.rewards_BT[:, 0] = math.nan
    batch.mask_BT[:, 0] = True
    result = make_step().run(batch, alive_B, 0)
    assert (result.num_updates, result.applied) == (0, False)
    assert torch.equal(result.is_failed_B, alive_B)


# -------------------- no trace of what is skipped


@EACH
def test_a_skipped_update_leaves_everything_as_it_was(make_step, make_batch, settings):
    step, undisturbed = make_step(**settings), make_step(**settings)
    good, bad = make_batch(seed=1), make_batch(seed=2)
    bad.mask_BT[:, 0] = True
    fresh = snapshot(step)
    for number, reward in enumerate((math.inf, math.nan, 3e38)):
        bad.rewards_BT[:, 0] = reward
        if number == 0:
            assert not step.run(bad, ALIVE, 0).applied
            assert are_equal(snapshot(step), fresh)
        for each in (step, undisturbed):
            assert each.run(good, ALIVE, number).applied
        before = snapshot(step)
        failed = step.run(bad, ALIVE, 50)
        assert not failed.applied
        assert failed.not_finite
        assert not step.run(good, torch.zeros(5, dtype=torch.bool), 50).applied
        assert are_equal(snapshot(step), before)
    assert are_equal(snapshot(step), snapshot(undisturbed))


# -------------------- statistics


def test_observations_count_once_at_the_first_pass(make_step, make_batch):
    step, batch = make_step(normalize_obs=True), make_batch()
    (normalizer,) = step.policy.model.normalizers
    alive_B = torch.tensor([True, False, True, True, True])
    step.run(batch, alive_B, 0, is_first_pass=False)
    assert normalizer.count == 0
    step.run(batch, alive_B, 0)
    step.run(batch, alive_B, 0, is_first_pass=False)
    rows = batch.obs[""][:, :-1][batch.mask_BT & alive_B.unsqueeze(-1)]
    assert normalizer.count == len(rows)
    torch.testing.assert_close(normalizer.mean, rows.mean(0))
    torch.testing.assert_close(normalizer.variance, rows.var(0, correction=0))


def test_observations_of_a_failed_part_do_not_count(make_step, make_batch):
    batch = make_batch()
    batch.rewards_BT[3, 0] = math.nan
    batch.mask_BT[3, 0] = True
    step = make_step(normalize_obs=True, name="ppo", num_minibatches=5)
    step.run(batch, ALIVE, 0)
    (normalizer,) = step.policy.model.normalizers
    assert normalizer.count == int(batch.mask_BT[[0, 1, 2, 4]].sum())


def scales_of(step, batches, is_first_pass=True):
    found = []
    for batch in batches:
        stats = step.run(batch, ALIVE, 0, is_first_pass=is_first_pass).stats
        found.append(stats["algorithm/return_scale"])
    return found


def test_the_scale_is_that_of_the_returns_before_it(make_step, make_batch):
    """With gamma 0 returns are the rewards."""
    batch = make_batch()
    batch.rewards_BT.mul_(70).add_(10)
    step = make_step(gamma=0.0, normalize_returns=True)
    (found,) = scales_of(step, [batch])
    rewards = batch.rewards_BT[batch.mask_BT]
    targets = step_targets(make_step(gamma=0.0), batch)
    assert found == pytest.approx(scale_of(targets), rel=2e-2)
    assert 0.3 * rewards.std() < found < 1.5 * rewards.std()


def step_targets(step, batch):
    view = step._view(batch, living_mask(batch, ALIVE), 1.0)
    return sums_of(step._algorithm.loss(view, 0.0).targets_TB, view.mask_TB).tolist()


def test_a_step_tells_of_rewards_too_small_to_be_normalised(
    make_step, make_batch, monkeypatch, caplog
):
    monkeypatch.setattr(rewards, "WARN_AT_ROWS", 30)
    batch, step = make_batch(), make_step(gamma=0.0, normalize_returns=True)
    with torch.no_grad():
        step.policy.model.value_head.weight.zero_()
    batch.rewards_BT.fill_(1e-7)
    scales_of(step, [batch] * 4)
    assert "algorithm.reward_scale" in caplog.text


@pytest.mark.parametrize("name", ["impala", "ppo", "a2c"])
def test_losses_do_not_depend_on_the_size_of_rewards(make_step, make_batch, name):
    """Already in the first batch, whose own returns then are the scale."""
    losses = []
    for factor in (1.0, 1e4):
        step = make_step(name=name, normalize_returns=True)
        with torch.no_grad():
            step.policy.model.value_head.weight.zero_()
        for seed in range(3):
            batch = make_batch(seed=seed)
            batch.rewards_BT.mul_(factor)
            losses.append(step.run(batch, ALIVE, 0).stats["loss/total"])
    assert losses[:3] == pytest.approx(losses[3:], rel=1e-3)
    assert all(abs(loss) < 10 for loss in losses)


@pytest.mark.parametrize(
    ("name", "module", "returns"),
    [
        ("impala", losses, "vtrace"),
        ("appo", losses, "vtrace"),
        ("ppo", losses, "gae"),
        ("a2c", losses, "gae"),
    ],
)
def test_returns_are_computed_once_per_update(
    make_step, make_batch, monkeypatch, name, module, returns
):
    """But for the first batch of all, whose own returns are the scale of its rewards."""
    real, calls = getattr(module, returns), []
    monkeypatch.setattr(module, returns, lambda **inputs: calls.append(1) or real(**inputs))
    step = make_step(name=name, normalize_returns=True)
    scales_of(step, [make_batch(seed=seed) for seed in range(3)])
    assert len(calls) == 4


def test_the_scale_moves_once_per_batch(make_step, make_batch):
    step, batch = make_step(normalize_returns=True), make_batch()
    first, second = scales_of(step, [batch, make_batch(seed=3)])
    assert first != second
    assert scales_of(step, [batch] * 3, is_first_pass=False) == [second] * 3


def test_values_that_go_astray_neither_end_a_step_nor_its_scale(make_columns, schema):
    """With relu, observations of any size are values of that size."""
    for name, size in itertools.product(("impala", "appo", "ppo", "a2c"), (1e7, 1e9)):
        model = ModelSection(hidden_sizes=(16, 16), activation="relu")
        section = AlgorithmSection(name=name, normalize_returns=True)
        step = UpdateStep(Policy(schema, model, seed=0), section, "cpu")
        for seed in range(25):
            columns = make_columns(5, seed)
            columns.obs[""][:] *= size
            step.run(Batch.over(columns), ALIVE, 0)
        json.dumps(step.capture().state, allow_nan=False)
        assert step.run(Batch.over(make_columns()), ALIVE, 0).applied, (name, size)


def test_parts_are_measured_as_one_batch(make_step, make_batch):
    """The learning rate is next to nothing, so that they all see the same values."""
    settings = {"name": "ppo", "normalize_returns": True, "lr": 1e-12}
    batch = make_batch()
    whole = scales_of(make_step(**settings), [batch])
    split = scales_of(make_step(**settings, num_minibatches=4), [batch])
    assert split == pytest.approx(whole, rel=1e-5)


def test_rewards_are_clipped_then_scaled_in_the_loss_only(make_step, make_batch):
    batch, clipped = make_batch(), make_batch()
    batch.rewards_BT.mul_(3)
    before = batch.rewards_BT.clone()
    clipped.rewards_BT.copy_(batch.rewards_BT.clamp(-1, 1) * 0.5)
    step = make_step(reward_clip="unit", reward_scale=0.5)
    assert step.run(batch, ALIVE, 0).stats == make_step().run(clipped, ALIVE, 0).stats
    assert torch.equal(batch.rewards_BT, before)


# -------------------- the target, and what is reported


def test_the_target_moves_with_updates_taken(make_step, make_batch):
    step, batch = make_step(**APPO), make_batch()
    start = [tensor.clone() for tensor in step.target.policy.tensors]
    stats = step.run(batch, ALIVE, 0).stats
    assert stats["policy/kl"] == pytest.approx(0, abs=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(step.target.policy.tensors, start, strict=True))
    assert step.run(batch, ALIVE, 0).stats["policy/kl"] > 0
    live = step.policy.tensors
    assert all(torch.equal(a, b) for a, b in zip(step.target.policy.tensors, live, strict=True))
    assert step.run(batch, ALIVE, 0).stats["policy/kl"] == pytest.approx(0, abs=1e-6)


def test_every_part_counts_towards_the_next_move_of_the_target(make_step, make_batch):
    settings = {"name": "appo", "num_minibatches": 3, "target_update_every_updates": 6}
    step, batch = make_step(**settings, lr=1e-2), make_batch()
    assert step.target is not None
    first = {name: tensor.clone() for name, tensor in step.target.tensors().items()}
    for num_passes in (1, 2):
        step.run(batch, ALIVE, 0)
        wanted = first if num_passes == 1 else step.policy.model.state_dict()
        assert all(torch.equal(step.target.tensors()[name], wanted[name]) for name in wanted)
    assert not torch.equal(step.target.tensors()["value_head.weight"], first["value_head.weight"])


def test_the_target_moves_in_mid_batch_where_its_time_comes_there(make_step, make_batch):
    step = make_step(name="appo", num_minibatches=4, target_update_every_updates=2, lr=1e-2)
    moved_after, kls = [], []
    original = step.target.note_update

    def noted(live, kl):
        kls.append(kl)
        original(live, kl)
        tensors = step.target.policy.tensors
        if all(torch.equal(a, b) for a, b in zip(tensors, live.tensors, strict=True)):
            moved_after.append(len(kls))

    step.target.note_update = noted
    step.run(make_batch(), ALIVE, 0)
    assert moved_after == [2, 4]
    # The first part of all, and the one behind the move, see a target that is the policy itself.
    assert [kl < 1e-6 for kl in kls] == [True, False, True, False]


def test_the_target_gets_the_statistics_of_the_weights_it_takes(make_step, make_batch):
    step = make_step(**APPO | {"target_update_every_updates": 1, "tau": 0.5, "normalize_obs": True})
    step.run(make_batch(), ALIVE, 0)
    for mine, theirs in zip(
        step.target.policy.model.buffers(), step.policy.model.buffers(), strict=True
    ):
        assert torch.equal(mine, theirs)


@EACH
def test_everything_reported_is_declared(make_step, make_batch, settings):
    result = make_step(**settings).run(make_batch(), ALIVE, 0)
    assert set(result.stats) <= REGISTRY.keys()
    assert "algorithm/return_scale" in result.stats
    assert ("algorithm/kl_coeff" in result.stats) == (settings.get("name") == "appo")
    assert not any(getattr(value, "requires_grad", False) for value in result.stats.values())
    assert all(type(value) is float for value in result.stats.values())


@pytest.mark.parametrize("core", ["gru", "lstm"])
@EACH
def test_recurrent_policies_are_trained_too(make_step, make_batch, schema, core, settings):
    assert len(schema.state) == {"gru": 1, "lstm": 2}[core]
    step = make_step(**settings)
    before = [tensor.clone() for tensor in step.policy.tensors]
    for seed in range(3):
        assert step.run(make_batch(seed=seed), ALIVE, 0).applied
    assert all(tensor.isfinite().all() for tensor in step.policy.tensors)
    assert not torch.equal(before[-1], step.policy.tensors[-1])
