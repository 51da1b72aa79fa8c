import errno
import logging
import threading
import time

import pytest

from impala_async.actor.link import Link
from impala_async.errors import MismatchError
from impala_async.output import SeldomLog
from impala_async.schema import ArraySpec
from impala_async.weights import NO_VERSION, Version, WeightsLayout
from impala_async.wire.messages import SLOWEST_BYTES_PER_S, Get, Grant, Heartbeat
from impala_async.wire.pulls import Pulls
from impala_async.wire.sockets import new_context
from tests.actor.scripted import LAYOUT, WELCOME, WITHIN_S, reply_of, weights_of
from tests.proxy import HOST, LEARNER_HOST, proxy
from tests.wire.ends import until

V5, V6, V7 = Version(1, 5), Version(1, 6), Version(1, 7)


@pytest.fixture
def open_link(scene):
    """Links to the scene's weights port, which the test's own thread serves."""
    context = new_context()
    links = []

    def make(host=LEARNER_HOST, **changes):
        welcome = WELCOME._replace(lease_s=60.0, heartbeat_s=60.0)
        terms = {"layouts": (LAYOUT,), "have": NO_VERSION, "num_kept": 1, "timers": {}}
        log = SeldomLog(logging.getLogger("impala_async.actor.link"))
        url = scene.learner.weights.router.url.replace(LEARNER_HOST, host)
        links.append(Link(context, url, welcome, **(terms | changes), log=log))
        return links[-1]

    yield make
    for link in links:
        link.close()
    context.term()


def grant(version):
    return Grant(WELCOME.session, 1, 0, *version, [])


def test_what_a_broken_connection_swallowed_is_asked_for_again_at_once(scene, open_link):
    with proxy(scene.learner.weights.router.url) as network:
        link = open_link(HOST)
        for _ in range(3):
            heard = [scene.learner.weights.next() for _ in range(2)]
            assert [type(each.message) for each in heard] == [Heartbeat, Get]
            network.reset()
        scene.learner.weights.find(Get).answer(*reply_of(weights_of(2.5, V5)))
        until(lambda: (weights := link.take_newest()) and weights.version == V5)


@pytest.mark.parametrize(("num_kept", "expected"), [(1, [V7, None]), (2, [V5, V7, None])])
def test_the_newest_are_kept(scene, open_link, num_kept, expected):
    link = open_link(num_kept=num_kept)
    assert link.weights_s == LAYOUT.num_bytes / SLOWEST_BYTES_PER_S
    get = scene.learner.weights.find(Get)
    for version in (V5, V7, V6, Version(0, 9)):
        get.answer(*reply_of(weights_of(version.update, version)))
    # The link reads in order: when it has this grant, it has seen all of them.
    get.answer(grant(V7))
    until(link.take_grants)
    taken = [link.take_newest() for _ in expected]
    assert [weights and weights.version for weights in taken] == expected


def test_a_version_that_is_wanted_while_another_is_named_is_heard_too(
    scene, open_link, monkeypatch
):
    """The sampler thread wants one just when the link thread takes in a grant with another."""
    link = open_link(have=V5)
    beat = scene.learner.weights.hear(Heartbeat)
    take = Pulls.take

    def want_and_take(*args):
        monkeypatch.undo()
        link.want(V7)
        return take(*args)

    monkeypatch.setattr(Pulls, "take", want_and_take)
    beat.answer(grant(V6))
    scene.learner.weights.hear(Get).answer(*reply_of(weights_of(6, V6)))
    assert scene.learner.weights.hear(Get).message == Get(WELCOME.session, *V6)


def test_another_model_ends_the_actor(scene, open_link):
    link = open_link()
    other = WeightsLayout((ArraySpec("w", (2, 2), "float32"),))
    scene.learner.weights.find(Get).answer(*reply_of(weights_of(1, V5), other))
    started = time.monotonic()
    link.wait_for_weights(WITHIN_S)
    # The waiting thread is woken.
    assert time.monotonic() - started < WITHIN_S / 2
    with pytest.raises(MismatchError, match="model differs"):
        link.take_grants()
    link.close()


def test_without_a_socket_the_thread_ends_and_that_is_told(open_link, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("impala_async.actor.link.Dealer", refuse)
    link = open_link()
    link.wait_for_weights(WITHIN_S)
    with pytest.raises(OSError, match="Too many open files"):
        link.take_grants()


def test_close_ends_the_thread_and_twice_does_no_harm(open_link):
    link = open_link()
    assert sum(thread.name == "link" for thread in threading.enumerate()) == 1
    started = time.monotonic()
    link.close()
    link.close()
    assert time.monotonic() - started < 2.0
    assert not any(thread.name == "link" for thread in threading.enumerate())


def test_a_heartbeat_that_is_wanted_does_not_wait_for_its_time(scene, open_link):
    """Its time is in a minute."""
    timers = {"send_wait_ms": 9000.0}
    link = open_link(have=V5, timers=timers)
    assert scene.learner.weights.find(Heartbeat).message.timers["send_wait_ms"] == 9000.0
    timers["send_wait_ms"] = 1.0
    link.beat()
    assert scene.learner.weights.find(Heartbeat).message.timers["send_wait_ms"] == 1.0


def test_the_newest_seq_that_is_to_be_cut_is_noted_at_once(scene, open_link):
    link = open_link()
    get = scene.learner.weights.find(Get)
    assert link.cut == -1
    for cut in (4, 7, 5, -1):
        get.answer(grant(V5)._replace(cut=cut))
    get.answer(grant(V5)._replace(session=b"?" * 16, cut=9))
    get.answer(grant(V6))
    # The sampler thread does nothing for it.
    until(lambda: link.pulls.named == V6)
    assert link.cut == 7
