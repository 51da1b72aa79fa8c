import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from impala_async.actor import link as link_module
from impala_async.actor.link import Link
from impala_async.errors import MismatchError
from impala_async.schema import ArraySpec
from impala_async.weights import NO_VERSION, Version, Weights, WeightsLayout
from impala_async.wire.messages import Get, Grant, Heartbeat, NotModified
from impala_async.wire.session import reject
from impala_async.wire.sockets import new_context
from tests.actor.scripted import (
    LAYOUT,
    WITHIN_S,
    Scene,
    nothing_published,
    reply_of,
    weights_of,
)
from tests.proxy import HOST, LEARNER_HOST, proxy
from tests.wire.ends import until

SESSION = b"s" * 16
V5, V6, V7 = Version(1, 5), Version(1, 6), Version(1, 7)
Open = Callable[..., Link]


@pytest.fixture
def open_link(scene: Scene) -> Iterator[Open]:
    """Links to the scene's weights port, which the test's own thread serves."""
    context = new_context()
    links: list[Link] = []

    def make(host: str = LEARNER_HOST, **changes: Any) -> Link:
        terms = {"session": SESSION, "layouts": (LAYOUT,), "have": NO_VERSION}
        times = {"heartbeat_s": 60.0, "reply_timeout_s": 60.0}
        url = scene.learner.weights.router.url.replace(LEARNER_HOST, host)
        links.append(Link(context, url, **(terms | times | changes)))
        return links[-1]

    yield make
    for link in links:
        link.close()
    context.term()


def await_weights(link: Link) -> Weights:
    give_up_at = time.monotonic() + WITHIN_S
    while (weights := link.take_newest()) is None:
        assert time.monotonic() < give_up_at
        link.wait_for_weights(0.1)
    return weights


def grant(version: Version) -> Grant:
    return Grant(SESSION, 1, 0, *version, [])


def test_the_first_pull_is_repeated_until_something_is_published(
    scene: Scene, open_link: Open
) -> None:
    link = open_link()
    for _ in range(3):
        get = scene.learner.weights.find(Get)
        assert get.message == Get(SESSION, *NO_VERSION)
        get.answer(nothing_published())
    assert link.take_newest() is None
    scene.learner.weights.find(Get).answer(*reply_of(weights_of(2.5, V5)))
    weights = await_weights(link)
    assert weights.version == V5
    assert weights.buffer.view(np.float32).tolist() == [2.5] * 4


def test_a_lost_first_pull_is_repeated(scene: Scene, open_link: Open) -> None:
    open_link(reply_timeout_s=0.1)
    for _ in range(3):
        scene.learner.weights.find(Get)


def test_what_a_broken_connection_swallowed_is_asked_for_again_at_once(
    scene: Scene, open_link: Open
) -> None:
    with proxy(scene.learner.weights.router.url) as network:
        link = open_link(HOST)
        for _ in range(3):
            heard = [scene.learner.weights.next() for _ in range(2)]
            assert [type(each.message) for each in heard] == [Heartbeat, Get]
            network.reset()
        scene.learner.weights.find(Get).answer(*reply_of(weights_of(2.5, V5)))
        assert await_weights(link).version == V5


def test_first_weights_that_take_their_time_are_pulled_once(scene: Scene, open_link: Open) -> None:
    link = open_link(heartbeat_s=0.2)
    get = scene.learner.weights.find(Get)
    # Many times as long as between two questions whether there are any.
    others = [scene.learner.weights.next().message for _ in range(2)]
    assert all(isinstance(other, Heartbeat) for other in others)
    get.answer(*reply_of(weights_of(2.5, V5)))
    assert await_weights(link).version == V5


def test_a_version_is_pulled_when_it_is_wanted_and_once(scene: Scene, open_link: Open) -> None:
    link = open_link(have=V5)
    scene.learner.weights.hear(Heartbeat)
    link.want(V5)
    link.want(V6)
    link.want(V6)
    get = scene.learner.weights.hear(Get)
    assert get.message == Get(SESSION, *V5)
    until(lambda: link.is_asking)
    link.want(V7)
    get.answer(*reply_of(weights_of(6, V6)))
    second = scene.learner.weights.hear(Get)
    assert second.message == Get(SESSION, *V6)
    second.answer(*reply_of(weights_of(7, V7)))
    assert await_weights(link).version >= V6
    # Ask once more, so that whatever was said too much would have come before.
    link.want(Version(2, 0))
    assert scene.learner.weights.hear(Get).message == Get(SESSION, *V7)


