import numpy as np
import pytest

from impala_async.actor.sending import (
    RETRY_AFTER,
    ActorSpec,
    Compressor,
    Finished,
)
from impala_async.schema import ArraySpec
from impala_async.weights import Version, WeightsLayout
from impala_async.wire.codec import decode_episodes, decompress_into
from impala_async.wire.messages import Data, unpack
from impala_async.wire.peer import WINDOW
from tests.actor.fakes import schema_of
from tests.actor.scripted import LAYOUT

FAR = "tcp://learner.example:5555"
EVEN = np.zeros((4, 3000), np.uint8)
NOISE = np.random.default_rng(0).integers(0, 256, (4, 3000), np.uint8)


@pytest.mark.parametrize(
    ("choice", "url", "is_compressed"),
    [
        ("auto", FAR, True),
        ("auto", "tcp://10.0.0.7:5555", True),
        ("auto", "tcp://127.0.0.1:5555", False),
        ("auto", "tcp://localhost:5555", False),
        ("auto", "ipc://@impala", False),
        ("on", "ipc://@impala", True),
        ("off", FAR, False),
    ],
)
def test_auto_compresses_what_leaves_the_host(choice, url, is_compressed):
    frame = Compressor(choice, url).compress(EVEN)
    assert (frame is not None) == is_compressed
    if frame is not None:
        target = bytearray(EVEN.nbytes)
        decompress_into(memoryview(target), memoryview(frame))
        assert target == EVEN.tobytes()


def test_what_does_not_become_smaller_is_tried_again_only_after_a_while():
    compressor = Compressor("on", FAR)
    assert compressor.compress(NOISE) is None
    for _ in range(RETRY_AFTER):
        assert compressor.compress(EVEN) is None
    assert compressor.compress(EVEN) is not None
    assert compressor.compress(EVEN) is not None


SESSION = b"s" * 16


def actor_spec_of(rows, columns=2, streams=1):
    return ActorSpec(schema_of(rows), LAYOUT, columns, streams)


def test_each_stream_has_a_window_and_one_buffer_more():
    buffers = actor_spec_of(3, columns=4, streams=5).make_buffers()
    assert len(buffers) == 5 * (WINDOW + 1)
    assert {buffer.num_columns for buffer in buffers} == {4}
    assert len({buffer.obs.ctypes.data for buffer in buffers}) == len(buffers)


def test_data_carries_the_buffer_its_version_and_its_episodes():
    for rows, num_frames in ((3, 1), (2000, 3)):
        spec = actor_spec_of(rows)
        (buffer, *_) = spec.make_buffers()
        buffer.obs[:] = np.arange(buffer.obs.size).reshape(buffer.obs.shape) % 251
        buffer.small[:] = 7
        finished = Finished(buffer, Version(2, 9), [(1.5, 3), (-2.0, 8)])
        frames = spec.data_frames(SESSION, 41, finished, Compressor("off", "tcp://far:1"))
        assert len(frames) == num_frames
        data = unpack(frames[0])
        assert isinstance(data, Data)
        assert data._replace(body=None) == Data(SESSION, 41, 2, 9, rows, 2, 0, 2, None)
        body = data.body if data.body is not None else b"".join(frames[1:])
        planes = buffer.obs.tobytes() + buffer.small.tobytes()
        assert body[: len(planes)] == planes
        episodes = decode_episodes(memoryview(body)[len(planes) :])
        assert episodes.tolist() == [(1.5, 3), (-2.0, 8)]


def test_weights_have_the_time_that_a_thin_line_needs():
    layout = WeightsLayout((ArraySpec("w", (1_000_000,), "float32"),))
    assert ActorSpec(schema_of(1), layout, 1, 1).weights_s == 20.0
