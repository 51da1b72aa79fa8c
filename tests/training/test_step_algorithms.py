"""Each algorithm's update: its parts, statistics and target, what it reports and learns."""

import itertools
import math

import numpy as np
import pytest
import torch

from impala_async.metrics.names import REGISTRY
from impala_async.training.parts import deal
from impala_async.training.rewards import scale_of
from tests.training.conftest import ALIVE_B, are_equal, is_same, remembered

PPO = {"name": "ppo", "num_minibatches": 3}
APPO = {"name": "appo", "kl_coeff": 0.5, "target_update_every_updates": 2}
EVERYTHING = {"normalize_obs": True, "normalize_returns": True, "lr": 1e-2}
CASES = {
    "impala": EVERYTHING | {"reduction": "sum"},
    "appo": EVERYTHING | APPO,
    "ppo": EVERYTHING | PPO,
    "ppo, rows": EVERYTHING | PPO | {"shuffle_rows": True},
    "appo, rows": EVERYTHING | APPO | {"num_minibatches": 2, "shuffle_rows": True},
    "a2c": EVERYTHING | {"name": "a2c", "optimizer": "rmsprop_tf"},
}
EACH = pytest.mark.parametrize("settings", CASES.values(), ids=CASES.keys())


@pytest.fixture
def parts(monkeypatch):
    """The columns of each part, as updates deal them."""
    seen = []

    def noted(*given):
        seen.append(deal(*given))
        return seen[-1]

    monkeypatch.setattr("impala_async.training.parts.deal", noted)
    return seen


# -------------------- parts


