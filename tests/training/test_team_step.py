"""A team's update is that of each trained member with its own rows, and nothing else."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from impala_async.metrics.names import REGISTRY
from impala_async.schema import POLICY

SETTINGS = {
    "impala": {"normalize_returns": True},
    "appo": {"name": "appo", "kl_coeff": 0.5, "target_update_every_updates": 2},
    "ppo": {"name": "ppo", "num_minibatches": 2},
}
each_algorithm = pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())


def weights_of(policy):
    return [tensor.clone() for tensor in policy.tensors]


def are_equal(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def played(batch, players_BS):
    """The batch with who played each row; those of the third are masked, as an actor does it."""
    players_BS = torch.as_tensor(players_BS, dtype=torch.uint8)
    mask_BT = batch.mask_BT & (players_BS[:, :-1] < 2)
    return dataclasses.replace(batch, obs={**batch.obs, POLICY: players_BS}, mask_BT=mask_BT)


def rows_of(batch, number):
    """What a single policy would have been sent: the others' rows are none of its own."""
    own_BT = batch.obs[POLICY][:, :-1] == number
    return dataclasses.replace(batch, mask_BT=batch.mask_BT & own_BT)


PLAYERS = np.array([[0] * 7, [1] * 7, [2] * 7, [0] * 3 + [1] * 4, [1] * 2 + [2] * 2 + [0] * 3])


@each_algorithm
@pytest.mark.parametrize("core", [None, "lstm"])
def test_each_member_learns_as_if_it_were_alone_with_its_rows(
    make_team_step, make_batch, all_alive, settings
):
    team, alone = make_team_step(**settings), make_team_step(**settings)
    # Columns without any row of a member are not shown to it.
    columns = {"a": [0, 3, 4], "b": [1, 3, 4]}
    for seed in range(3):
        batch = played(make_batch(seed=seed), PLAYERS)
        result = team.run(batch, all_alive, 100 * seed)
        single = {}
        for number, (name, step) in enumerate(alone.steps.items()):
            own = rows_of(batch, number).take(torch.tensor(columns[name]))
            single[name] = step.run(own, torch.ones(3, dtype=torch.bool), 100 * seed)
        assert result.num_updates == max(one.num_updates for one in single.values()) > 0
        means = {
            name: (single["a"].stats[name] + single["b"].stats[name]) / 2
            for name in single["a"].stats
        }
        assert result.stats == pytest.approx(means, rel=1e-6)
    for name in ("a", "b"):
        mine, theirs = team.steps[name], alone.steps[name]
        assert are_equal(weights_of(mine.policy), weights_of(theirs.policy))
        assert mine.capture().state == theirs.capture().state


def test_what_others_play_has_no_influence(make_team_step, make_batch, all_alive):
    batch = played(make_batch(), PLAYERS)
    others_BT = batch.obs[POLICY][:, :-1] != 0
    nothing = torch.tensor(math.nan)
    garbage = dataclasses.replace(
        batch,
        rewards_BT=torch.where(others_BT, nothing, batch.rewards_BT),
        log_probs_BT=torch.where(others_BT, nothing, batch.log_probs_BT),
    )
    clean, dirty = make_team_step(train=("a",)), make_team_step(train=("a",))
    assert clean.run(batch, all_alive, 0).stats == dirty.run(garbage, all_alive, 0).stats
    assert are_equal(weights_of(clean.policy), weights_of(dirty.policy))


def test_a_member_that_played_nothing_stays_as_it_is(make_team_step, make_batch, all_alive):
    step = make_team_step()
    before = {name: weights_of(member) for name, member in step.policy.members.items()}
    result = step.run(played(make_batch(), np.zeros((5, 7))), all_alive, 0)
    assert result.num_updates == 1
    changed = {
        name: not are_equal(before[name], weights_of(member))
        for name, member in step.policy.members.items()
    }
    assert changed == {"a": True, "b": False, "past": False}
    assert step.steps["b"].num_updates == 0


def test_rows_of_nobody_who_learns_are_no_update(make_team_step, make_batch, all_alive):
    step = make_team_step()
    before = weights_of(step.policy)
    batch = played(make_batch(), np.zeros((5, 7)))
    batch.obs[POLICY].fill_(2)
    result = step.run(batch, all_alive, 0)
    assert (result.applied, result.stats) == (False, {})
    assert not result.is_failed_B.any()
    assert are_equal(before, weights_of(step.policy))


def test_a_dead_column_is_shown_to_nobody(make_team_step, make_batch):
    alive_B = torch.tensor([True, True, True, False, False])
    batch = played(make_batch(), PLAYERS)
    garbage = dataclasses.replace(
        batch, rewards_BT=torch.where(alive_B.unsqueeze(-1), batch.rewards_BT, math.nan)
    )
    first, second = make_team_step(), make_team_step()
    assert first.run(batch, alive_B, 0).stats == second.run(garbage, alive_B, 0).stats
    assert are_equal(weights_of(first.policy), weights_of(second.policy))


def test_a_column_fails_with_any_of_its_members(make_team_step, make_batch, all_alive):
    step, batch = make_team_step(), played(make_batch(), PLAYERS)
    batch.rewards_BT[1, 0] = math.nan
    assert batch.mask_BT[1, 0]
    result = step.run(batch, all_alive, 0)
    # `b` has rows in columns 1, 3 and 4, and learns from the last two.
    assert result.num_updates == 1
    assert result.is_failed_B.tolist() == [False, True, False, False, False]
    assert all(math.isfinite(value) for value in result.stats.values())
    assert set(result.stats) <= REGISTRY.keys()


@pytest.mark.parametrize(
    ("settings", "num_passes"), [({}, 1), ({"name": "ppo", "num_minibatches": 2}, 2)]
)
def test_a_copy_is_taken_anew_by_updates_of_its_source(
    make_team_step, make_batch, all_alive, settings, num_passes
):
    step = make_team_step(copy_every_updates=3, normalize_obs=True, **settings)
    main, past = (step.policy.members[name] for name in ("a", "past"))
    taken = weights_of(main)
    assert are_equal(weights_of(past), taken)
    moments = []
    for number in range(8):
        # In every second batch the source plays nothing, and that does not count.
        players = PLAYERS if number % 2 == 0 else np.ones((5, 7))
        before = step.steps["a"].num_updates
        step.run(played(make_batch(seed=number), players), all_alive, 0)
        after = step.steps["a"].num_updates
        if after // 3 > before // 3:
            taken = weights_of(main)
            moments.append(number)
        # Statistics of observations are copied with the weights.
        assert are_equal(weights_of(past), taken)
    assert moments == ([4] if num_passes == 1 else [2, 4])


def test_members_split_batches_each_in_its_own_way(make_team_step):
    step = make_team_step(name="ppo", num_minibatches=2)
    assert step.steps["a"]._seed != step.steps["b"]._seed


def test_a_trained_member_that_never_plays_is_told_of_once(
    make_team_step, make_batch, all_alive, monkeypatch, caplog
):
    monkeypatch.setattr("impala_async.training.team_step.WARN_AT_BATCH", 3)
    team = make_team_step()
    batch = played(make_batch(), np.where(PLAYERS == 1, 0, PLAYERS))
    for _ in range(2):
        team.run(batch, all_alive, 0)
    assert not caplog.records
    for _ in range(3):
        team.run(batch, all_alive, 0)
    (said,) = caplog.messages
    assert said.startswith("policies.train names 'b', which has learned nothing from 3 batches")
