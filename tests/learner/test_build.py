"""From settings to a learner: how many slots, which device, and what is put together."""

import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from impala_async.config.learner import LearnerSection
from impala_async.config.model import ModelSection
from impala_async.errors import CheckpointError, ConfigError, SpacesError
from impala_async.learner import build as module
from impala_async.learner.build import (
    GIB,
    build_learner,
    check_memory,
    find_layout,
    num_slots,
    pick_device,
)
from impala_async.learner.handoff import ClosedError, Progress
from impala_async.learner.loader import HostLoader
from impala_async.policy import Policy
from impala_async.schema import (
    ActionPart,
    ActionSpec,
    ArraySpec,
    ObsSpec,
    Schema,
    policy_leaf,
    recurrent_state,
)
from impala_async.training.batch import Batch
from impala_async.training.step import UpdateStep
from impala_async.weights import Version
from tests.learner.columns import small_schema
from tests.learner.fakes import Listener
from tests.learner.hand_actor import DEADLINE_S
from tests.learner.server_harness import config_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("ring", "queue_size", "on_cpu", "on_gpu", "on_device"),
    [(1, 1, 3, 3, 2), (1, 2, 4, 4, 2), (4, 2, 7, 4, 5), (2, 5, 8, 7, 3)],
)
def test_the_numbers_of_slots(ring, queue_size, on_cpu, on_gpu, on_device):
    section = LearnerSection(minibatch_buffer_size=ring, queue_size=queue_size)
    assert num_slots(section, CPU) == (on_cpu, 0) == (max(ring + queue_size + 1, ring + 2), 0)
    assert num_slots(section, CUDA) == (on_gpu, on_device)


def build(training=None, *, start=None, listener=None, **sections):
    schema = small_schema()
    thread, layout = build_learner(
        config_of(schema, **sections),
        schema,
        start=start or Progress(1),
        training=training,
        channels=(listener or Listener()).channels,
        release=lambda index: None,
    )
    # It is told of what is published.
    weights = thread._snapshot.take(Version(1, 0))
    assert weights is not None
    assert weights.layout_digest == layout.digest
    return thread


def test_a_learner_on_a_cpu():
    learner = build(learner={"minibatch_buffer_size": 2, "queue_size": 3, "batch_columns": 5})
    loader = learner.loader
    assert len(loader.slots) == 6 == loader.full.capacity == loader.num_slots
    assert {len(slot.obs) for slot in loader.slots} == {5}
    assert (type(loader), loader.bodies) == (HostLoader, {})


@pytest.mark.parametrize("mode", ["async", "lockstep"])
def test_in_lockstep_what_is_full_at_the_end_is_trained(mode):
    learner = build(pace={"mode": mode}, actor={"num_envs": 2}, train={"num_actors": 2})
    learner.loader.full.put(0)
    learner.loader.close()
    assert len(learner.loader.leftovers()) == 1
    learner.loader.full.put(1)
    with pytest.raises(ClosedError) if mode == "async" else nullcontext():
        learner.loader.get(timeout=0.0)


def test_waiting_takes_next_to_no_processor_time():
    listener = Listener()
    learner = build(listener=listener, learner={"lease_s": 1})
    thread = threading.Thread(target=learner.run)
    thread.start()
    give_up_at = time.monotonic() + DEADLINE_S
    while not listener.weights:
        assert time.monotonic() < give_up_at
        time.sleep(0.001)
    before = time.process_time()
    time.sleep(0.7)
    spent_s = time.process_time() - before
    learner.loader.close()
    thread.join(DEADLINE_S)
    assert spent_s < 0.05
    assert listener.reports[-1].starved_at is not None


def test_an_algorithm_is_tried_before_anything_runs(monkeypatch):
    prepared: list[tuple[Batch, int]] = []

    def prepare(step, batch):
        prepared.append((batch, torch.get_num_threads()))

    monkeypatch.setattr(UpdateStep, "prepare", prepare)
    before = torch.get_num_threads()
    try:
        learner = build(learner={"threads": 2})
    finally:
        torch.set_num_threads(before)
    ((batch, num_threads),) = prepared
    assert num_threads == 2
    assert not batch.mask_BT.any()
    first = learner.loader.slots[0].columns.rewards_CT
    assert np.shares_memory(batch.rewards_BT.numpy(), first)


def step_of(**model: Any) -> UpdateStep:
    config = config_of(small_schema(), model=model)
    policy = Policy(small_schema(), config.model, seed=77)
    return UpdateStep(policy, config.algorithm)


