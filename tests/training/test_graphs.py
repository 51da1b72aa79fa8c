"""An update by a graph has the same memory each time, and learns what any other would."""

import logging
import math

import pytest
import torch

from impala_async.config.algorithm import AlgorithmSection
from impala_async.config.ranks import Place
from impala_async.training.graphs import MOST_GRAPHS, Graphs
from impala_async.training.ranks import Ranks
from impala_async.training.step import UpdateStep
from tests.training import test_algorithms
from tests.training.conftest import ALIVE_B, is_same, remembered
from tests.training.test_step_algorithms import EACH, PPO

# A graph computes what torch does without one.
pytestmark = pytest.mark.usefixtures("by_torch")
SCHEDULE = {"entropy_cost": 0.02, "entropy_cost_end": 0.0, "schedule_env_steps": 100}


@pytest.fixture
def make_graphed(make_step, monkeypatch):
    """A step, and its graphs: here they compute anew, into the memory of the first time."""

    def make(**settings):
        step, made = make_step(**settings, is_graphed=True), []

        def make_graph(compute):
            found = compute()
            made.append(found)
            gradients = [parameter.grad for parameter in step.parameters]

            def run():
                found.numbers.copy_(compute().numbers)
                for parameter, gradient in zip(step.parameters, gradients, strict=True):
                    gradient.copy_(parameter.grad)

            return found, run

        monkeypatch.setattr("impala_async.training.graphs.make_graph", make_graph)
        return step, made

    return make


@EACH
def test_it_learns_the_same_to_the_last_bit(make_step, make_graphed, make_batch, settings):
    settings = settings | SCHEDULE
    plain, (step, graphs) = make_step(**settings), make_graphed(**settings)
    for number in range(8):
        batch = make_batch(seed=number)
        if number == 5:
            batch.rewards_BT[3, 0], batch.mask_BT[3, 0] = math.nan, True
        alive_B = ALIVE_B.index_fill(0, torch.tensor(1), number != 6)
        # A batch with several passes is looked at before; both kinds may come.
        begun = [each.begin(batch) if number % 2 else batch for each in (plain, step)]
        results = [
            each.run(mine, alive_B, 20 * number)
            for each, mine in zip((plain, step), begun, strict=True)
        ]
        assert results[1].stats == results[0].stats
        assert results[1].is_failed_B.tolist() == results[0].is_failed_B.tolist()
    assert is_same(remembered(plain), remembered(step))
    assert graphs


def test_so_many_sizes_that_come_again_have_graphs(make_step, make_graphed, make_batch):
    plain, (step, graphs) = make_step(), make_graphed()
    for num_columns in range(10, 20):
        step.run(make_batch(num_columns), torch.ones(num_columns, dtype=torch.bool), 0)
        plain.run(make_batch(num_columns), torch.ones(num_columns, dtype=torch.bool), 0)
    assert not graphs
    for _ in range(3):
        for num_columns in range(2, 10):
            batch, alive_B = make_batch(num_columns), torch.ones(num_columns, dtype=torch.bool)
            for each in (plain, step):
                each.run(batch, alive_B, 0)
    assert len(graphs) == MOST_GRAPHS
    assert is_same(remembered(plain), remembered(step))


def test_a_graph_that_cannot_be_made_is_told_of_once(make_step, make_batch, monkeypatch, caplog):
    def refuse(compute):
        compute()
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    monkeypatch.setattr("impala_async.training.graphs.make_graph", refuse)
    plain, step = make_step(**PPO), make_step(**PPO, is_graphed=True)
    with caplog.at_level(logging.WARNING):
        for number in range(4):
            for each in (plain, step):
                each.run(make_batch(seed=number), ALIVE_B, 0)
    (told,) = caplog.messages
    assert told.endswith("no CUDA graph of one: operation not permitted when stream is capturing")
    assert is_same(remembered(plain), remembered(step))


def test_code_of_the_users_own_has_no_graph(make_graphed, make_batch):
    step, graphs = make_graphed(name=f"{test_algorithms.__name__}:imitation")
    for _ in range(3):
        step.run(make_batch(), ALIVE_B, 0)
    assert not graphs


def test_sums_over_ranks_are_no_part_of_a_graph(make_step):
    for settings, is_one in (({"name": "ppo"}, False), ({"name": "impala"}, True)):
        section = AlgorithmSection.model_validate(settings)
        ranks = Ranks(Place(0, 2))
        step = UpdateStep(make_step().policy, section, is_graphed=True, ranks=ranks)
        assert isinstance(step._compute, Graphs) is is_one
