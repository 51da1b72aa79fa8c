"""The simplest schema, and the fault that a learner would find in columns, for tests that have no
planes of them."""

import numpy as np

from impala_async.schema import ActionPart, ActionSpec, ArraySpec, ObsSpec, Schema
from impala_async.trajectory import ColumnChecks, columns_over


def flat_schema(num_features, num_actions, rows, **more):
    """A vector of floats, and one choice."""
    obs = ObsSpec((ArraySpec("", (num_features,), "float32"),))
    action = ActionSpec((ActionPart("", "discrete", (num_actions,)),))
    return Schema(obs, action, rows, **more)


def find_fault(schema, columns):
    """That of a copy of these columns, in planes of their own."""
    num_columns = len(columns.mask_CT)
    obs = np.zeros((num_columns, schema.layout.obs_bytes), np.uint8)
    small = np.zeros((num_columns, schema.layout.small_bytes), np.uint8)
    for name, into in vars(columns_over(schema, obs, small)).items():
        source = getattr(columns, name)
        if isinstance(into, dict):
            for key, array in into.items():
                array[...] = source[key]
        else:
            into[...] = source
    return ColumnChecks(schema).find_fault(obs, small)
