"""A team's update is that of each trained member with its own rows, and nothing else."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from impala_async.metrics.names import of_policy, undeclared
from impala_async.schema import POLICY
from tests.training.conftest import ALIVE_B, are_equal, is_same, remembered, weights_of

SETTINGS = {
    "impala": {"normalize_returns": True},
    "appo": {"name": "appo", "kl_coeff": 0.5, "target_update_every_updates": 2},
    "ppo": {"name": "ppo", "num_minibatches": 2},
}
PLAYERS = np.array([[0] * 7, [1] * 7, [2] * 7, [0] * 3 + [1] * 4, [1] * 2 + [2] * 2 + [0] * 3])


def played(batch, players_BS):
    """The batch with who played each row; those of the third are masked, as an actor does it."""
    players_BS = torch.as_tensor(players_BS, dtype=torch.uint8)
    mask_BT = batch.mask_BT & (players_BS[:, :-1] < 2)
    return dataclasses.replace(batch, obs={**batch.obs, POLICY: players_BS}, mask_BT=mask_BT)


def spoilt(batch, is_spoilt_BT):
    return dataclasses.replace(
        batch,
        rewards_BT=torch.where(is_spoilt_BT, math.nan, batch.rewards_BT),
        log_probs_BT=torch.where(is_spoilt_BT, math.nan, batch.log_probs_BT),
        actions={"": torch.where(is_spoilt_BT, 3, batch.actions[""])},
        terminated_BT=batch.terminated_BT | is_spoilt_BT,
    )


def members_of(step):
    return {
        name: [tensor.clone() for tensor in member.tensors]
        for name, member in step.policy.members.items()
    }


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
@pytest.mark.parametrize("core", [None, "lstm"])
def test_each_member_learns_as_if_it_were_alone_with_its_rows(make_team_step, make_batch, settings):
    team, alone = make_team_step(**settings), make_team_step(**settings)
    # Columns without any row of a member are not shown to it.
    columns = {"a": [0, 3, 4], "b": [1, 3, 4]}
    for seed in range(3):
        batch = played(make_batch(seed=seed), PLAYERS)
        result = team.run(team.begin(batch), ALIVE_B, 100 * seed)
        single = []
        for number, (name, step) in enumerate(alone.steps.items()):
            own_BT = batch.mask_BT & (batch.obs[POLICY][:, :-1] == number)
            own = dataclasses.replace(batch, mask_BT=own_BT).take(torch.tensor(columns[name]))
            own = step.begin(own)
            single.append(step.run(own, torch.ones(3, dtype=torch.bool), 100 * seed))
        assert result.num_updates == max(one.num_updates for one in single) > 0
        first, second = (one.stats for one in single)
        wanted = {name: (first[name] + second[name]) / 2 for name in first}
        wanted |= {of_policy("a", name): value for name, value in first.items()}
        wanted |= {of_policy("b", name): value for name, value in second.items()}
        assert result.stats == pytest.approx(wanted, rel=1e-6)
    for name in ("a", "b"):
        assert is_same(remembered(team.steps[name]), remembered(alone.steps[name]))


def test_the_gradient_of_each_member_is_clipped(make_team_step, make_batch):
    team = make_team_step(grad_clip=1e-4, grad_clip_by="value")
    team.run(played(make_batch(), PLAYERS), ALIVE_B, 0)
    for step in team.steps.values():
        assert max(float(weight.grad.abs().max()) for weight in step.parameters) == np.float32(1e-4)


def test_what_others_play_and_dead_columns_have_no_influence(make_team_step, make_batch):
    batch, alive_B = played(make_batch(), PLAYERS), torch.arange(5) < 3
    is_others_BT = (batch.obs[POLICY][:, :-1] != 0) | ~alive_B.unsqueeze(-1) | ~batch.mask_BT
    clean, dirty = (make_team_step(train=("a",)) for _ in range(2))
    garbage = spoilt(batch, is_others_BT)
    assert clean.run(batch, alive_B, 0).stats == dirty.run(garbage, alive_B, 0).stats
    assert are_equal(weights_of(clean), weights_of(dirty))


@pytest.mark.parametrize(("player", "learned"), [(0, {"a"}), (2, set())])
def test_who_played_nothing_stays_as_it_is(make_team_step, make_batch, player, learned):
    step = make_team_step()
    before = members_of(step)
    batch = played(make_batch(), np.zeros((5, 7)))
    batch.obs[POLICY].fill_(player)
    result = step.run(batch, ALIVE_B, 0)
    assert result.num_updates == len(learned)
    assert bool(result.stats) == bool(result.num_updates) == bool(learned)
    assert not result.is_failed_B.any()
    after = members_of(step)
    assert {name for name in before if not are_equal(before[name], after[name])} == learned
    assert step.steps["b"].num_updates == 0


def test_a_column_fails_with_any_of_its_members(make_team_step, make_batch):
    step, batch = make_team_step(), played(make_batch(), PLAYERS)
    batch.rewards_BT[1, 0] = math.nan
    assert batch.mask_BT[1, 0]
    result = step.run(batch, ALIVE_B, 0)
    # `b` has rows in columns 1, 3 and 4, and learns from the last two.
    assert result.num_updates == 1
    assert result.is_failed_B.tolist() == [False, True, False, False, False]
    assert result.not_finite
    assert all(math.isfinite(value) for value in result.stats.values())
    assert undeclared(result.stats) == set()
    batch.rewards_BT.fill_(math.nan)
    assert [step.run(batch, ALIVE_B, 0).num_failed_in_a_row for _ in range(2)] == [1, 2]


def test_a_team_has_not_failed_while_one_of_its_members_learns(make_team_step, make_batch):
    step, batch = make_team_step(), played(make_batch(), PLAYERS)
    batch = spoilt(batch, batch.obs[POLICY][:, :-1] == 1)
    for _ in range(3):
        result = step.run(batch, ALIVE_B, 0)
        assert (result.num_updates, result.num_failed_in_a_row) == (1, 0)
        assert result.not_finite
    assert result.num_updates_of["policies/a/loss/value"] == 1
    # Nor because of what failed while it did, once nobody learns any more.
    of_b = spoilt(played(make_batch(), PLAYERS * 0 + 1), torch.tensor(True))
    assert step.run(of_b, ALIVE_B, 0).num_failed_in_a_row == 1


@pytest.mark.parametrize(
    ("settings", "wanted"), [({}, [4]), ({"name": "ppo", "num_minibatches": 2}, [2, 4])]
)
def test_a_copy_is_taken_anew_by_updates_of_its_source(
    make_team_step, make_batch, settings, wanted
):
    step = make_team_step(copy_every_updates=3, normalize_obs=True, **settings)
    taken = members_of(step)["a"]
    moments = []
    for number in range(8):
        # In every second batch the source plays nothing, and that does not count.
        players = PLAYERS if number % 2 == 0 else np.ones((5, 7))
        before = step.steps["a"].num_updates
        step.run(played(make_batch(seed=number), players), ALIVE_B, 0)
        if step.steps["a"].num_updates // 3 > before // 3:
            taken = members_of(step)["a"]
            moments.append(number)
        # Statistics of observations are copied with the weights.
        assert are_equal(members_of(step)["past"], taken)
    assert moments == wanted


def test_members_split_batches_each_in_its_own_way(make_team_step):
    step = make_team_step(name="ppo", num_minibatches=2)
    assert step.steps["a"].seed != step.steps["b"].seed


def test_a_trained_member_that_never_plays_is_told_of_once(
    make_team_step, make_batch, monkeypatch, caplog
):
    monkeypatch.setattr("impala_async.training.team_step.WARN_AT_BATCH", 3)
    team = make_team_step()
    batch = played(make_batch(), np.where(PLAYERS == 1, 0, PLAYERS))
    for number in range(5):
        team.run(batch, ALIVE_B, 0)
        assert len(caplog.messages) == (number >= 2)
    (said,) = caplog.messages
    assert said.startswith("policies.train: b learned nothing from 3 batches")
