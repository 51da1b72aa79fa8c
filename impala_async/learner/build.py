"""Builds a learner from a config and a schema: policy, update, slots, loader.

Runs on: event loop, once
"""

import logging
import math
from collections.abc import Callable

import torch

from impala_async.config.learner import LearnerSection
from impala_async.config.model import TORSOS, ModelSection
from impala_async.config.ranks import Place
from impala_async.config.run import RunConfig
from impala_async.errors import CheckpointError, ConfigError, SpacesError
from impala_async.learner.handoff import Channels, Progress
from impala_async.learner.learner_thread import LearnerThread
from impala_async.learner.loader import DeviceLoader, HostLoader, allocator_for, make_current
from impala_async.learner.slots import allocate_slots
from impala_async.metrics.host import find_memory
from impala_async.models.actor_critic import ActorCritic, shape_of
from impala_async.models.flat import Snapshot
from impala_async.models.torso import device_of, pick_precision
from impala_async.policy import build_policy, layout_of
from impala_async.schema import Schema
from impala_async.training.checkpoint import TrainingState
from impala_async.training.ranks import Ranks
from impala_async.training.step import UpdateStep
from impala_async.training.team_step import TeamStep
from impala_async.weights import WeightsLayout

logger = logging.getLogger(__name__)

# Weights, gradients, two moments of the optimizer, and snapshots that are being sent.
MODEL_COPIES = 7
# For each choice in each row: what a network says of it, its logarithms and gradients.
CHOICE_BYTES = 32
# An input, an output, and what a residual block holds for later.
LAYERS_AT_ONCE = 3
# No more of free memory is asked for: the estimate is within a fourteenth, and others take some.
FREE_SHARE = 0.9
GIB = 1 << 30


def build_learner(
    config: RunConfig,
    schema: Schema,
    *,
    start: Progress,
    training: TrainingState | None,
    channels: Channels,
    release: Callable[[int], None],
    ranks: Ranks | None = None,
) -> tuple[LearnerThread, WeightsLayout]:
    """Everything behind the full slots, and the layout of the weights that come out of it; or
    ConfigError, which is a SpacesError where other spaces would do."""
    section, ranks = config.learner, ranks or Ranks()
    device = pick_device(section.device, ranks.place)
    num_host_slots, num_device_slots = num_slots(section, device)
    check_memory(config, schema, num_host_slots, device)
    torch.set_num_threads(section.threads)
    step, precision = build_step(config, schema, device, ranks)
    if training is not None:
        try:
            step.restore(training)
        except CheckpointError as error:
            fits = "does not fit this run (did the environment change, or the release?)"
            raise CheckpointError(f"{training.path} {fits}: {error}") from None
    is_lockstep = config.pace.is_lockstep
    # Weights that torsos round anyway travel in float32 only in lockstep.
    is_coarse = precision == torch.bfloat16 and not is_lockstep
    layout = step.policy.coarse_layout if is_coarse else step.policy.layout
    slots = allocate_slots(schema, section.batch_columns, num_host_slots, allocator_for(device))
    loader = HostLoader(schema, slots)
    if device.type == "cuda":
        loader = DeviceLoader(
            schema, slots, release, num_device_slots=num_device_slots, device=device
        )
    # An algorithm of the user's own is tried here: its error ends the start, and not a run.
    make_current(device)
    step.prepare(loader.batches[0])
    thread = LearnerThread(
        step=step,
        snapshot=Snapshot(layout, step.policy.tensors),
        loader=loader,
        section=section,
        stop=config.stop,
        progress=start,
        channels=channels,
        device=device,
        is_lockstep=is_lockstep,
        cut_share=config.pace.cut_share,
        ranks=ranks,
    )
    return thread, layout


def build_step(
    config: RunConfig, schema: Schema, device: torch.device, ranks: Ranks | None = None
) -> tuple[UpdateStep | TeamStep, torch.dtype]:
    """The update, with its policy, and the precision in which torsos compute."""
    policies, seed, ranks = config.policies, config.seed, ranks or Ranks()
    policy = build_policy(schema, config.model, policies, seed=seed, device=device)
    precision = pick_precision(config.model.precision, policy.torso_name, device)
    policy.compute_in(precision)
    words = policy.torso_name, device, str(precision).removeprefix("torch.")
    logger.info("learning with %s on %s in %s", *words)
    schedule = {"schedule_env_steps": config.schedule_env_steps}
    algorithm = config.algorithm.model_copy(update=schedule)
    if policies.names:
        return TeamStep(policy, algorithm, policies, seed=seed, ranks=ranks), precision
    (alone,) = policy.members.values()
    is_graphed = device.type == "cuda"
    step = UpdateStep(alone, algorithm, seed=seed, is_graphed=is_graphed, ranks=ranks)
    return step, precision


