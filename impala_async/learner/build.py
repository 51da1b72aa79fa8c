"""From a config and a schema to a learner that is ready to run: policy, update, slots, loader.

The device is picked here, and what the memory of this machine cannot hold is refused.

Runs on: event loop, once
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import psutil
import torch

from impala_async.config.learner import LearnerSection
from impala_async.config.model import TORSOS, ModelSection
from impala_async.config.run import RunConfig
from impala_async.errors import CheckpointError, ConfigError, SpacesError
from impala_async.learner.handoff import Channels, IndexQueue, Progress
from impala_async.learner.slots import Slot, allocate_slots
from impala_async.learner.threads.learner_thread import LearnerThread
from impala_async.learner.threads.loader import (
    DeviceLoader,
    HostLoader,
    allocator_for,
    make_current,
)
from impala_async.models.actor_critic import ActorCritic
from impala_async.models.flat import Snapshot
from impala_async.models.torso import pick_precision
from impala_async.policy import AnyPolicy, build_policy, layout_of
from impala_async.schema import Schema
from impala_async.training.state import TrainingState
from impala_async.training.step import UpdateStep
from impala_async.training.team_step import TeamStep
from impala_async.weights import WeightsLayout

logger = logging.getLogger(__name__)

# Weights, gradients, two moments of the optimizer, and snapshots that are being sent.
MODEL_COPIES = 7
GIB = 1 << 30


@dataclass(frozen=True)
class Learner:
    """The service runs these and, at the end, empties them. `bodies` are threads to start."""

    slots: list[Slot]
    full: IndexQueue
    loader: HostLoader
    layout: WeightsLayout
    """The layout of published weights."""
    bodies: dict[str, Callable[[], None]]


def build_learner(
    config: RunConfig,
    schema: Schema,
    *,
    start: Progress,
    training: TrainingState | None,
    channels: Channels,
    release: Callable[[int], None],
) -> Learner:
    """Everything behind the full slots; raises ConfigError if that cannot be built."""
    device = pick_device(config.learner.device)
    section = config.learner
    num_slots = num_host_slots(section, device)
    check_memory(config, schema, num_slots)
    step = build_step(config, schema, device)
    if training is not None:
        try:
            step.restore(training)
        except CheckpointError as error:
            message = f"{training.origin} does not fit this run: {error}"
            raise CheckpointError(message) from None
    layout = _layout_sent(config, step.policy, device)
    snapshot = Snapshot(layout, step.policy.tensors)
    slots = allocate_slots(schema, section.batch_columns, num_slots, allocator_for(device))
    full = IndexQueue("full", num_slots)
    # A batch that is full at the end is trained on: else the end would hang on the clock.
    is_lockstep = config.pace.is_lockstep
    loader: HostLoader
    if device.type == "cuda":
        loader = DeviceLoader(
            slots,
            full,
            release,
            schema=schema,
            num_device_slots=num_device_slots(section),
            device=device,
            is_drained=is_lockstep,
        )
    else:
        loader = HostLoader(slots, full, is_drained=is_lockstep)
    # An algorithm of the user's own is tried here: its error ends the start, and not a run.
    make_current(device)
    torch.set_num_threads(section.threads)
    step.prepare(loader.blank())
    thread = LearnerThread(
        step=step,
        snapshot=snapshot,
        loader=loader,
        section=section,
        stop=config.stop,
        progress=start,
        channels=channels,
        device=device,
        max_waiting=max_waiting(section, device),
        is_lockstep=is_lockstep,
    )
    bodies = {"learner": thread.run}
    if isinstance(loader, DeviceLoader):
        bodies["loader"] = loader.run
    return Learner(slots, full, loader, layout, bodies)


def _layout_sent(config: RunConfig, policy: AnyPolicy, device: torch.device) -> WeightsLayout:
    """Weights that torsos round to bfloat16 anyway travel in float32 only in lockstep."""
    precision = pick_precision(config.model.precision, config.model.name, device)
    is_coarse = precision == torch.bfloat16 and not config.pace.is_lockstep
    return policy.coarse_layout if is_coarse else policy.layout


def build_step(config: RunConfig, schema: Schema, device: torch.device) -> UpdateStep | TeamStep:
    """The policy and its update; raises ConfigError if they cannot be built."""
    policies, seed = config.policies, config.seed
    policy = build_policy(schema, config.model, policies, seed=seed, device=device)
    precision = pick_precision(config.model.precision, config.model.name, device)
    policy.compute_in(precision)
    logger.info("learning on %s in %s", device, str(precision).removeprefix("torch."))
    if policies.names:
        return TeamStep(policy, config.algorithm, policies, device, seed=seed)
    (alone,) = policy.members.values()
    return UpdateStep(alone, config.algorithm, device, seed=seed)


def pick_device(name: str) -> torch.device:
    """The device that a config names; `auto` is a GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"learner.device: {name!r} is not on this machine, which has "
            f"{torch.cuda.device_count()} GPUs; wants cpu or auto"
        )
    return device


