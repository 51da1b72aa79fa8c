"""A graph is recorded where it can be; elsewhere a warning says why not, and updates go on.

Without a GPU a fake records, which takes notes of what torch is asked for.
"""

import contextlib
import logging

import pytest
import torch

from impala_async.training.graphs import NUM_WARM_UPDATES, Graphs
from impala_async.training.step import UpdateStep

CPU = torch.device("cpu")


class FakeStream:
    def __init__(self, device=None):
        pass

    def wait_stream(self, other):
        pass


class FakeCuda:
    """In the place of torch.cuda: streams, and graphs whose recording may fail."""

    Stream = FakeStream

    def __init__(self):
        self.stream_now = self.first_stream = FakeStream()
        self.graphs = []
        self.pools = []
        self.num_replays = 0
        self.is_failing = False

    def current_stream(self, device=None):
        return self.stream_now

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.stream_now = self.stream_now, stream
        try:
            yield
        finally:
            self.stream_now = before

    def CUDAGraph(self):
        return FakeGraph(self)

    @contextlib.contextmanager
    def graph(self, graph, pool=None, stream=None, capture_error_mode="global"):
        assert stream is self.stream_now, "recorded on another stream than warmed up"
        assert capture_error_mode == "thread_local"
        self.pools.append(pool)
        # As torch: what fails leaves it current.
        self.stream_now = FakeStream()
        if self.is_failing:
            raise RuntimeError("operation not permitted when stream is capturing")
        yield
        self.stream_now = stream


class FakeGraph:
    def __init__(self, cuda):
        self._cuda = cuda
        cuda.graphs.append(self)

    def pool(self):
        return self

    def replay(self):
        self._cuda.num_replays += 1


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeCuda()
    for name in ("Stream", "current_stream", "stream", "CUDAGraph", "graph"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    return fake


def test_without_a_gpu_there_is_a_warning_and_no_graph(make_step, make_batch, all_alive, caplog):
    plain = make_step()
    with caplog.at_level(logging.WARNING):
        asked = UpdateStep(make_step().policy, plain._section, "cpu", is_graphed=True)
    assert "no CUDA graph: the learner is on cpu" in caplog.text
    assert asked.way == "off"
    results = [step.run(make_batch(), all_alive, 0).stats for step in (plain, asked)]
    assert results[0] == results[1]


def test_a_batch_is_recorded_once_and_shares_the_memory_of_the_first(cuda, make_step, make_batch):
    step = make_step()
    masks = []

    def launch(batch, mask_BT, cost):
        masks.append(mask_BT.clone())
        return step._launch(batch, mask_BT, cost)

    graphs, batches = Graphs(launch, CPU), [make_batch(seed=seed) for seed in range(3)]
    for batch in batches * 2:
        assert graphs.run(batch, batch.mask_BT, 0.5) is not None
    first = cuda.graphs[0]
    assert cuda.pools == [None, first, first]
    assert cuda.num_replays == 6
    assert len(masks) == 3 * (NUM_WARM_UPDATES + 1)
    assert not any(mask_BT.any() for mask_BT in masks)


def test_a_recording_that_fails_is_given_up_with_all_that_was_recorded(
    cuda, make_step, make_batch, all_alive, caplog
):
    plain, step = make_step(), make_step()
    step._graphs = graphs = Graphs(step._launch, CPU)
    good, bad = make_batch(), make_batch()
    assert graphs.run(good, good.mask_BT, 0.0) is not None
    cuda.is_failing = True
    with caplog.at_level(logging.WARNING):
        results = [step.run(bad, all_alive, 0) for _ in range(2)]
    assert len(cuda.pools) == 2
    assert graphs.is_given_up
    assert graphs.run(good, good.mask_BT, 0.0) is None
    assert not graphs._graphs
    assert cuda.stream_now is cuda.first_stream
    assert caplog.text.count("not permitted") == 1
    assert step.way == "off"
    assert results[0].stats == plain.run(make_batch(), all_alive, 0).stats