def test_only_the_newest_is_kept(scene: Scene, open_link: Open) -> None:
    link = open_link()
    get = scene.learner.weights.find(Get)
    for version in (V5, V7, V6, Version(0, 9)):
        get.answer(*reply_of(weights_of(version.update, version)))
    # The link reads in order: when it has this grant, it has seen all of them.
    get.answer(grant(V7))
    until(link.take_grants)
    weights = link.take_newest()
    assert weights is not None
    assert weights.version == V7
    assert link.take_newest() is None


def test_a_reply_that_does_not_come_is_asked_for_again(scene: Scene, open_link: Open) -> None:
    link = open_link(have=V5, reply_timeout_s=0.2, heartbeat_s=0.05)
    link.want(V6)
    asked_at = []
    for _ in range(2):
        assert scene.learner.weights.find(Get).message == Get(SESSION, *V5)
        asked_at.append(time.monotonic())
    assert asked_at[1] - asked_at[0] > 0.15


def test_damaged_weights_are_pulled_again(
    scene: Scene, open_link: Open, caplog: pytest.LogCaptureFixture
) -> None:
    link = open_link(have=V5)
    link.want(V6)
    began_at = time.monotonic()
    reply, frame = reply_of(weights_of(6, V6))
    scene.learner.weights.find(Get).answer(reply, bytes(16))
    scene.learner.weights.find(Get).answer(reply, frame[:-1])
    scene.learner.weights.find(Get).answer(reply)
    scene.learner.weights.find(Get).answer(reply, frame, frame)
    assert link.take_newest() is None
    scene.learner.weights.find(Get).answer(reply, frame)
    assert await_weights(link).buffer.tobytes() == frame
    assert caplog.text.count("asking again") == 4
    assert time.monotonic() - began_at > 0.19, "it is not asked without pause"


def test_old_weights_do_not_make_it_ask_at_once(scene: Scene, open_link: Open) -> None:
    link = open_link(have=V5)
    link.want(V7)
    began_at = time.monotonic()
    for _ in range(5):
        scene.learner.weights.find(Get).answer(*reply_of(weights_of(5, V5)))
    scene.learner.weights.find(Get).answer(*reply_of(weights_of(7, V7)))
    assert await_weights(link).version == V7
    assert time.monotonic() - began_at > 0.24


def test_not_modified_does_not_make_it_ask_at_once(scene: Scene, open_link: Open) -> None:
    link = open_link(have=V5)
    link.want(V6)
    get = scene.learner.weights.find(Get)
    get.answer(NotModified(*V5))
    get.answer(grant(V7))
    until(link.take_grants)
    # Nothing but what the test itself makes it say.
    link.timers = {"env_time_ms": 1.0}
    get.answer(*reply_of(weights_of(6, V6)))
    assert scene.learner.weights.find(Get).message == Get(SESSION, *V6)


def test_another_model_ends_the_actor(scene: Scene, open_link: Open) -> None:
    link = open_link()
    other = WeightsLayout((ArraySpec("w", (2, 2), "float32"),))
    scene.learner.weights.find(Get).answer(*reply_of(weights_of(1, V5), other))
    started = time.monotonic()
    link.wait_for_weights(WITHIN_S)
    # Whoever waits is woken.
    assert time.monotonic() - started < WITHIN_S / 2
    for call in (link.take_newest, link.take_grants):
        with pytest.raises(MismatchError, match="model differs"):
            call()
    link.close()


def test_weights_may_come_in_either_layout(scene: Scene, open_link: Open) -> None:
    coarse = LAYOUT.coarse({"w"})
    link = open_link(layouts=(LAYOUT, coarse), num_kept=2)
    half = Weights(V5, np.zeros(coarse.num_bytes, np.uint8))
    scene.learner.weights.find(Get).answer(*reply_of(half, coarse))
    assert await_weights(link).layout_digest == coarse.digest
    link.want(V6)
    scene.learner.weights.find(Get).answer(*reply_of(weights_of(1, V6)))
    assert await_weights(link).layout_digest == LAYOUT.digest


def test_heartbeats_come_by_themselves_and_carry_the_timers(scene: Scene, open_link: Open) -> None:
    link = open_link(have=V5, heartbeat_s=0.1)
    assert scene.learner.weights.hear(Heartbeat).message == Heartbeat(SESSION, {})
    started = time.monotonic()
    # The first timers do not wait for the next beat; this thread, the sampler's, is busy here.
    link.timers = {"env_time_ms": 1.5}
    for _ in range(3):
        beat = scene.learner.weights.hear(Heartbeat)
        assert beat.message in (Heartbeat(SESSION, {}), Heartbeat(SESSION, {"env_time_ms": 1.5}))
    assert beat.message == Heartbeat(SESSION, {"env_time_ms": 1.5})
    for _ in range(3):
        scene.learner.weights.hear(Heartbeat)
    assert 0.3 < time.monotonic() - started < 5.0


