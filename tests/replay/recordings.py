"""Recordings made by hand, of columns that can be told apart."""

from pathlib import Path
from typing import Any

import numpy as np

from impala_async.schema import Schema
from impala_async.wire.codec import EPISODE
from impala_async.wire.messages import Data
from impala_async.wire.recording import OPENING, End, Record, Recorded, Start, encode_record
from tests.learner.columns import Planes, planes_of, small_schema
from tests.learner.server_harness import config_of

RUN = b"run".ljust(16, b"-")
SCHEMA = small_schema()


def start(epoch: int = 1, update: int = 0, schema: Schema = SCHEMA, **sections: Any) -> Start:
    """Of a learner as `ServerHarness` has it."""
    settings = config_of(schema, **sections).model_dump(mode="json", by_alias=True)
    return Start(RUN, epoch, update, "0.1", 0.0, schema, settings)


def planes(number: int, columns: int = 1, schema: Schema = SCHEMA) -> Planes:
    """Of the message of that number."""
    return planes_of(schema, columns, seed=number)


def message(
    number: int,
    *,
    update: int = 0,
    epoch: int = 1,
    columns: int = 1,
    arrived_s: float = 0.0,
    schema: Schema = SCHEMA,
    episodes: list[tuple[float, int]] | None = None,
) -> Recorded:
    made, ended = planes(number, columns, schema), episodes or []
    data = Data(b"s" * 16, number, epoch, update, schema.rows, columns, 0, len(ended), None)
    tail = np.array(ended, EPISODE).tobytes()
    return Recorded(0, arrived_s, data, made.obs.tobytes() + made.small.tobytes() + tail)


def end(update: int, **digests: str) -> End:
    return End("env_steps", update, digests)


def write(path: Path, *records: Record) -> Path:
    path.write_bytes(OPENING + b"".join(b"".join(encode_record(record)) for record in records))
    return path