def test_each_part_is_a_step_and_reports_are_means(make_step, make_batch, parts):
    step, singles, batch = make_step(**PPO), make_step(name="ppo"), make_batch()
    result = step.run(batch, torch.tensor([True, True, False, True, True]), 0)
    assert result.num_updates == 3
    dealt = [columns_N.tolist() for columns_N in parts[0]]
    assert sorted(map(len, dealt)) == [1, 1, 2]
    assert sorted(itertools.chain(*dealt)) == [0, 1, 3, 4]
    # The same as one update after the other with only these columns alive.
    alive = [torch.zeros(5).index_fill(0, columns_N, 1).bool() for columns_N in parts[0]]
    stats = [singles.run(batch, alive_B, 0).stats for alive_B in alive]
    for mine, theirs in zip(step.parameters, singles.parameters, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    for name, value in result.stats.items():
        mean = sum(each[name] for each in stats) / 3
        assert value == pytest.approx(mean, rel=1e-3, abs=1e-5), name


def test_the_order_is_that_of_the_seed_and_of_the_updates_taken(make_step, make_batch, parts):
    step, batch = make_step(**PPO), make_batch()
    for number in range(3):
        step.run(batch, ALIVE_B, 0)
        wanted = deal(ALIVE_B, 3, (0, 3 * number))
        assert [part.tolist() for part in parts[-1]] == [part.tolist() for part in wanted]


@pytest.mark.parametrize("name", ["impala", "appo", "ppo", "a2c"])
def test_parts_of_rows_are_together_the_batch(make_step, make_batch, name):
    """With weights that stand still, sums over parts are those over the batch."""
    batch = make_batch()
    settings = {"name": name, "lr": 1e-30, "reduction": "sum", "normalize_advantages": False}
    settings |= {"normalize_returns": True, "normalize_obs": True}
    whole = make_step(**settings).run(batch, ALIVE_B, 0).stats
    step = make_step(**settings, num_minibatches=7, shuffle_rows=True)
    result = step.run(batch, ALIVE_B, 0)
    assert result.num_updates == 7
    for term in ("loss/policy", "loss/value", "loss/entropy", "loss/total"):
        assert result.stats[term] * 7 == pytest.approx(whole[term], rel=1e-4), term
    assert result.stats["algorithm/return_scale"] == pytest.approx(whole["algorithm/return_scale"])


@pytest.mark.parametrize("num_parts", [10, 30])
def test_parts_of_rows_leave_out_a_column_that_is_not_finite(make_step, make_batch, num_parts):
    batch = make_batch()
    batch.mask_BT[:] = True
    batch.rewards_BT[3, 4] = math.nan
    step = make_step(
        **PPO | {"shuffle_rows": True, "num_minibatches": num_parts, "normalize_obs": True}
    )
    searched, find = [], step._find_failing
    step._find_failing = lambda *given: searched.append(given) or find(*given)
    result = step.run(batch, ALIVE_B, 0)
    assert result.num_updates == min(num_parts, 4 * 6)
    # Nobody had to look for it in each part that has rows of it.
    assert not searched
    batch.rewards_BT[3, 4] = 1e30  # returns are finite, and their squares are not
    result = step.run(batch, ALIVE_B, 0)
    assert result.is_failed_B.tolist() == [False, False, False, True, False]
    # Where it is found, it is not looked for again.
    assert len(searched) == 1
    assert all(math.isfinite(value) for value in result.stats.values())
    assert all(parameter.isfinite().all() for parameter in step.parameters)
    (normalizer,) = step.policy.model.normalizers
    assert normalizer.count == 2 * 4 * 6


def test_a_column_that_is_not_finite_fails_alone(make_step, make_batch):
    """The rest of its part is learned from, and a part without a valid row is left out."""
    batch = make_batch()
    batch.rewards_BT[3, 0], batch.mask_BT[3, 0] = math.nan, True
    batch.mask_BT[2] = False
    for num_parts in (3, 5):
        step = make_step(**PPO | {"num_minibatches": num_parts, "normalize_obs": True})
        result = step.run(batch, ALIVE_B, 0)
        assert result.num_updates >= 2
        assert num_parts == 3 or result.num_updates == 3
        assert result.is_failed_B.tolist() == [False, False, False, True, False]
        assert all(math.isfinite(value) for value in result.stats.values())
        assert all(parameter.isfinite().all() for parameter in step.parameters)
        # Its observations do not count either.
        (normalizer,) = step.policy.model.normalizers
        assert normalizer.count == int(batch.mask_BT[[0, 1, 4]].sum())


@EACH
def test_a_skipped_update_leaves_everything_as_it_was(make_step, make_batch, settings):
    step, undisturbed = make_step(**settings), make_step(**settings)
    good, bad = make_batch(seed=1), make_batch(seed=2)
    bad.mask_BT[:, 0] = True
    no_rows, fresh = good.living(~ALIVE_B), remembered(step)
    for number, reward in enumerate((math.inf, math.nan, 3e38)):
        bad.rewards_BT[:, 0] = reward
        if number == 0:
            assert not step.run(bad, ALIVE_B, 0).num_updates
            assert is_same(remembered(step), fresh)
        for each in (step, undisturbed):
            assert each.run(good, ALIVE_B, number).num_updates
        before = remembered(step)
        # Without a valid row Adam would move on its momentum alone.
        for batch, alive_B, is_failed in (
            (good, ~ALIVE_B, False),
            (no_rows, ALIVE_B, False),
            (bad, ALIVE_B, True),
        ):
            skipped = step.run(batch, alive_B, number)
            assert not skipped.num_updates
            assert bool(skipped.not_finite) == bool(skipped.num_failed_in_a_row) == is_failed
        assert is_same(remembered(step), before)
    assert is_same(remembered(step), remembered(undisturbed))


# -------------------- passes


@pytest.mark.parametrize("is_plain", [True, False])
@pytest.mark.parametrize(
    ("settings", "is_fixed"),
    [(PPO, True), (PPO | {"shuffle_rows": True}, True), ({"name": "impala"}, False)],
)
def test_what_a_policy_learned_of_a_batch_does_not_change_the_returns_of_it(
    make_step, make_batch, monkeypatch, settings, is_fixed, is_plain
):
    """V-trace would take chance for merit: PPO has its ratios from before the batch."""
    if not is_plain:
        monkeypatch.setattr("impala_async.training.step.is_plain", lambda *_: False)
    losses = []
    for has_learned in (False, True):
        step = make_step(**settings, lr=1e-12)
        batch = step.begin(make_batch())
        if has_learned:
            with torch.no_grad():
                step.policy.model.policy_head.bias[0] += 2
        losses.append(step.run(batch, ALIVE_B, 0).stats["loss/value"])
    assert (losses[0] == pytest.approx(losses[1], rel=1e-6)) is is_fixed


def test_the_ratios_of_the_first_pass_are_those_of_now(make_step, make_batch):
    for settings in ({}, {"shuffle_rows": True}):
        one, other = (make_step(name="ppo", **settings) for _ in range(2))
        batch = make_batch()
        one.run(one.begin(batch), ALIVE_B, 0)
        other.run(batch, ALIVE_B, 0)
        for mine, theirs in zip(one.parameters, other.parameters, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_only_ppo_with_vtrace_looks_before(make_step, make_batch):
    for settings in ({}, {"name": "appo"}, {"name": "a2c"}, {"name": "ppo"}):
        assert make_step(**settings).begin(make_batch()).before == {}
    step = make_step(name="ppo", returns="vtrace")
    assert step.begin(make_batch()).before.keys() == {"log_probs_BT"}


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


def scales_of(step, batches, is_first_pass=True):
    results = [step.run(batch, ALIVE_B, 0, is_first_pass=is_first_pass) for batch in batches]
    return [result.stats["algorithm/return_scale"] for result in results]


def test_the_scale_is_that_of_the_returns_before_it(make_step, make_batch):
    """With gamma 0, ratios of 1 and values of 0, returns are the rewards."""
    batch, step = make_batch(), make_step(name="a2c", gamma=0.0, normalize_returns=True)
    with torch.no_grad():
        step.policy.model.value_head.weight.zero_()
    batch.rewards_BT.mul_(70).add_(10)
    rewards_N = batch.rewards_BT[batch.mask_BT].double()
    sums = [len(rewards_N), rewards_N.sum().item(), rewards_N.square().sum().item()]
    assert scales_of(step, [batch]) == pytest.approx([scale_of(sums)], rel=1e-4)


def test_the_scale_moves_once_per_batch_and_parts_are_measured_as_one(make_step, make_batch):
    step, batch = make_step(normalize_returns=True), make_batch()
    first, second = scales_of(step, [batch, make_batch(seed=3)])
    assert first != second
    assert scales_of(step, [batch] * 3, is_first_pass=False) == [second] * 3
    # The learning rate is next to nothing, so that all parts see the same values.
    settings = {"name": "ppo", "normalize_returns": True, "lr": 1e-12}
    whole, parts = (scales_of(make_step(**settings, num_minibatches=n), [batch]) for n in (1, 4))
    assert parts == pytest.approx(whole, rel=1e-5)


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
            losses.append(step.run(batch, ALIVE_B, 0).stats["loss/total"])
    assert losses[:3] == pytest.approx(losses[3:], rel=1e-3)
    assert all(abs(loss) < 10 for loss in losses)


@pytest.mark.parametrize(("clip", "bound"), [("unit", 1.0), (0.25, 0.25), (2, 2.0)])
def test_rewards_are_clipped_then_scaled_in_the_loss_only(make_step, make_batch, clip, bound):
    batch, clipped = make_batch(), make_batch()
    batch.rewards_BT.mul_(3)
    before = batch.rewards_BT.clone()
    clipped.rewards_BT.copy_(batch.rewards_BT.clamp(-bound, bound) * 0.5)
    step = make_step(reward_clip=clip, reward_scale=0.5)
    assert step.run(batch, ALIVE_B, 0).stats == make_step().run(clipped, ALIVE_B, 0).stats
    assert torch.equal(batch.rewards_BT, before)


def test_gradients_are_clipped_by_what_the_settings_say(make_step, make_batch):
    for by in ("norm", "value"):
        step = make_step(grad_clip=1e-3, grad_clip_by=by)
        step.run(make_batch(), ALIVE_B, 0)
        gradients = torch.cat([parameter.grad.flatten() for parameter in step.parameters])
        measure = gradients.norm() if by == "norm" else gradients.abs().max()
        assert float(measure) == pytest.approx(1e-3)


# -------------------- the target, and what is reported


def test_the_target_moves_in_mid_batch_where_its_time_comes_there(make_step, make_batch):
    settings = APPO | {"num_minibatches": 4, "lr": 1e-2, "tau": 1.0, "normalize_obs": True}
    step = make_step(**settings)
    moved_after, kls = [], []
    original = step.target.note_update

    def noted(live, kl):
        kls.append(kl)
        original(live, kl)
        if are_equal(step.target.model.state_dict().values(), live.state_dict().values()):
            moved_after.append(len(kls))

    step.target.note_update = noted
    step.run(make_batch(), ALIVE_B, 0)
    assert moved_after == [2, 4]
    # The first part of all, and the one behind the move, see a target that is the policy itself.
    assert [kl < 1e-6 for kl in kls] == [True, False, True, False]
    # It gets the statistics that the batch left behind, too.
    assert are_equal(step.target.model.buffers(), step.policy.model.buffers())


@EACH
def test_everything_reported_is_declared(make_step, make_batch, settings):
    result = make_step(**settings).run(make_batch(), ALIVE_B, 0)
    assert set(result.stats) <= REGISTRY.keys()
    assert "algorithm/return_scale" in result.stats
    assert ("algorithm/kl_coeff" in result.stats) == (settings.get("name") == "appo")
    assert all(type(value) is float for value in result.stats.values())


# -------------------- what is learned in a second or two


RIGHT = torch.tensor([2, 0, 3, 1])
CONTEXTS = torch.eye(4)[:, :3]
SLOW_TARGET = {"kl_coeff": 0.2, "tau": 0.5, "target_update_every_updates": 2}
PARTS = {"name": "ppo", "lr": 5e-3, "num_minibatches": 2}
# Its mean square starts at 1, far above these gradients: 0.9 forgets that soon.
TF = {"optimizer": "rmsprop_tf", "optimizer_options": {"eps": 1e-4, "decay": 0.9}}
NORMAL = {"normalize_advantages": True, "normalize_returns": True}
# Settings, and passes of each batch.
LEARNERS = {
    "impala, TF1's RMSProp": ({"lr": 5e-3} | TF, 1),
    "impala, AdamW, normal": ({"lr": 5e-3, "optimizer": "adamw"} | NORMAL, 1),
    "appo, KL and a slow target": ({"name": "appo", "lr": 5e-3} | SLOW_TARGET, 2),
    "ppo": (PARTS, 2),
    "ppo, V-trace": (PARTS | {"returns": "vtrace"}, 2),
    "a2c, RMSProp": ({"name": "a2c", "lr": 2e-3, "optimizer": "rmsprop"}, 1),
}


@pytest.mark.parametrize(("settings", "num_passes"), LEARNERS.values(), ids=LEARNERS.keys())
def test_a_contextual_bandit_is_solved(make_step, make_batch, settings, num_passes):
    """Four contexts, four actions, one of them right in each; every row is its own game."""
    step, batch = make_step(hidden=(32,), gamma=0.0, **settings), make_batch(22)
    rng, source = np.random.default_rng(0), torch.Generator().manual_seed(0)
    batch.mask_BT.fill_(True)
    for number in range(220 // num_passes):
        contexts_BS = torch.from_numpy(rng.integers(0, 4, (22, 7)))
        batch.obs[""].copy_(CONTEXTS[contexts_BS])
        seen = batch.obs[""][:, :-1].reshape(-1, 3).numpy()
        action = step.policy.act({"": seen}, {}, source)
        batch.actions[""].copy_(torch.from_numpy(action.actions[""]).view(22, 6))
        batch.log_probs_BT.copy_(torch.from_numpy(action.log_probs).view(22, 6))
        batch.rewards_BT.copy_(batch.actions[""] == RIGHT[contexts_BS[:, :-1]])
        for index in range(num_passes):
            alive_B = torch.ones(22, dtype=torch.bool)
            assert step.run(batch, alive_B, number * 132, is_first_pass=index == 0).num_updates
    with torch.no_grad():
        logits_NA, values_N = step.policy.model({"": CONTEXTS})
    assert logits_NA.softmax(-1)[range(4), RIGHT].min() > 0.8
    assert values_N.min() > 0.7
