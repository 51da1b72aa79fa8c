"""The simplest schema, columns of any, and the fault that a learner would find in some."""

import numpy as np

from impala_async.schema import ActionPart, ActionSpec, ArraySpec, ObsSpec, Schema
from impala_async.trajectory import ColumnChecks, columns_over


def flat_schema(num_features, num_actions, rows, **more):
    """A vector of floats, and one choice."""
    obs = ObsSpec((ArraySpec("", (num_features,), "float32"),))
    action = ActionSpec((ActionPart("", "discrete", (num_actions,)),))
    return Schema(obs, action, rows, **more)


class Planes:
    """Some columns in memory of their own, as an actor holds them."""

    def __init__(self, schema, num_columns):
        self.obs = np.zeros((num_columns, schema.layout.obs_bytes), np.uint8)
        self.small = np.zeros((num_columns, schema.layout.small_bytes), np.uint8)
        self.columns = columns_over(schema, self.obs, self.small)


def find_fault(schema, columns):
    """That of a copy of these columns, in planes of their own."""
    planes = Planes(schema, len(columns.mask_CT))
    for name, into in vars(planes.columns).items():
        source = getattr(columns, name)
        if isinstance(into, dict):
            for key, array in into.items():
                array[...] = source[key]
        else:
            into[...] = source
    return ColumnChecks(schema).find_fault(planes.obs, planes.small)
