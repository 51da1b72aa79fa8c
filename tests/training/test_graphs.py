"""A graph is recorded where it can be; elsewhere a warning says why not, and updates go on."""

import logging

import pytest
import torch

from impala_async.training.graphs import Graphs, why_not
from impala_async.training.step import UpdateStep

CUDA = torch.device("cuda")
GOOD = {"is_skipping": True, "num_parts": 1, "is_adapting": False}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"is_skipping": False}, "adam"),
        ({"num_parts": 2}, "num_minibatches"),
        ({"is_adapting": True}, "normalize_returns"),
    ],
)
def test_what_cannot_be_recorded_has_a_reason(change, reason):
    assert why_not(CUDA, **GOOD) is None
    assert reason in why_not(CUDA, **{**GOOD, **change})
    assert "cpu" in why_not(torch.device("cpu"), **GOOD)


def test_without_a_gpu_there_is_a_warning_and_no_graph(make_step, make_batch, all_alive, caplog):
    plain = make_step()
    with caplog.at_level(logging.WARNING):
        asked = UpdateStep(make_step().policy, plain._section, "cpu", is_graphed=True)
    assert "no CUDA graph: the learner is on cpu" in caplog.text
    results = [step.run(make_batch(), all_alive, 0).floats() for step in (plain, asked)]
    assert results[0] == results[1]


def test_a_recording_that_fails_is_given_up_once(make_step, make_batch, all_alive, caplog):
    class Failing(Graphs):
        num_calls = 0

        def _record(self, batch):
            self.num_calls += 1
            raise RuntimeError("operation not permitted when stream is capturing")

    plain, step = make_step(), make_step()
    step._graphs = failing = Failing(step._launch, torch.device("cpu"))
    with caplog.at_level(logging.WARNING):
        results = [step.run(make_batch(), all_alive, 0) for _ in range(2)]
    assert failing.num_calls == 1
    assert failing.is_given_up
    assert "not permitted" in caplog.text
    assert results[0].floats() == plain.run(make_batch(), all_alive, 0).floats()