def pick_device(name: str, place: Place | None = None) -> torch.device:
    """The device that a config names; ConfigError if it is not here. Each rank of a host has a GPU
    of its own, and where one would have none, none of them begins."""
    device, wants = device_of(name), "cpu or auto"
    last = device.index or 0
    if device.type == "cuda" and place is not None and place.count > 1:
        device = torch.device("cuda", place.local)
        last = max(place.local, place.num_local - 1)
        wants = "cpu, or no more ranks on a host than it has GPUs"
    num_gpus = torch.cuda.device_count()
    if device.type == "cuda" and last >= num_gpus:
        raise ConfigError(
            f"learner.device: {name!r} is not on this machine, which has {num_gpus} GPUs; wants "
            f"{wants}"
        )
    return device


def num_slots(section: LearnerSection, device: torch.device) -> tuple[int, int]:
    """How many slots the host has, and the GPU. On a CPU the ring's batches lie in the host's, on a
    GPU in the GPU's, where one of those that wait lies too. The host has two at least: one is
    filled while the other is loaded."""
    ring, waiting = section.minibatch_buffer_size, section.queue_size
    if device.type == "cuda":
        return max(2, waiting), ring + 1
    return ring + waiting + 1, 0


def check_memory(config: RunConfig, schema: Schema, num_slots: int, device: torch.device) -> None:
    """Raise SpacesError if slots, weights and updates want more memory than the system says is
    free: the spaces may come from an actor, and what they ask for must not end the learner."""
    slot_bytes = num_slots * config.learner.batch_columns * schema.layout.column_bytes
    model = shape_of(config.model, schema.inputs, schema.action)
    if model:
        model.check_state(schema)
    weights_bytes = sum(tensor.nbytes for tensor in model.state_dict().values()) if model else 0
    model_bytes = MODEL_COPIES * max(1, len(schema.policies)) * weights_bytes
    update_bytes, is_by_part = _update_bytes(config, schema, model, device)
    free_bytes = find_memory().free
    if slot_bytes + model_bytes + update_bytes > FREE_SHARE * free_bytes:
        smaller = "raise algorithm.num_minibatches, " if is_by_part else ""
        raise SpacesError(
            f"it wants {slot_bytes / GIB:.1f} GiB for {num_slots} batches, "
            f"{model_bytes / GIB:.1f} GiB for the model and {update_bytes / GIB:.1f} GiB for an "
            f"update, and {free_bytes / GIB:.1f} GiB are free: lower learner.batch_columns, "
            "trajectory.rows, learner.queue_size, learner.minibatch_buffer_size or "
            f"model.hidden_sizes, {smaller}or choose an environment with fewer actions or smaller "
            "images"
        )


def find_layout(model: ModelSection, schema: Schema) -> bytes | None:
    """The digest by which a model is known before it is built; None where only that tells."""
    found = shape_of(model, schema.inputs, schema.action)
    return None if schema.policies or not found else layout_of(dict(found.state_dict())).digest


def _update_bytes(
    config: RunConfig, schema: Schema, model: ActorCritic | None, device: torch.device
) -> tuple[int, bool]:
    """The most of this host's memory that an update has at a time, and whether a part of a batch
    has it, with its gradients; else it is the whole batch, where that is looked at before."""
    algorithm, num_columns = config.algorithm, config.learner.batch_columns
    num_parts, num_rows = algorithm.num_minibatches, schema.rows + 1
    row_bytes, kept = CHOICE_BYTES * schema.action.num_choices, [0]
    if model and device.type == "cpu":
        precision = pick_precision(config.model.precision, model.torso_name, device)
        kept = [n * precision.itemsize // torch.float32.itemsize for n in _kept(model, schema)]
    if algorithm.shuffle_rows:
        rows_of_part = math.ceil(num_columns * num_rows / num_parts)
    else:
        rows_of_part = math.ceil(num_columns / num_parts) * num_rows
    of_part = rows_of_part * (row_bytes + sum(kept))
    of_whole = 0
    if algorithm.looks_at_whole(config.learner.most_passes):
        # Without gradients a layer's output is gone when the next one has its own.
        of_whole = num_columns * num_rows * sum(sorted(kept)[-LAYERS_AT_ONCE:])
    # Several policies learn one after the other, each from its own columns.
    most = max(of_part, of_whole) // max(1, len(schema.policies))
    return most, of_part >= of_whole


def _kept(model: ActorCritic, schema: Schema) -> list[int]:
    """Bytes of each tensor that an update in float32 keeps of a row until it has its gradients,
    where the network is one of ours: another one may do anything with tensors without values."""
    if model.torso_name not in TORSOS:
        return [0]
    of_one, of_two = (_kept_of(model, schema, num_rows) for num_rows in (1, 2))
    return [two - one for one, two in zip(of_one, of_two, strict=True)]  # 0 of weights


def _kept_of(model: ActorCritic, schema: Schema, num_rows: int) -> list[int]:
    storages: dict[torch.UntypedStorage, None] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        # A result that the next layer keeps as well is there once.
        storages[tensor.untyped_storage()] = None
        return tensor

    obs, state = (
        {
            array.name: torch.empty(
                (num_rows, *array.shape), dtype=getattr(torch, array.dtype), device="meta"
            )
            for array in arrays
        }
        for arrays in (schema.inputs.leaves, schema.state)
    )
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(obs, tuple(state.values()), torch.empty((num_rows, 1), device="meta").bool())
    return [storage.nbytes() for storage in storages]
