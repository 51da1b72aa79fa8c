"""Policies with a memory: what acting computed row by row is what learning computes at once."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from impala_async.config.model import ModelSection
from impala_async.schema import recurrent_state
from tests.test_policy import PLAIN, evaluate, generator, make_policy, random_obs, to_torch
from tests.test_policy import SCHEMAS as KINDS

T = 7
# False: a masked row. The row after it is an episode's first.
MASKS = torch.tensor(
    [
        [1, 1, 1, 1, 1, 1, 1],
        [1, 1, 0, 1, 1, 1, 1],
        [0, 1, 1, 1, 0, 1, 1],
        [1, 0, 1, 0, 1, 0, 1],
        # The bootstrap row begins an episode.
        [1, 1, 1, 1, 1, 1, 0],
        # Padding, as of a column that has no more rows.
        [1, 1, 0, 0, 0, 0, 0],
    ],
    dtype=torch.bool,
)
B = len(MASKS)

each_core = pytest.mark.parametrize("core", ["lstm", "gru"])


def remembering(core, schema=PLAIN, **settings):
    section = ModelSection(hidden_sizes=(16,), core=core, core_size=12, **settings)
    schema = replace(schema, rows=T, state=recurrent_state(core, 12))
    return make_policy(schema, section=section), schema


def act_through(policy, schema, obs_BS, mask_BT, state):
    """Act as a sampler does; the trajectory's actions, log-probabilities, and the state after."""
    source, rows, log_probs = generator(), [], []
    for row in range(T):
        obs = {name: np.ascontiguousarray(leaf[:, row]) for name, leaf in obs_BS.items()}
        action = policy.act(obs, state, source)
        rows.append(action.actions)
        log_probs.append(action.log_probs)
        state = action.state
        for part in state.values():
            part[~mask_BT[:, row].numpy()] = 0
    actions_BT = {
        part.name: torch.from_numpy(np.stack([row[part.name] for row in rows], 1))
        for part in schema.action.parts
    }
    return actions_BT, np.stack(log_probs), state


@each_core
@pytest.mark.parametrize("schema", KINDS.values(), ids=KINDS.keys())
def test_acting_row_by_row_is_evaluating_at_once(core, schema):
    policy, schema = remembering(core, schema)
    rng = np.random.default_rng(0)
    # Trajectories that are cut in mid-episode: they begin with what came before them.
    state = {
        name: rng.normal(size=part.shape).astype(np.float32)
        for name, part in policy.first_state(B).items()
    }
    last_obs, last_values_B = {}, None
    for seed in (1, 2, 3):
        obs_BS = random_obs(schema, B, T + 1, seed=seed)
        if last_values_B is not None:
            # The bootstrap row is row 0 of the next trajectory.
            for name, leaf in last_obs.items():
                obs_BS[name][:, 0] = leaf
        last_obs = {name: leaf[:, -1] for name, leaf in obs_BS.items()}
        before = {name: torch.from_numpy(part.copy()) for name, part in state.items()}
        actions_BT, acted_TB, state = act_through(policy, schema, obs_BS, MASKS, state)
        evaluation = evaluate(policy, to_torch(obs_BS), actions_BT, MASKS, before)
        np.testing.assert_allclose(evaluation.log_probs_TB.detach(), acted_TB, rtol=1e-5, atol=1e-5)
        values_SB = evaluation.values_SB.detach()
        if last_values_B is not None:
            torch.testing.assert_close(values_SB[0], last_values_B, rtol=1e-5, atol=1e-5)
        last_values_B = values_SB[-1]


@each_core
def test_the_state_matters_until_an_episode_begins(core):
    policy, schema = remembering(core)
    obs_BS = to_torch(random_obs(schema, B, T + 1))
    actions_BT = {"": torch.zeros(B, T, dtype=torch.int32)}
    zero = {name: torch.from_numpy(part) for name, part in policy.first_state(B).items()}
    one = {name: part + 1 for name, part in zero.items()}
    with torch.no_grad():
        values = [
            evaluate(policy, obs_BS, actions_BT, MASKS, state).values_SB for state in (zero, one)
        ]
    is_same_SB = values[0] == values[1]
    for column, mask_T in enumerate(MASKS):
        masked = (~mask_T).nonzero().flatten().tolist()
        # Up to the first masked row, which still belongs to the episode before.
        first = masked[0] + 1 if masked else T + 1
        assert is_same_SB[:, column].tolist() == [False] * first + [True] * (T + 1 - first)


@each_core
def test_no_gradient_crosses_the_beginning_of_an_episode(core):
    policy, _ = remembering(core)
    obs_BS = torch.randn(B, T + 1, 3, requires_grad=True)
    state = {
        name: torch.randn(part.shape).requires_grad_()
        for name, part in policy.first_state(B).items()
    }
    actions_BT = {"": torch.zeros(B, T, dtype=torch.int32)}
    evaluation = evaluate(policy, {"": obs_BS}, actions_BT, MASKS, state)
    # Column 1 ends at row 1, shows its last observation in row 2, and begins anew at row 3.
    after = evaluation.log_probs_TB[3:, 1].sum() + evaluation.values_SB[3:, 1].sum()
    gradients = torch.autograd.grad(after, [obs_BS, *state.values()], retain_graph=True)
    assert not gradients[0][1, :3].any()
    assert gradients[0][1, 3:].any(-1).all()
    assert not any(part.any() for part in gradients[1:])
    until = evaluation.values_SB[:3, 1].sum()
    gradients = torch.autograd.grad(until, [obs_BS, *state.values()])
    assert gradients[0][1, :3].any(-1).all()
    assert not gradients[0][1, 3:].any()
    assert all(part[1].any() for part in gradients[1:])


@each_core
def test_acting_leaves_the_state_that_it_was_given_alone(core):
    policy, schema = remembering(core)
    state = policy.first_state(4)
    assert [name for name in state] == [array.name for array in schema.state]
    obs = random_obs(schema, 4)
    after = policy.act(obs, state, generator()).state
    greedy_after = policy.act(obs, state).state
    assert not any(part.any() for part in state.values())
    for name, part in after.items():
        assert (part.dtype, part.shape) == (np.float32, (4, 12))
        assert part.any()
        assert part.flags.writeable
        assert part.tolist() == greedy_after[name].tolist()


@each_core
def test_columns_remember_for_themselves(core):
    policy, schema = remembering(core)
    state = {
        name: np.random.default_rng(1).normal(size=part.shape).astype(np.float32)
        for name, part in policy.first_state(5).items()
    }
    obs = random_obs(schema, 5)
    together = policy.act(obs, state).state
    for column in range(5):
        one = slice(column, column + 1)
        alone = policy.act(
            {name: leaf[one] for name, leaf in obs.items()},
            {name: part[one] for name, part in state.items()},
        ).state
        for name, part in alone.items():
            np.testing.assert_allclose(part[0], together[name][column], rtol=1e-5, atol=1e-6)
