"""Compiled or as it is written, an update is the same; what does not compile goes on without.

A graph is recorded where it can be. Without a GPU a fake records, which takes notes of what torch
is asked for.
"""

import contextlib
import logging
import threading
import weakref

import pytest
import torch

from impala_async.training.backprop import NUM_WARM_UPDATES, Backprop, Graphs
from impala_async.training.step import UpdateStep

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_compiled():
    """What differs from one step to the next torch takes for what changes, and compiles it so."""
    torch.compiler.reset()


def use(step, backend):
    """The step, compiled by this backend."""
    old = step._backprop
    step._backprop = Backprop(step.policy, step.target, old._algorithm, backend)
    return step


def no_compiler(graph, inputs):
    raise RuntimeError("no C++ compiler found\nsecond line")


@pytest.mark.parametrize("name", ["impala", "appo", "ppo", "a2c"])
def test_what_is_compiled_computes_what_is_written(make_step, make_batch, name):
    settings = {"name": name, "lr": 1e-2, "entropy_cost": 0.1, "entropy_cost_end": 0.0}
    plain, compiled = (make_step(schedule_env_steps=100, **settings) for _ in range(2))
    num_graphs = 0

    def backend(graph, inputs):
        nonlocal num_graphs
        num_graphs += 1
        return graph.forward

    use(compiled, backend)
    before = [tensor.clone() for tensor in compiled.policy.tensors]
    blank = make_batch()
    blank.mask_BT.fill_(False)
    compiled.prepare(blank)
    assert num_graphs == 1
    assert all(map(torch.equal, before, compiled.policy.tensors))
    # All are alive in the last.
    for seed in range(6):
        batch, alive_B = make_batch(seed=seed), torch.arange(5) != seed
        want = plain.run(batch, alive_B, 10 * seed)
        got = compiled.run(batch, alive_B, 10 * seed)
        assert got.applied
        assert got.stats == pytest.approx(want.stats, rel=1e-4, abs=1e-6)
    for one, other in zip(plain.policy.tensors, compiled.policy.tensors, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
    # A schedule compiles nothing anew, and neither do columns that are dead, or all alive again.
    assert num_graphs == 1


def test_what_does_not_compile_says_so_once_and_goes_on(make_step, make_batch, all_alive, caplog):
    plain, failing = make_step(), use(make_step(), no_compiler)
    with caplog.at_level(logging.WARNING):
        results = [
            step.run(make_batch(), all_alive, 0) for step in (failing, failing, plain, plain)
        ]
    (record,) = [each for each in caplog.records if "learner.compile" in each.getMessage()]
    assert "no C++ compiler found" in record.getMessage()
    assert "\n" not in record.getMessage()
    assert results[0].stats == results[2].stats
    assert results[1].stats == results[3].stats


def test_a_fault_of_the_loss_itself_is_no_fault_of_the_compiler(make_step, make_batch, all_alive):
    step = use(make_step(), "eager")
    step._backprop._policy = None
    with pytest.raises(AttributeError):
        step.run(make_batch(), all_alive, 0)


# Of torch about its own doings, which look at the gradient of every tensor in an object.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_what_is_prepared_is_compiled_for_another_thread_and_nothing_has_changed(
    make_step, make_batch
):
    num_graphs = 0

    def backend(graph, inputs):
        nonlocal num_graphs
        num_graphs += 1
        return graph.forward

    class Drawing(torch.nn.Module):
        def forward(self, features):
            return features + torch.rand_like(features)

    settings = {"name": "appo", "normalize_returns": True, "normalize_obs": True}
    step = use(make_step(**settings), backend)
    model = step.policy.model
    model.policy_torso = torch.nn.Sequential(model.policy_torso, Drawing())
    before, drawn = step.capture(), torch.random.get_rng_state()
    blank = make_batch()
    blank.mask_BT.fill_(False)
    step.prepare(blank)
    assert num_graphs == 1
    assert torch.equal(torch.random.get_rng_state(), drawn)
    after = step.capture()
    assert before.state() == after.state()
    for group, tensors in before.tensors().items():
        assert tensors.keys() == after.tensors()[group].keys()
        assert all(torch.equal(after.tensors()[group][name], old) for name, old in tensors.items())
    results = []
    body = threading.Thread(
        target=lambda: results.append(step.run(make_batch(), torch.arange(5) != 2, 0))
    )
    body.start()
    body.join()
    assert results[0].applied
    assert num_graphs == 1


def test_nothing_is_prepared_where_nothing_is_compiled(make_step, make_batch, caplog):
    step = make_step()
    with caplog.at_level(logging.INFO):
        step.prepare(make_batch())
    assert caplog.text == ""
    assert step.num_updates == 0


def test_what_failed_is_given_back_before_it_is_computed_anew(make_step, make_batch, all_alive):
    """The activations of an attempt may be all the memory that there is."""

    class Activations:
        pass

    attempts = []

    def backend(graph, inputs):
        held = Activations()
        attempts.append(weakref.ref(held))
        raise RuntimeError("no C++ compiler found")

    step = use(make_step(), backend)
    loss, left = step._backprop.loss, []

    def watched(*args):
        left.append(attempts[0]())
        return loss(*args)

    step._backprop.loss = watched
    step.run(make_batch(), all_alive, 0)
    assert step.way == "off"
    assert left == [None]


# -------------------- CUDA graphs


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
