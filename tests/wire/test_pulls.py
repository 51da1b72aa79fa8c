"""When an actor asks for weights and shows that it lives, and what it takes."""

import numpy as np
import pytest

from impala_async.errors import MismatchError, ProtocolError
from impala_async.schema import ArraySpec
from impala_async.weights import NO_VERSION, Version, Weights, WeightsLayout
from impala_async.wire.messages import Get, Grant, NotModified, WeightsReply
from impala_async.wire.pulls import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    SHORTEST_BEAT_S,
    Pulls,
)
from impala_async.wire.session import reject

SESSION = b"s" * 16
V5, V6, V7 = Version(1, 5), Version(1, 6), Version(1, 7)
LAYOUT = WeightsLayout((ArraySpec("w", (4,), "float32"),))
COARSE = LAYOUT.coarse({"w"})
TIMEOUT_S = 60.0


def pulls_of(have=NO_VERSION, heartbeat_s=2.0):
    times = {"heartbeat_s": heartbeat_s, "reply_timeout_s": TIMEOUT_S, "now": 0.0}
    return Pulls(SESSION, have=have, layouts=(LAYOUT, COARSE), **times)


def floats(value=0.0):
    return np.full(4, value, np.float32).view(np.uint8)


def reply_of(version, buffer=None, layout=LAYOUT):
    """A sound reply, with weights that may be unfit."""
    weights = Weights(version, floats() if buffer is None else buffer)
    reply = WeightsReply(*version, layout.digest, weights.digest())
    return reply, [b"", weights.buffer.tobytes()]


def ask(pulls, now, have):
    """The question that is due; until it is answered no other one is."""
    assert pulls.get(now) == Get(SESSION, *have)
    pulls.said_get(now)
    assert pulls.is_asking
    assert pulls.get(now + TIMEOUT_S) is None


def name(pulls, version, now=0.0):
    pulls.take(Grant(SESSION, 1, 0, *version, []), [b""], now)


def test_the_first_pull_is_repeated_ever_less_often_until_something_is_published():
    pulls, now, pauses = pulls_of(), 0.0, []
    for _ in range(8):
        ask(pulls, now, NO_VERSION)
        pulls.take(NotModified(*NO_VERSION), [b""], now)
        assert pulls.answer == "it says that it has none yet"
        assert pulls.get(now) is None
        pauses.append(pulls.wait_s(now))
        now += pauses[-1]
    assert pauses[:3] == pytest.approx([FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S])
    assert pauses[-1] == pytest.approx(LONGEST_PAUSE_S)
    ask(pulls, now, NO_VERSION)
    assert not pulls.is_serving
    weights = pulls.take(*reply_of(V5, floats(2.5)), now)
    assert weights.buffer.view(np.float32).tolist() == [2.5] * 4
    assert pulls.is_serving
    assert pulls.get(now) is None


def test_a_version_is_pulled_when_it_is_named_once_and_without_a_pause():
    pulls = pulls_of(V5)
    name(pulls, V5)
    assert pulls.get(0.0) is None
    name(pulls, V6)
    ask(pulls, 0.0, V5)
    name(pulls, V7)
    pulls.take(*reply_of(V6), 1.0)
    ask(pulls, 1.0, V6)
    pulls.take(*reply_of(V7), 2.0)
    name(pulls, V6)
    assert pulls.get(3.0) is None
    new = pulls_of()
    ask(new, 0.0, NO_VERSION)
    new.take(NotModified(*NO_VERSION), [b""], 0.0)
    assert new.get(0.0) is None
    name(new, V5)
    assert new.get(0.0) is not None


def test_a_reply_that_does_not_come_is_asked_for_again():
    pulls = pulls_of()
    ask(pulls, 0.0, NO_VERSION)
    ask(pulls, TIMEOUT_S + 0.1, NO_VERSION)
    # The question is lost with the connection.
    pulls.said_beat(0.0, {})
    pulls.on_new_connection()
    assert pulls.is_beat_due(0.0, {})
    ask(pulls, TIMEOUT_S + 0.1, NO_VERSION)


def test_weights_are_a_view_of_their_frame_and_whole():
    reply, (_, content) = reply_of(V5, floats(1.5))
    weights = pulls_of().take(reply, [b"header", content], 0.0)
    assert (weights.version, bytes(weights.buffer)) == (V5, content)
    assert np.shares_memory(weights.buffer, np.frombuffer(content, np.uint8))
    flipped = [content[:i] + bytes([content[i] ^ 1]) + content[i + 1 :] for i in (0, 7, 15)]
    for unsound in ([flipped[0]], [flipped[1]], [flipped[2]], [content[:-1]], [], [content] * 2):
        with pytest.raises(ProtocolError):
            pulls_of().take(reply, [b"header", *unsound], 0.0)


