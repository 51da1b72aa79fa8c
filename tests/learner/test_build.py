"""From settings to a learner: how many slots, which device, and what is put together."""

from typing import Any

import pytest
import torch

from impala_async.config.learner import LearnerSection
from impala_async.errors import CheckpointError
from impala_async.learner.build import (
    Learner,
    build_learner,
    max_waiting,
    num_device_slots,
    num_host_slots,
)
from impala_async.learner.channels import Progress
from impala_async.learner.threads.loader import HostLoader
from impala_async.policy import Policy
from impala_async.training.batch import Batch
from impala_async.training.state import TrainingState
from impala_async.training.step import UpdateStep
from tests.learner.columns import small_schema
from tests.learner.fakes import Listener
from tests.learner.server_harness import config_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("ring", "queue_size", "on_cpu", "on_gpu"),
    [(1, 1, 3, 3), (1, 2, 4, 4), (4, 2, 7, 4), (2, 5, 8, 7)],
)
def test_the_number_of_host_slots(ring: int, queue_size: int, on_cpu: int, on_gpu: int) -> None:
    section = LearnerSection(minibatch_buffer_size=ring, queue_size=queue_size)
    assert num_host_slots(section, CPU) == on_cpu == max(ring + queue_size + 1, ring + 2)
    assert num_host_slots(section, CUDA) == on_gpu


@pytest.mark.parametrize(
    ("ring", "queue_size", "is_pipelined", "num_slots", "most"),
    [(1, 1, False, 2, 4), (1, 1, True, 3, 5), (4, 2, True, 6, 6)],
)
def test_the_number_of_device_slots_and_of_batches_that_can_wait(
    ring: int, queue_size: int, is_pipelined: bool, num_slots: int, most: int
) -> None:
    section = LearnerSection(minibatch_buffer_size=ring, queue_size=queue_size)
    assert num_device_slots(section, is_pipelined=is_pipelined) == num_slots
    assert max_waiting(section, CUDA, is_pipelined=is_pipelined) == most
    assert max_waiting(section, CPU, is_pipelined=False) == queue_size + 1


@pytest.mark.parametrize("mode", ["async", "lockstep"])
def test_in_lockstep_nothing_is_pipelined(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    monkeypatch.setattr(UpdateStep, "is_pipelined", True)
    learner: Any = build(pace={"mode": mode}).bodies["learner"]
    assert learner.__self__._is_pipelined == (mode == "async")


def build(training: TrainingState | None = None, **sections: dict[str, Any]) -> Learner:
    schema = small_schema()
    return build_learner(
        config_of(schema, **sections),
        schema,
        start=Progress(1),
        training=training,
        channels=Listener().channels,
        release=lambda index: None,
    )


def test_a_learner_on_a_cpu() -> None:
    learner = build(learner={"minibatch_buffer_size": 2, "queue_size": 3, "batch_columns": 5})
    assert len(learner.slots) == 6 == learner.full.capacity
    assert {len(slot.obs) for slot in learner.slots} == {5}
    assert isinstance(learner.loader, HostLoader)
    assert learner.bodies.keys() == {"learner"}
    config = config_of(small_schema())
    policy = Policy(small_schema(), config.model, seed=config.seed)
    assert learner.layout == policy.layout


# Of torch about its own modules, when it loads the compiler.
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
def test_what_is_compiled_is_compiled_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And with the threads of the learner, without which it would be compiled anew there."""
    prepared: list[tuple[Batch, int]] = []

    def prepare(step: UpdateStep, batch: Batch) -> None:
        assert step.way == "inductor"
        prepared.append((batch, torch.get_num_threads()))

    monkeypatch.setattr(UpdateStep, "prepare", prepare)
    before = torch.get_num_threads()
    try:
        learner = build(learner={"compile": "inductor", "threads": 2})
    finally:
        torch.set_num_threads(before)
    ((batch, num_threads),) = prepared
    assert num_threads == 2
    assert not batch.mask_BT.any()
    first = Batch.over(learner.slots[0].columns)
    assert batch.rewards_BT.data_ptr() == first.rewards_BT.data_ptr()
    assert batch.mask_BT.stride() == first.mask_BT.stride()


def step_of(**model: Any) -> UpdateStep:
    config = config_of(small_schema(), model=model)
    policy = Policy(small_schema(), config.model, seed=77)
    return UpdateStep(policy, config.algorithm, "cpu")


def test_a_checkpoint_is_put_into_the_model() -> None:
    step, listener = step_of(), Listener()
    schema = small_schema()
    learner = build_learner(
        config_of(schema, stop={"env_steps": 1}),
        schema,
        start=Progress(2, update=5, env_steps_trained=10),
        training=step.capture(),
        channels=listener.channels,
        release=lambda index: None,
    )
    # Its stop is reached already, so the body ends at once.
    learner.bodies["learner"]()
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
    precision: str, pace: dict[str, Any], is_coarse: bool
) -> None:
    schema, listener = small_schema(), Listener()
    config = config_of(schema, model={"precision": precision}, stop={"env_steps": 1}, **pace)
    learner = build_learner(
        config,
        schema,
        start=Progress(1, update=5, env_steps_trained=10),
        training=None,
        channels=listener.channels,
        release=lambda index: None,
    )
    learner.bodies["learner"]()
    (first,) = listener.weights
    policy = Policy(schema, config.model, seed=config.seed)
    sent = policy.coarse_layout if is_coarse else policy.layout
    assert learner.layout == sent
    assert first.layout_digest == sent.digest
    assert first.buffer.nbytes == sent.num_bytes


def test_a_checkpoint_of_another_model_is_refused() -> None:
    with pytest.raises(CheckpointError):
        build(training=step_of(hidden_sizes=[5]).capture())