def test_the_first_timers_go_at_once(scene: Scene, open_link: Open) -> None:
    link = open_link(have=V5, heartbeat_s=60.0)
    first = scene.learner.weights.hear(Heartbeat)
    link.timers = {"act_time_ms": 2.0}
    # Any message makes the link look.
    first.answer(grant(V5))
    assert scene.learner.weights.hear(Heartbeat).message.timers == {"act_time_ms": 2.0}


def test_grants_are_handed_over_in_order(scene: Scene, open_link: Open) -> None:
    link = open_link(have=V5)
    beat = scene.learner.weights.hear(Heartbeat)
    heard_before = link.last_heard
    grants = [Grant(SESSION, n, 0, *V5, [[n, 1]]) for n in range(1, 4)]
    for one in grants:
        beat.answer(one)
    taken: list[Grant] = []
    until(lambda: taken.extend(link.take_grants()) or len(taken) == 3)
    assert taken == grants
    assert link.last_heard > heard_before


def test_a_version_that_a_grant_names_is_pulled(scene: Scene, open_link: Open) -> None:
    open_link(have=V5)
    scene.learner.weights.hear(Heartbeat).answer(grant(V7))
    assert scene.learner.weights.hear(Get).message == Get(SESSION, *V5)


def test_two_versions_named_at_the_same_moment_are_both_heard(
    scene: Scene, open_link: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sampler thread wants one just when the link thread takes in a grant with another."""
    link = open_link(have=V5)
    beat = scene.learner.weights.hear(Heartbeat)

    def max_and_want(*values: Version) -> Version:
        # What it compares is read by now, and not written yet.
        monkeypatch.undo()
        link.want(V7)
        return max(*values)

    monkeypatch.setattr(link_module, "max", max_and_want, raising=False)
    beat.answer(grant(V6))
    scene.learner.weights.hear(Get).answer(*reply_of(weights_of(6, V6)))
    assert scene.learner.weights.hear(Get).message == Get(SESSION, *V6)


def test_a_refusal_wakes_who_waits_and_may_end_the_session(scene: Scene, open_link: Open) -> None:
    link = open_link()
    beat = scene.learner.weights.find(Heartbeat)
    assert not link.is_session_over
    beat.answer(reject("bad_message", "what?"))
    link.wait_for_weights(WITHIN_S)
    assert not link.is_session_over
    beat.answer(reject("hello_again", "over", 0.0))
    until(lambda: link.is_session_over)


def test_nonsense_is_passed_over(scene: Scene, open_link: Open) -> None:
    link = open_link()
    get = scene.learner.weights.find(Get)
    get.answer_raw(b"\xc1")
    get.answer(*reply_of(weights_of(1, V5)))
    assert await_weights(link).version == V5


def test_what_was_asked_is_lost_with_the_connection(scene: Scene, open_link: Open) -> None:
    link = open_link(have=V5, heartbeat_s=0.05)
    link.want(V6)
    scene.learner.weights.find(Get)
    until(lambda: link.is_asking)
    scene.learner.weights.router.close()
    until(lambda: not link.is_asking)


def test_close_ends_the_thread_and_twice_does_no_harm(open_link: Open) -> None:
    link = open_link()
    assert sum(thread.name == "link" for thread in threading.enumerate()) == 1
    started = time.monotonic()
    link.close()
    link.close()
    assert time.monotonic() - started < 2.0
    assert not any(thread.name == "link" for thread in threading.enumerate())


def test_where_more_are_kept_they_come_one_after_the_other(scene: Scene, open_link: Open) -> None:
    link = open_link(num_kept=2)
    get = scene.learner.weights.find(Get)
    for version in (V5, V6):
        get.answer(*reply_of(weights_of(version.update, version)))
    # The link reads in order: when it has this grant, it has seen all of them.
    get.answer(grant(V6))
    until(link.take_grants)
    taken = [link.take_newest() for _ in range(3)]
    assert [weights and weights.version for weights in taken] == [V5, V6, None]


@pytest.mark.parametrize(
    "buffer",
    [
        np.zeros(12, np.uint8),
        np.zeros(0, np.uint8),
        np.zeros(100_000, np.uint8),
        np.full(4, np.nan, np.float32).view(np.uint8),
        np.full(4, 3e38, np.float32).view(np.uint8),
    ],
    ids=["short", "empty", "huge", "nan", "overflowing"],
)
def test_weights_that_nobody_can_act_with_are_damaged(
    scene: Scene, open_link: Open, caplog: pytest.LogCaptureFixture, buffer: Any
) -> None:
    link = open_link()
    scene.learner.weights.find(Get).answer(*reply_of(Weights(V5, buffer)))
    scene.learner.weights.find(Get).answer(*reply_of(weights_of(1, V6)))
    assert await_weights(link).version == V6
    assert "weights 1.5 are damaged: " in caplog.text
