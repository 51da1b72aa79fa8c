"""A rank on a GPU sums by NCCL, and comes to what one without others comes to."""

import pytest
import torch
import torch.distributed as dist

from bench.ranks import Summing
from impala_async.config.algorithm import AlgorithmSection
from impala_async.config.model import ModelSection
from impala_async.config.ranks import Place
from impala_async.policy import Policy
from impala_async.training.graphs import Graphs
from impala_async.training.ranks import Ranks
from impala_async.training.step import UpdateStep
from tests.gpu.test_updates import COLUMNS, SCHEMA, fill, slot_on
from tests.training.conftest import PLAIN

pytestmark = pytest.mark.gpu

KINDS = {
    "impala": {},
    "appo": {"name": "appo", "kl_coeff": 0.5, "kl_target": 0.01, "normalize_returns": True},
    "ppo": {"name": "ppo", "num_minibatches": 2, "normalize_advantages": True},
}


@pytest.fixture
def nccl(device):
    backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield device
    dist.destroy_process_group()


@pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS.keys())
def test_it_learns_what_a_learner_without_ranks_does(nccl, settings, caplog):
    section = AlgorithmSection.model_validate(PLAIN | {"lr": 1e-3} | settings)
    steps = []
    for ranks in (Ranks(), Summing(Place())):
        policy = Policy(SCHEMA, ModelSection(), seed=3, device=nccl)
        steps.append(UpdateStep(policy, section, is_graphed=True, ranks=ranks))
    slot = slot_on(nccl)
    for number in range(8):
        fill(slot, number)
        if number == 5:
            slot.rewards_BT[2] = float("nan")
        alive_B = torch.arange(COLUMNS) != (4 if number == 4 else -1)
        alone, summed = (step.run(slot, alive_B, number) for step in steps)
        assert summed.num_updates == alone.num_updates > 0
        assert torch.equal(summed.is_failed_B, alone.is_failed_B)
        assert summed.stats == pytest.approx(alone.stats, rel=1e-4, abs=1e-5)
    for mine, theirs in zip(*(step.policy.tensors for step in steps), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    # Sums over ranks are no part of a graph.
    is_graphed = isinstance(steps[1]._compute, Graphs)
    assert is_graphed == (not section.has_normal_advantages)
    assert not caplog.records
