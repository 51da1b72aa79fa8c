"""Columns that make an update fail are found, and the others are learned from."""

import math

import pytest
import torch

from impala_async.config.run import AlgorithmSection, ModelSection
from impala_async.policy import Policy
from impala_async.training.batch import Batch
from impala_async.training.culprits import MAX_TRIES, find_culprits
from impala_async.training.step import UpdateStep


@pytest.mark.parametrize(
    "bad", [[], [0], [63], [5, 40], [20, 21, 22, 23], list(range(64))], ids=str
)
def test_the_bad_ones_are_found_in_few_tries(bad):
    tried = []

    def is_good(columns_N):
        tried.append(columns_N)
        return not set(columns_N.tolist()) & set(bad)

    found = sorted(find_culprits(torch.arange(64), is_good).tolist())
    assert len(tried) <= MAX_TRIES
    assert set(bad) <= set(found)
    assert len(found) <= max(len(bad), 1) * 2
    if len(bad) <= 2:
        assert found == bad


def test_what_is_not_decided_counts_as_found():
    bad = set(range(0, 4096, 2))
    found = find_culprits(torch.arange(4096), lambda columns: not bad & set(columns.tolist()))
    assert bad <= set(found.tolist())


CORE_SIZE = 8
CASES = {
    "impala": {},
    "appo": {"name": "appo"},
    "ppo": {"name": "ppo", "num_minibatches": 2},
    "returns": {"normalize_returns": True},
}


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("core", [None, "lstm"])
def test_large_columns_neither_stop_nor_spoil_the_others(schema, make_columns, settings, core):
    """With relu the loss of what is admitted overflows: 50 such updates would end the run."""
    sizes = {} if core is None else {"core": core, "core_size": CORE_SIZE}
    model = ModelSection(hidden_sizes=(16, 16), activation="relu", **sizes)
    step = UpdateStep(
        Policy(schema, model, seed=0), AlgorithmSection.model_validate(settings), "cpu"
    )
    for seed in range(8):
        columns = make_columns(8, seed)
        columns.obs[""][2:4] = 1e15
        columns.rewards_CT[2:4] = 1e15 * columns.mask_CT[2:4]
        before = [parameter.detach().clone() for parameter in step.parameters]
        result = step.run(Batch.over(columns), torch.ones(8, dtype=torch.bool), 0)
        assert result.applied
        assert result.num_failed_in_a_row == 0
        assert set(result.is_failed_B.nonzero().flatten().tolist()) <= {2, 3}
        assert any((a != b).any() for a, b in zip(before, step.parameters, strict=True))
        assert all(parameter.isfinite().all() for parameter in step.parameters)


def test_the_others_are_learned_from_as_if_the_bad_ones_were_dead(make_step, make_batch):
    batch = make_batch()
    batch.rewards_BT[1], batch.mask_BT[1] = math.nan, True
    alive_B = torch.tensor([True, False, True, True, True])
    spoilt, clean = make_step(), make_step()
    result = spoilt.run(batch, torch.ones(5, dtype=torch.bool), 0)
    assert torch.equal(result.is_failed_B, ~alive_B)
    assert result.not_finite
    clean.run(batch, alive_B, 0)
    for mine, theirs in zip(spoilt.parameters, clean.parameters, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
