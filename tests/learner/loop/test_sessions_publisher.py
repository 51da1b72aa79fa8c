"""Weights down: one frame per version, made once, the same for everybody."""

import numpy as np
import pytest

from impala_async.learner.loop.sessions import Publisher
from impala_async.metrics.report import merge
from impala_async.weights import NO_VERSION, Version, Weights
from impala_async.wire.codec import Frame, decode_weights
from impala_async.wire.messages import Get, NotModified, WeightsReply, unpack

SESSION = b"s" * 16


def weights_of(update: int, epoch: int = 1) -> Weights:
    return Weights(Version(epoch, update), np.full(1000, update, np.uint8))


def publisher_of(*versions: Weights, num_kept: int = 1) -> Publisher:
    publisher = Publisher(num_kept)
    publisher.layout_digest = b"d" * 16
    for weights in versions:
        publisher.publish(weights)
    return publisher


def test_before_the_first_version_nothing_is_new() -> None:
    publisher = Publisher()
    assert publisher.version == NO_VERSION
    (frame,) = publisher.reply(Get(SESSION, 0, 0))
    assert unpack(bytes(frame)) == NotModified(0, 0)


def test_the_newest_version_is_served_whole() -> None:
    publisher = publisher_of(weights_of(3), weights_of(4))
    frames = [bytes(frame) for frame in publisher.reply(Get(SESSION, 1, 3))]
    reply = unpack(frames[0])
    assert isinstance(reply, WeightsReply)
    assert reply.layout_digest == b"d" * 16
    got = decode_weights(reply, frames)
    assert got.version == Version(1, 4)
    assert got.buffer.tolist() == [4] * 1000


def test_weights_of_a_layout_of_their_own_say_so() -> None:
    weights = Weights(Version(1, 4), np.zeros(8, np.uint8), b"e" * 16)
    frames = [bytes(frame) for frame in publisher_of(weights).reply(Get(SESSION, 1, 3))]
    reply = unpack(frames[0])
    assert isinstance(reply, WeightsReply)
    assert decode_weights(reply, frames).layout_digest == reply.layout_digest == b"e" * 16


def test_who_has_the_newest_gets_a_few_bytes() -> None:
    publisher = publisher_of(weights_of(4))
    for have in ((1, 4), (1, 5), (2, 0)):
        (frame,) = publisher.reply(Get(SESSION, *have))
        assert unpack(bytes(frame)) == NotModified(1, 4)


def test_a_version_of_an_earlier_epoch_is_older_however_far_it_got() -> None:
    publisher = publisher_of(weights_of(7, epoch=2))
    assert len(publisher.reply(Get(SESSION, 1, 900))) == 2


def test_all_pulls_of_a_version_share_its_memory() -> None:
    weights = weights_of(4)
    publisher = publisher_of(weights)
    first, second = (publisher.reply(Get(SESSION, 0, 0)) for _ in range(2))
    assert first[0] is second[0]
    assert all(np.shares_memory(np.asarray(reply[1]), weights.buffer) for reply in (first, second))
    publisher.publish(weights_of(5))
    third = publisher.reply(Get(SESSION, 0, 0))
    assert third[0] != first[0]
    assert bytes(third[1]) != bytes(first[1])


def test_it_counts_replies_and_bytes() -> None:
    publisher = publisher_of(weights_of(4))
    for have in (0, 3, 4, 4, 4):
        publisher.reply(Get(SESSION, 1, have))
    assert merge(publisher.report()) == {
        "weights/version_epoch": 1,
        "weights/version_update": 4,
        "weights/served": 2,
        "weights/not_modified": 3,
        "weights/bytes": 2000,
    }


def version_of(frames: list[Frame]) -> Version | None:
    reply = unpack(bytes(frames[0]))
    return Version(reply.epoch, reply.update) if isinstance(reply, WeightsReply) else None


@pytest.mark.parametrize(
    ("have", "served"),
    [
        (Version(1, 3), Version(1, 4)),
        (Version(1, 4), Version(1, 5)),
        (Version(1, 5), None),
        # What is no longer kept cannot be had: the next that is.
        (Version(1, 2), Version(1, 4)),
        # Who has none begins where everybody is.
        (NO_VERSION, Version(1, 5)),
    ],
)
def test_where_several_are_kept_nobody_skips_one(have: Version, served: Version | None) -> None:
    publisher = publisher_of(*(weights_of(update) for update in range(6)), num_kept=2)
    assert version_of(publisher.reply(Get(SESSION, *have))) == served


def test_each_version_that_is_kept_has_its_own_frames() -> None:
    publisher = publisher_of(weights_of(4), weights_of(5), num_kept=2)
    older, newer = (publisher.reply(Get(SESSION, 1, update)) for update in (3, 4))
    assert (bytes(older[1])[0], bytes(newer[1])[0]) == (4, 5)
    assert publisher.reply(Get(SESSION, 1, 3))[0] is older[0]


def test_a_pull_that_has_to_come_again_is_told_of_the_newest_and_counted() -> None:
    publisher = publisher_of(weights_of(4))
    (frame,) = publisher.nothing_new()
    assert unpack(bytes(frame)) == NotModified(1, 4)
    assert publisher.report()["weights/not_modified"] == 0