def damaged():
    reply, (_, frame) = reply_of(V6, floats(1.0))
    yield from ((reply, [b"", *more]) for more in ([bytes(16)], [frame[:-1]], [], [frame, frame]))
    sizes = [np.zeros(num_bytes, np.uint8) for num_bytes in (12, 0, 100_000)]
    yield from (reply_of(V6, unfit) for unfit in (*sizes, floats(np.nan), floats(np.inf)))


def test_damaged_weights_are_asked_for_again_and_not_without_a_pause():
    for reply, frames in damaged():
        pulls = pulls_of(V5)
        name(pulls, V6)
        ask(pulls, 0.0, V5)
        with pytest.raises(ProtocolError):
            pulls.take(reply, frames, 0.0)
        assert pulls.answer == "what it sends is damaged"
        assert (pulls.have, pulls.get(0.0)) == (V5, None)
        ask(pulls, FIRST_PAUSE_S, V5)
    assert pulls.take(*reply_of(V6), 1.0) is not None


def test_an_answer_that_brings_nothing_newer_does_not_make_it_ask_at_once():
    pulls = pulls_of(V5)
    name(pulls, V7)
    for answer, says in (
        (reply_of(V5), "it sends 1.5, which is not newer"),
        (reply_of(Version(0, 9)), "it sends 0.9, which is not newer"),
        ((NotModified(*V5), [b""]), "it says that it has none that are newer"),
        ((NotModified(*V7), [b""]), "it says that it has 1.7, but none for us yet"),
    ):
        ask(pulls, 1.0, V5)
        assert pulls.take(*answer, 1.0) is None
        assert pulls.answer == says
        assert pulls.get(1.0) is None
        pulls.name(Version(pulls.named.epoch, pulls.named.update + 1))
    pulls.take(*reply_of(pulls.named), 1.0)
    pulls.take(NotModified(*pulls.named), [b""], 1.0)
    assert (pulls.is_asking, pulls.have) == (False, pulls.named)


def test_weights_may_come_in_either_layout_and_in_no_other():
    pulls = pulls_of()
    half = pulls.take(*reply_of(V5, np.zeros(COARSE.num_bytes, np.uint8), COARSE), 0.0)
    assert half.layout_digest == COARSE.digest
    assert pulls.take(*reply_of(V6), 0.0) is not None
    other = WeightsLayout((ArraySpec("w", (2, 2), "float32"),))
    with pytest.raises(MismatchError, match="model differs"):
        pulls.take(*reply_of(V7, layout=other), 0.0)


def test_heartbeats_are_due_in_time_and_the_first_timers_at_once():
    pulls, timers = pulls_of(), {"act_time_ms": 2.0}
    assert pulls.is_beat_due(0.0, {})
    pulls.said_beat(0.0, {})
    assert [pulls.is_beat_due(*when) for when in ((1.9, {}), (0.0, timers))] == [False, True]
    pulls.said_beat(1.0, timers)
    assert [pulls.is_beat_due(now, timers) for now in (2.9, 3.0)] == [False, True]
    # No learner can make them due more often than that.
    endless = pulls_of(heartbeat_s=0.0)
    endless.said_beat(0.0, {})
    assert not endless.is_beat_due(SHORTEST_BEAT_S / 2, {})


def test_a_refusal_may_end_the_session():
    unknown, ended = "its weights port knows no session of this actor", "it has ended the session"
    for code, have, over in (
        ("full", Version(1, 1), ""),
        ("hello_again", NO_VERSION, unknown),
        ("hello_again", Version(1, 1), ended),
    ):
        pulls = pulls_of(have=have)
        # Who could do nothing with what it was told has not answered.
        pulls.take(reject("bad_message", "oh"), [b""], 6.0)
        assert (pulls.session_over, pulls.last_heard, pulls.has_heard) == ("", 0.0, False)
        assert pulls.answer == "it refuses: oh"
        pulls.take(reject(code, "what?"), [b""], 7.0)
        assert (pulls.session_over, pulls.last_heard, pulls.has_heard) == (over, 7.0, True)
        assert pulls.answer == "it refuses: what?"
