"""Versions that actors pull: which one, and in whose memory."""

import numpy as np

from impala_async.learner.loop.publisher import Publisher
from impala_async.metrics.report import merge
from impala_async.weights import NO_VERSION, Version, Weights
from impala_async.wire import messages as wire

NOBODY = b"?" * 16


def weights_of(update, epoch=1, layout_digest=b""):
    return Weights(Version(epoch, update), np.full(1000, update, np.uint8), layout_digest)


def publisher_of(*versions, num_kept=1):
    publisher = Publisher(num_kept)
    publisher.layout_digest = b"d" * 16
    for weights in versions:
        publisher.publish(weights)
    return publisher


def served(publisher, *have, **asked):
    frames = publisher.reply(publisher.choose(wire.Get(NOBODY, *have), **asked))
    reply = wire.unpack(bytes(frames[0]))
    if isinstance(reply, wire.NotModified):
        return None, frames
    version, buffer = Version(reply.epoch, reply.update), np.frombuffer(frames[1], np.uint8)
    assert Weights(version, buffer).digest() == reply.content_digest
    assert buffer.tolist() == [version.update] * 1000
    return version, frames


def test_a_pull_gets_the_oldest_of_those_that_are_kept_and_newer():
    empty = Publisher()
    assert (empty.version, served(empty, 0, 0)[0]) == (NO_VERSION, None)
    newest = publisher_of(weights_of(3), weights_of(4))
    for have, version in (((1, 3), (1, 4)), ((1, 4), None), ((1, 5), None), ((2, 0), None)):
        assert served(newest, *have)[0] == version
    # An earlier epoch is older however far it got.
    assert served(publisher_of(weights_of(7, epoch=2)), 1, 900)[0] == (2, 7)
    several = publisher_of(*(weights_of(update) for update in range(6)), num_kept=2)
    # The last is of one that is kept no longer; who has none begins where everybody is.
    for have, update in (((1, 3), 4), ((1, 4), 5), ((1, 2), 4), ((0, 0), 5)):
        assert served(several, *have)[0] == (1, update)
    # But not before its first version is out.
    assert served(several, 0, 0, may_begin=False)[0] is None
    assert served(several, 1, 4, may_begin=False)[0] == (1, 5)


def test_all_pulls_of_a_version_share_its_memory():
    weights = weights_of(4)
    publisher = publisher_of(weights, weights_of(5, layout_digest=b"e" * 16), num_kept=2)
    first, second, other = (served(publisher, *have)[1] for have in ((1, 3), (1, 3), (1, 4)))
    assert first[0] is second[0]
    assert all(np.shares_memory(np.asarray(reply[1]), weights.buffer) for reply in (first, second))
    digests = [wire.unpack(bytes(frames[0])).layout_digest for frames in (first, other)]
    assert digests == [b"d" * 16, b"e" * 16]
    served(publisher, 1, 5)
    assert merge(publisher.report()) == {
        "weights/version_epoch": 1,
        "weights/version_update": 5,
        "weights/served": 3,
        "weights/not_modified": 1,
        "weights/bytes": 3000,
    }
