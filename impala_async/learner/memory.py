"""Refuses, before anything is built, a learner that this machine's memory cannot hold.

The spaces may come from an actor: what they ask for must not end the learner that they ask. What
is free is what the system says; the limit of a container, and a GPU's memory, are not looked at.

    B columns of a batch, S observation rows

Runs on: event loop, once
"""

import psutil
import torch

from impala_async.config import RunConfig
from impala_async.models.build import build_model
from impala_async.spec import Schema

# Weights, gradients, two moments of the optimizer, and snapshots that are being sent.
MODEL_COPIES = 7
# Logits and their gradients, as they are and normalised.
LOGIT_COPIES = 4
GIB = 1 << 30


def check_memory(config: RunConfig, schema: Schema, num_slots: int) -> None:
    """Raise ValueError if slots and model want more memory than is free."""
    batch_columns = config.learner.batch_columns
    slot_bytes = num_slots * batch_columns * schema.layout.column_bytes
    model_bytes = _model_bytes(config, schema)
    free_bytes = psutil.virtual_memory().available
    if slot_bytes + model_bytes > free_bytes:
        keys = "learner.batch_columns, trajectory.rows or learner.queue_size"
        if model_bytes > slot_bytes:
            keys = "model.hidden_sizes, or choose an environment with fewer actions"
        raise ValueError(
            f"it wants {slot_bytes / GIB:.1f} GiB for {num_slots} batches and "
            f"{model_bytes / GIB:.1f} GiB for the model, and {free_bytes / GIB:.1f} GiB are free: "
            f"lower {keys}"
        )


def _model_bytes(config: RunConfig, schema: Schema) -> int:
    """An estimate without building anything: `meta` tensors have a shape and no memory."""
    with torch.device("meta"):
        model = build_model(config.model, schema.inputs, schema.action)
    weights: int = sum(tensor.nbytes for tensor in model.state_dict().values())
    num_rows = config.learner.batch_columns * (schema.rows + 1)
    weights *= max(1, len(schema.policies))
    logits = 4 * num_rows * schema.action.num_choices
    return MODEL_COPIES * weights + LOGIT_COPIES * logits