def test_a_checkpoint_is_put_into_the_model():
    step, listener = step_of(), Listener()
    start = Progress(2, update=5, env_steps_trained=10)
    learner = build(step.capture(), start=start, listener=listener, stop={"env_steps": 1})
    # Its stop is reached already, so the body ends at once.
    learner.run()
    assert listener.stops == ["env_steps"]
    (first,) = listener.weights
    assert first.version == (2, 5)
    flat = torch.cat([tensor.reshape(-1) for tensor in step.policy.tensors])
    assert first.buffer.tobytes() == flat.numpy().tobytes()


@pytest.mark.parametrize(
    ("precision", "pace", "is_coarse"),
    [
        ("bfloat16", {}, True),
        ("float32", {}, False),
        ("bfloat16", {"pace": {"mode": "lockstep"}}, False),
    ],
)
def test_what_torsos_round_anyway_travels_in_bfloat16_but_not_in_lockstep(
    precision, pace, is_coarse
):
    listener, start = Listener(), Progress(1, update=5, env_steps_trained=10)
    settings = {"model": {"precision": precision}, "stop": {"env_steps": 1}, **pace}
    learner = build(start=start, listener=listener, **settings)
    learner.run()
    (first,) = listener.weights
    policy = Policy(small_schema(), config_of(small_schema(), **settings).model, seed=0)
    sent = policy.coarse_layout if is_coarse else policy.layout
    assert first.layout_digest == sent.digest
    assert first.buffer.nbytes == sent.num_bytes


def test_a_checkpoint_of_another_model_is_refused():
    with pytest.raises(CheckpointError):
        build(training=step_of(hidden_sizes=[5]).capture())


# -------------------- the device, and what its machine cannot hold


def test_the_layout_is_known_before_the_model_is_built():
    schema = small_schema()
    config = config_of(schema)
    policy = Policy(schema, config.model, seed=0)
    assert find_layout(config.model, schema) == policy.layout.digest


def test_auto_takes_what_is_there(monkeypatch):
    for is_there, device in ((True, CUDA), (False, CPU)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda is_there=is_there: is_there)
        assert pick_device("auto") == device
    assert pick_device("cpu") == CPU


def test_a_device_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match=r"^learner\.device: 'cuda:1' is not on .* has 1 GPUs"):
        pick_device("cuda:1")


@pytest.fixture
def free(monkeypatch):
    """A machine with 4 GiB to spare."""
    free = SimpleNamespace(available=4 * GIB)
    monkeypatch.setattr(module.psutil, "virtual_memory", lambda: free)


def check(schema: Schema, num_slots: int = 4, **sections: dict[str, Any]) -> None:
    check_memory(config_of(schema, learner={"batch_columns": 16}, **sections), schema, num_slots)


def test_slots_that_do_not_fit_are_refused_with_the_numbers_and_the_keys(free):
    wide = ObsSpec((ArraySpec("obs", (1 << 14,), "uint8"),))
    schema = replace(small_schema(), obs=wide, rows=63)
    check(schema, num_slots=220)
    says = (
        r"4\.\d GiB for 256 batches and .* 4\.0 GiB are free: lower .*_size or learner\.queue_size$"
    )
    with pytest.raises(SpacesError, match=says):
        check(schema, num_slots=256)


def test_a_model_that_does_not_fit_is_refused_without_being_built(free):
    schema, names = small_schema(), ("main", "other", "third")
    wide_core = replace(schema, state=recurrent_state("lstm", 10**5))
    several = replace(schema, obs=ObsSpec((*schema.obs.leaves, policy_leaf(names))), policies=names)
    wide_model = {"hidden_sizes": [5200, 5200]}
    check(schema, model=wide_model)
    for too_large, model in (
        (replace(schema, action=discrete(10**8)), {}),
        (replace(schema, action=discrete(2**31 - 1)), {}),
        (wide_core, {"core": "lstm", "core_size": 10**5}),
        # Each of several policies wants weights.
        (several, wide_model),
    ):
        with pytest.raises(SpacesError, match=r"GiB for the model"):
            check(too_large, model=model)


def discrete(num_choices: int) -> ActionSpec:
    return ActionSpec((ActionPart("", "discrete", (num_choices,)),))


class Measures(torch.nn.Module):
    """Asks for a value while it is made, which a meta tensor has not."""

    num_out = 3

    def __init__(self, obs: ObsSpec, section: ModelSection) -> None:
        super().__init__()
        self.size = int(torch.tensor(obs.leaves[0].shape).prod())


def test_a_network_of_one_s_own_that_cannot_be_estimated_is_let_through(free):
    check(small_schema(), model={"name": f"{__name__}:Measures", "hidden_sizes": None})
