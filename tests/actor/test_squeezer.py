"""Observations are compressed for learners on other hosts, while that makes them smaller."""

from typing import Any

import numpy as np
import pytest

from impala_async.actor.squeezer import RETRY_AFTER, Squeezer
from impala_async.wire.codec import decompress_into

FAR = "tcp://learner.example:5555"
EVEN = np.zeros((4, 3000), np.uint8)
NOISE = np.random.default_rng(0).integers(0, 256, (4, 3000), np.uint8)


@pytest.mark.parametrize(
    ("choice", "url", "is_squeezed"),
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
def test_auto_compresses_what_leaves_the_host(choice: Any, url: str, is_squeezed: bool) -> None:
    frame = Squeezer(choice, url).squeeze(EVEN)
    assert (frame is not None) == is_squeezed
    if frame is not None:
        target = bytearray(EVEN.nbytes)
        decompress_into(memoryview(target), memoryview(frame))
        assert target == EVEN.tobytes()


def test_what_does_not_become_smaller_is_tried_again_only_after_a_while() -> None:
    squeezer = Squeezer("on", FAR)
    assert squeezer.squeeze(NOISE) is None
    for _ in range(RETRY_AFTER):
        assert squeezer.squeeze(EVEN) is None
    assert squeezer.squeeze(EVEN) is not None
    assert squeezer.squeeze(EVEN) is not None
