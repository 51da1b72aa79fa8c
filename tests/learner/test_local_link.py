"""The learner's short cut is the one of the wire room, of which the tests are there."""

from impala_async.learner import local_link
from impala_async.wire.local_link import LocalLink


def test_it_is_the_same() -> None:
    assert local_link.LocalLink is LocalLink
