"""The device that a learner computes on, and whether this machine's memory holds what it needs.

Runs on: event loop, once; each thread that computes says where
"""

import psutil
import torch

from impala_async.config.model import TORSOS
from impala_async.config.run import RunConfig
from impala_async.errors import ConfigError, SpacesError
from impala_async.models.actor_critic import ActorCritic
from impala_async.schema import Schema

# Weights, gradients, two moments of the optimizer, and snapshots that are being sent.
MODEL_COPIES = 7
GIB = 1 << 30


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


def make_current(device: torch.device) -> None:
    """This thread works there from now on: every thread begins with the first GPU."""
    # Without a number a device is the current one already, and torch refuses it here.
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


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


def _weights_bytes(config: RunConfig, schema: Schema) -> int:
    """The size of one network, of which no memory is taken: `meta` tensors only have a shape."""
    try:
        with torch.device("meta"):
            model = ActorCritic(config.model, schema.inputs, schema.action)
    except (RuntimeError, TypeError, ConfigError):
        # A network of one's own may ask for values, and only tensors with memory have some.
        if config.model.name in TORSOS:
            raise
        return 0
    return sum(tensor.nbytes for tensor in model.state_dict().values())
