"""Recordings made by hand, of columns that can be told apart."""

import numpy as np

from impala_async.wire.messages import EPISODE, Data
from impala_async.wire.recording import OPENING, End, Recorded, Start, encode_record
from tests.learner.columns import planes_of, small_schema
from tests.learner.server_harness import config_of

RUN = b"run".ljust(16, b"-")
SCHEMA = small_schema()


def start(epoch=1, update=0, schema=SCHEMA, **sections):
    """The start of a learner as `ServerHarness` has it."""
    settings = config_of(schema, **sections).model_dump(mode="json", by_alias=True)
    return Start(RUN, epoch, update, "0.1", 0.0, schema, settings)


def planes(number, columns=1, schema=SCHEMA):
    """The planes of the message of that number."""
    return planes_of(schema, columns, seed=number)


def message(number, update=0, epoch=1, columns=1, arrived_s=0.0, schema=SCHEMA, episodes=None):
    made, ended = planes(number, columns, schema), episodes or []
    data = Data(b"s" * 16, number, epoch, update, schema.rows, columns, 0, len(ended), None)
    tail = np.array(ended, EPISODE).tobytes()
    return Recorded(0, arrived_s, data, made.obs.tobytes() + made.small.tobytes() + tail)


def end(update, **digests):
    return End("env_steps", update, digests)


def write(path, *records):
    path.write_bytes(OPENING + b"".join(b"".join(encode_record(record)) for record in records))
    return path
