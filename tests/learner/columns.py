"""Schemas, and columns of them that can be told apart."""

import numpy as np

from impala_async.schema import ActionPart, ActionSpec, ArraySpec, ObsSpec, Schema
from impala_async.wire.messages import Data
from impala_async.wire.peer import Peer, Watermark
from tests.columns import Planes, flat_schema

NUM_CHOICES = 3


def small_schema(rows=3, num_obs=2):
    """A column of it goes inline."""
    return flat_schema(num_obs, NUM_CHOICES, rows)


def big_schema(rows=3):
    """A column of it fills a frame; it has several leaves of several dtypes, and two actions."""
    leaves = (
        ArraySpec("depth", (5,), "float64"),
        ArraySpec("pixels", (32, 32, 3), "uint8"),
        ArraySpec("speed", (), "float32"),
    )
    parts = (ActionPart("arm", "discrete", (NUM_CHOICES,)), ActionPart("leg", "discrete", (4,)))
    return Schema(ObsSpec(leaves), ActionSpec(parts), rows)


def planes_of(schema, num_columns, seed=0):
    """Valid random columns; every row counts and the rewards of a seed are its own."""
    rng = np.random.default_rng(seed)
    planes = Planes(schema, num_columns)
    columns = planes.columns
    for leaf in columns.obs.values():
        leaf[...] = rng.integers(0, 200, leaf.shape)
    for name, window in columns.windows.items():
        window[...] = rng.integers(0, columns.obs[name].shape[1], window.shape)
    for part in schema.action.parts:
        array = columns.actions[part.name]
        array[...] = rng.integers(0, part.choices[0], array.shape)
    columns.rewards_CT[...] = rng.normal(size=columns.rewards_CT.shape)
    columns.log_probs_CT[...] = -rng.uniform(0.1, 2.0, columns.log_probs_CT.shape)
    columns.mask_CT[...] = True
    return planes


def room(filler, columns, number=0, update=0):
    """Room for a message, if there is any, before those that were given room are committed."""
    peer = Peer(b"s" * 16, b"a" * 16, number, Watermark(), 0.0, b"route", columns=columns)
    return filler.assign(peer, Data(peer.session, 0, 1, update, 3, columns, 0, 0, None))


def put(filler, planes, number=0, update=0):
    """A message of these columns, taken in."""
    arrival = room(filler, len(planes.obs), number, update)
    arrival.obs[:], arrival.small[:] = planes.obs, planes.small
    filler.commit([arrival])
    return arrival


def same(taken, column, sent, sent_column=0):
    """Whether a column of a slot is a column that was sent, leaf by leaf."""
    pairs = [
        *((taken.obs[name], sent.obs[name]) for name in sent.obs),
        *((taken.actions[name], sent.actions[name]) for name in sent.actions),
        (taken.rewards_CT, sent.rewards_CT),
        (taken.log_probs_CT, sent.log_probs_CT),
        (taken.terminated_CT, sent.terminated_CT),
        (taken.truncated_CT, sent.truncated_CT),
        (taken.mask_CT, sent.mask_CT),
    ]
    return all(np.array_equal(a[column], b[sent_column], equal_nan=False) for a, b in pairs)
