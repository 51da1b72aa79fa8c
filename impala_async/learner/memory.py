"""Refuses, before anything is built, a learner that this machine's memory cannot hold.

The spaces may come from an actor: what they ask for must not end the learner that they ask. What
is free is what the system says; the limit of a container, and a GPU's memory, are not looked at.

    B columns of a batch, S observation rows

Runs on: event loop, once
"""

import math
from typing import NamedTuple

import psutil
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from impala_async.config.model import TORSOS
from impala_async.config.run import RunConfig
from impala_async.models.actor_critic import ActorCritic
from impala_async.spec import Schema

# Weights, gradients, two moments of the optimizer, and snapshots that are being sent.
MODEL_COPIES = 7
# Logits and their gradients, as they are and normalised.
LOGIT_COPIES = 4
GIB = 1 << 30


class _Want(NamedTuple):
    """So many bytes for something, and what makes them fewer."""

    num_bytes: int
    purpose: str
    advice: str

    def __str__(self) -> str:
        return f"{self.num_bytes / GIB:.1f} GiB for {self.purpose}"


def check_memory(config: RunConfig, schema: Schema, num_slots: int, device: torch.device) -> None:
    """Raise ValueError if slots, model and an update want more memory than is free."""
    slot_bytes = config.learner.batch_columns * schema.layout.column_bytes
    keys = "learner.batch_columns, trajectory.rows"
    if device.type == "cpu":
        # On a GPU the batches of the ring are not in this memory.
        keys += ", learner.minibatch_buffer_size"
    wants = [_Want(num_slots * slot_bytes, f"{num_slots} batches", f"{keys} or learner.queue_size")]
    try:
        wants += _model_wants(config, schema, device)
    except (RuntimeError, TypeError, ValueError):
        # A network of one's own may ask for values, and only those with memory have some.
        if config.model.name in TORSOS:
            raise
    free_bytes = psutil.virtual_memory().available
    if sum(want.num_bytes for want in wants) > free_bytes:
        *others, last = map(str, wants)
        raise ValueError(
            f"it wants {', '.join(others)} and {last}, and {free_bytes / GIB:.1f} GiB are free: "
            f"lower {max(wants).advice}"
        )


def _model_wants(config: RunConfig, schema: Schema, device: torch.device) -> list[_Want]:
    """Of the model, and on this host of an update."""
    model = _plan(config, schema)
    weights_bytes = sum(tensor.nbytes for tensor in model.state_dict().values())
    wants = [
        _Want(
            MODEL_COPIES * max(1, len(schema.policies)) * weights_bytes,
            "the model",
            "model.hidden_sizes, or choose an environment with fewer actions",
        )
    ]
    if device.type == "cpu":
        advice = "learner.batch_columns, trajectory.rows, or choose a smaller network"
        wants.append(_Want(_update_bytes(config, schema, model), "an update", advice))
    return wants


def _plan(config: RunConfig, schema: Schema) -> ActorCritic:
    """The model without its memory: `meta` tensors have a shape and nothing else."""
    with torch.device("meta"):
        return ActorCritic(config.model, schema.inputs, schema.action)


def _update_bytes(config: RunConfig, schema: Schema, model: ActorCritic) -> int:
    """An estimate of what a batch, or one of its minibatches, takes while it is learned from."""
    num_columns = math.ceil(config.learner.batch_columns / config.algorithm.num_minibatches)
    logit_bytes = LOGIT_COPIES * 4 * schema.action.num_choices
    return num_columns * (schema.rows + 1) * (_kept_bytes(schema, model) + logit_bytes)


def _kept_bytes(schema: Schema, model: ActorCritic) -> int:
    """What one row leaves behind for the backward pass, and the gradient of the largest of it."""
    obs = {
        leaf.name: torch.empty(1, *leaf.shape, dtype=getattr(torch, leaf.dtype), device="meta")
        for leaf in schema.inputs.leaves
    }
    state = tuple(torch.empty(1, *array.shape, device="meta") for array in schema.state)
    is_first_BS = torch.empty(1, 1, dtype=torch.bool, device="meta")
    kept: set[torch.UntypedStorage] = set()

    def keep(tensor: Tensor) -> Tensor:
        # Several tensors may share one, as those that are changed in place do.
        kept.add(tensor.untyped_storage())
        return tensor

    # A network may make tensors of its own.
    with torch.device("meta"), saved_tensors_hooks(keep, lambda tensor: tensor):
        model(obs, state, is_first_BS if state else None)
    # Weights are counted with the model.
    kept -= {tensor.untyped_storage() for tensor in model.state_dict().values()}
    sizes = [storage.nbytes() for storage in kept]
    return sum(sizes) + max(sizes, default=0)
