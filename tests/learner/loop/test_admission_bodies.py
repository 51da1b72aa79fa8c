"""Bodies of messages into their place, whatever form and size they come in."""

from typing import Any

import numpy as np
import pytest

from impala_async.errors import ProtocolError
from impala_async.learner.loop.admission import Bodies
from impala_async.learner.slots import Region
from impala_async.schema import Schema
from impala_async.wire.codec import Frame, compress, encode_data
from impala_async.wire.messages import Data, unpack
from tests.learner.columns import Planes, big_schema, planes_of, small_schema
from tests.learner.pure_learner import Rest

COLUMNS = 2
EPISODES = [(1.5, 2), (-3.0, 1)]


def sent(
    schema: Schema, episodes: list[tuple[float, int]], squeeze: Any = None
) -> tuple[Planes, Data, list[Frame]]:
    planes = planes_of(schema, COLUMNS)
    if squeeze is not None:
        # Noise would only grow.
        planes.columns.obs["pixels"][...] = 7
    data = Data(bytes(16), 0, 1, 0, schema.rows, COLUMNS, 0, 0, None)
    header, *frames = encode_data(data, planes.obs, planes.small, episodes, squeeze)
    message = unpack(header)
    assert isinstance(message, Data)
    return planes, message, frames


def receive(schema: Schema, data: Data, *frames: Frame) -> tuple[Region, Any]:
    empty = Planes(schema, COLUMNS)
    region = Region(empty.obs, empty.small)
    router: Any = Rest(*frames)
    return region, Bodies(schema, most_columns=4).receive(router, data, 0, region).episodes


FORMS = pytest.mark.parametrize(
    ("schema", "squeeze"),
    [(small_schema(), None), (big_schema(), None), (big_schema(), compress)],
    ids=["inline", "frames", "compressed"],
)


@FORMS
@pytest.mark.parametrize("episodes", [[], EPISODES], ids=["no episodes", "episodes"])
def test_planes_and_episodes_are_those_that_were_sent(
    schema: Schema, squeeze: Any, episodes: list[tuple[float, int]]
) -> None:
    planes, data, frames = sent(schema, episodes, squeeze)
    region, arrived = receive(schema, data, *frames)
    assert np.array_equal(region.obs, planes.obs)
    assert np.array_equal(region.small, planes.small)
    assert ([] if arrived is None else arrived.tolist()) == episodes


def test_episodes_stay_when_the_next_message_comes() -> None:
    schema = big_schema()
    bodies, empty = Bodies(schema, most_columns=4), Planes(schema, COLUMNS)
    kept = []
    for total in (1.0, 2.0):
        _, data, frames = sent(schema, [(total, 3)])
        router: Any = Rest(*frames)
        kept.append(bodies.receive(router, data, 0, Region(empty.obs, empty.small)).episodes)
    assert [each.tolist() for each in kept if each is not None] == [[(1.0, 3)], [(2.0, 3)]]


@FORMS
def test_what_has_another_size_is_refused(schema: Schema, squeeze: Any) -> None:
    _, data, frames = sent(schema, EPISODES, squeeze)
    wrong: list[tuple[Data, list[Frame]]] = [
        (data._replace(rows=schema.rows + 1), frames),
        (data._replace(num_episodes=COLUMNS * schema.rows + 1), frames),
        (data._replace(num_episodes=1), frames),
    ]
    if data.body is not None:
        wrong += [(data._replace(body=data.body[:-1]), []), (data._replace(codec=1), [])]
    else:
        obs, small = frames
        wrong += [
            (data, [obs, small[:-1]]),
            (data, [obs, bytes(small) + b"0"]),
            (data, [bytes(obs)[:-1], small]),
            (data, [bytes(obs) + bytes(planes_of(schema, COLUMNS).obs), small]),
        ]
    for message, parts in wrong:
        with pytest.raises(ProtocolError) as error:
            receive(schema, message, *parts)
        assert error.value.reason == "wrong_size"


def test_a_body_has_two_frames() -> None:
    schema = big_schema()
    _, data, frames = sent(schema, [])
    for parts in ([], frames[:1], [*frames, b"more"]):
        with pytest.raises(ProtocolError, match="2 frames"):
            receive(schema, data, *parts)
    schema = small_schema()
    _, data, _ = sent(schema, [])
    with pytest.raises(ProtocolError, match="or is in the header"):
        receive(schema, data, b"more")
