import numpy as np

from impala_async.actor.offer import Offer
from impala_async.actor.squeezer import Squeezer
from impala_async.actor.unroll import Episode, Finished
from impala_async.spec import ArraySpec, Schema
from impala_async.weights import Version, WeightsLayout
from impala_async.wire.codec import decode_episodes
from impala_async.wire.messages import Data, Spec, unpack
from impala_async.wire.peer import WINDOW
from tests.actor.fakes import schema_of
from tests.actor.scripted import LAYOUT

SESSION = b"s" * 16


def offer_of(rows: int, columns: int = 2, streams: int = 1) -> Offer:
    return Offer(schema_of(rows), LAYOUT, columns, streams)


def test_each_stream_has_a_window_and_one_buffer_more() -> None:
    buffers = offer_of(3, columns=4, streams=5).make_buffers()
    assert len(buffers) == 5 * (WINDOW + 1)
    assert {buffer.num_columns for buffer in buffers} == {4}
    assert len({buffer.obs.ctypes.data for buffer in buffers}) == len(buffers)


def test_spec_says_what_both_sides_compare() -> None:
    offer = offer_of(3, columns=4, streams=5)
    header, schema = offer.spec_frames(SESSION)
    assert unpack(header) == Spec(SESSION, offer.schema.digest, LAYOUT.digest, 4, 5, 1)
    assert Schema.from_json(bytes(schema)) == offer.schema


def test_data_carries_the_buffer_its_version_and_its_episodes() -> None:
    for rows, num_frames in ((3, 1), (2000, 3)):
        offer = offer_of(rows)
        (buffer, *_) = offer.make_buffers()
        buffer.obs[:] = np.arange(buffer.obs.size).reshape(buffer.obs.shape) % 251
        buffer.small[:] = 7
        finished = Finished(buffer, Version(2, 9), [Episode(1.5, 3), Episode(-2.0, 8)])
        frames = offer.data_frames(SESSION, 41, finished, Squeezer("off", "tcp://far:1"))
        assert len(frames) == num_frames
        data = unpack(frames[0])
        assert isinstance(data, Data)
        assert data._replace(body=None) == Data(SESSION, 41, 2, 9, rows, 2, 0, 2, None)
        body = data.body if data.body is not None else b"".join(frames[1:])
        planes = buffer.obs.tobytes() + buffer.small.tobytes()
        assert body[: len(planes)] == planes
        episodes = decode_episodes(memoryview(body)[len(planes) :])
        assert episodes.tolist() == [(1.5, 3), (-2.0, 8)]


def test_weights_have_the_time_that_a_thin_line_needs() -> None:
    layout = WeightsLayout((ArraySpec("w", (1_000_000,), "float32"),))
    assert Offer(schema_of(1), layout, 1, 1).weights_s == 20.0