def num_host_slots(section: LearnerSection, device: torch.device) -> int:
    """On a CPU the ring's batches lie in host slots too."""
    waiting_and_filling = section.queue_size + 1
    if device.type == "cuda":
        return waiting_and_filling + 1
    return section.minibatch_buffer_size + waiting_and_filling


def num_device_slots(section: LearnerSection) -> int:
    """One is being loaded beside those of the ring."""
    return section.minibatch_buffer_size + 1


def max_waiting(section: LearnerSection, device: torch.device) -> int:
    """Batches that can be full, loading or ready at once: all slots but those of the ring."""
    num_slots = num_host_slots(section, device)
    if device.type == "cuda":
        num_slots += num_device_slots(section)
    return num_slots - section.minibatch_buffer_size


def check_memory(config: RunConfig, schema: Schema, num_slots: int) -> None:
    """Raise SpacesError if slots and weights want more memory than is free.

    The spaces may come from an actor, and what they ask for must not end the learner. The system
    says what is free; the limit of a container, and a GPU's memory, are not looked at.
    """
    slot_bytes = num_slots * config.learner.batch_columns * schema.layout.column_bytes
    model_bytes = MODEL_COPIES * max(1, len(schema.policies)) * _weights_bytes(config, schema)
    free_bytes = psutil.virtual_memory().available
    if slot_bytes + model_bytes > free_bytes:
        advice = "learner.batch_columns, trajectory.rows, "
        advice += "learner.minibatch_buffer_size or learner.queue_size"
        if model_bytes > slot_bytes:
            advice = "model.hidden_sizes, or choose an environment with fewer actions"
        raise SpacesError(
            f"it wants {slot_bytes / GIB:.1f} GiB for {num_slots} batches and "
            f"{model_bytes / GIB:.1f} GiB for the model, and {free_bytes / GIB:.1f} GiB are free: "
            f"lower {advice}"
        )


def find_layout(model: ModelSection, schema: Schema) -> bytes | None:
    """The digest by which everybody knows the model of a schema, before it is built; None where
    only building it tells."""
    state = _shapes(model, schema)
    return None if schema.policies or not state else layout_of(state).digest


def _weights_bytes(config: RunConfig, schema: Schema) -> int:
    return sum(tensor.nbytes for tensor in _shapes(config.model, schema).values())


def _shapes(section: ModelSection, schema: Schema) -> dict[str, torch.Tensor]:
    """One network, of which no memory is taken: `meta` tensors only have a shape."""
    try:
        with torch.device("meta"):
            model = ActorCritic(section, schema.inputs, schema.action)
    except (RuntimeError, TypeError, ConfigError):
        # A network of one's own may ask for values, and only tensors with memory have some.
        if section.name in TORSOS:
            raise
        return {}
    return dict(model.state_dict())
