"""When an actor asks for weights and shows that it lives, and what it takes."""

import numpy as np
import pytest

from impala_async.errors import MismatchError, ProtocolError
from impala_async.schema import ArraySpec
from impala_async.weights import NO_VERSION, Version, Weights, WeightsLayout
from impala_async.wire.messages import Get, Grant, NotModified, WeightsReply
from impala_async.wire.pulls import FIRST_PAUSE_S, LONGEST_PAUSE_S, SHORTEST_BEAT_S, Pulls
from impala_async.wire.session import reject

SESSION = b"s" * 16
V5, V6, V7 = Version(1, 5), Version(1, 6), Version(1, 7)
LAYOUT = WeightsLayout((ArraySpec("w", (4,), "float32"),))
COARSE = LAYOUT.coarse({"w"})
TIMEOUT_S = 60.0


def pulls_of(have=NO_VERSION):
    return Pulls(
        SESSION,
        have=have,
        layouts=(LAYOUT, COARSE),
        heartbeat_s=2.0,
        reply_timeout_s=TIMEOUT_S,
        now=0.0,
    )


def floats(value=0.0):
    return np.full(4, value, np.float32).view(np.uint8)


def take(pulls, version, now, buffer=None, layout=LAYOUT):
    """A sound reply, with weights that may be unfit."""
    weights = Weights(version, floats() if buffer is None else buffer)
    reply = WeightsReply(*version, layout.digest, weights.digest())
    return pulls.take(reply, [b"", weights.buffer.tobytes()], now)


def ask(pulls, now):
    """The question that is due; until it is answered no other one is."""
    get = pulls.get(now)
    assert get is not None
    pulls.said_get(now)
    assert pulls.is_asking
    assert pulls.get(now + TIMEOUT_S) is None
    return get


def name(pulls, version, now=0.0):
    pulls.take(Grant(SESSION, 1, 0, *version, []), [b""], now)


def test_the_first_pull_is_repeated_ever_less_often_until_something_is_published():
    pulls, now = pulls_of(), 0.0
    pauses = []
    for _ in range(8):
        assert ask(pulls, now) == Get(SESSION, *NO_VERSION)
        pulls.take(NotModified(*NO_VERSION), [b""], now)
        assert pulls.answer == "it says that it has none yet"
        assert pulls.get(now) is None
        pauses.append(pulls.wait_s(now))
        now += pauses[-1]
    assert pauses[:3] == pytest.approx([FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S])
    assert pauses[-1] == pytest.approx(LONGEST_PAUSE_S)
    ask(pulls, now)
    assert not pulls.is_serving
    weights = take(pulls, V5, now, floats(2.5))
    assert weights is not None
    assert weights.buffer.view(np.float32).tolist() == [2.5] * 4
    assert pulls.is_serving
    assert pulls.get(now) is None


def test_a_version_is_pulled_when_it_is_named_once_and_without_a_pause():
    pulls = pulls_of(V5)
    name(pulls, V5)
    assert pulls.get(0.0) is None
    name(pulls, V6)
    assert ask(pulls, 0.0) == Get(SESSION, *V5)
    name(pulls, V7)
    take(pulls, V6, 1.0)
    assert ask(pulls, 1.0) == Get(SESSION, *V6)
    take(pulls, V7, 2.0)
    name(pulls, V6)
    assert pulls.get(3.0) is None
    new = pulls_of()
    ask(new, 0.0)
    new.take(NotModified(*NO_VERSION), [b""], 0.0)
    assert new.get(0.0) is None
    name(new, V5)
    assert new.get(0.0) is not None


def test_a_reply_that_does_not_come_is_asked_for_again():
    pulls = pulls_of()
    ask(pulls, 0.0)
    ask(pulls, TIMEOUT_S + 0.1)
    # What was asked is lost with the connection.
    pulls.said_beat(0.0, {})
    pulls.on_new_connection()
    assert pulls.is_beat_due(0.0, {})
    ask(pulls, TIMEOUT_S + 0.1)


UNFIT = {
    "short": np.zeros(12, np.uint8),
    "empty": np.zeros(0, np.uint8),
    "huge": np.zeros(100_000, np.uint8),
    "nan": floats(np.nan),
    "overflowing": floats(3e38),
}


def damaged():
    good = Weights(V6, floats(1.0))
    reply = WeightsReply(*V6, LAYOUT.digest, good.digest())
    frame = good.buffer.tobytes()
    yield from ((reply, [b"", *more]) for more in ([bytes(16)], [frame[:-1]], [], [frame, frame]))
    for buffer in UNFIT.values():
        weights = Weights(V6, buffer)
        unfit = WeightsReply(*V6, LAYOUT.digest, weights.digest())
        yield unfit, [b"", buffer.tobytes()]


def test_damaged_weights_are_asked_for_again_and_not_without_a_pause():
    for reply, frames in damaged():
        pulls = pulls_of(V5)
        name(pulls, V6)
        ask(pulls, 0.0)
        with pytest.raises(ProtocolError):
            pulls.take(reply, frames, 0.0)
        assert pulls.answer == "what it sends is damaged"
        assert (pulls.have, pulls.get(0.0)) == (V5, None)
        assert ask(pulls, FIRST_PAUSE_S) == Get(SESSION, *V5)
    assert take(pulls, V6, 1.0) is not None


def test_an_answer_that_brings_nothing_newer_does_not_make_it_ask_at_once():
    pulls = pulls_of(V5)
    name(pulls, V7)
    answers = [
        (lambda: take(pulls, V5, 1.0), "it sends 1.5, which is not newer"),
        (lambda: take(pulls, Version(0, 9), 1.0), "it sends 0.9, which is not newer"),
        (lambda: pulls.take(NotModified(*V5), [b""], 1.0), "it says that it has none that are"),
        (lambda: pulls.take(NotModified(*V7), [b""], 1.0), "it says that it has 1.7, but none for"),
    ]
    for answer, says in answers:
        ask(pulls, 1.0)
        assert answer() is None
        assert pulls.answer.startswith(says)
        assert pulls.get(1.0) is None
        pulls.name(Version(pulls.named.epoch, pulls.named.update + 1))
    take(pulls, pulls.named, 1.0)
    pulls.take(NotModified(*pulls.named), [b""], 1.0)
    assert not pulls.is_asking
    assert pulls.named == pulls.have


def test_weights_may_come_in_either_layout_and_in_no_other():
    pulls = pulls_of()
    half = take(pulls, V5, 0.0, np.zeros(COARSE.num_bytes, np.uint8), COARSE)
    assert half is not None
    assert half.layout_digest == COARSE.digest
    assert take(pulls, V6, 0.0) is not None
    other = WeightsLayout((ArraySpec("w", (2, 2), "float32"),))
    with pytest.raises(MismatchError, match="model differs"):
        take(pulls, V7, 0.0, layout=other)


def test_heartbeats_are_due_in_time_and_the_first_timers_at_once():
    pulls, timers = pulls_of(), {"act_time_ms": 2.0}
    assert pulls.is_beat_due(0.0, {})
    pulls.said_beat(0.0, {})
    assert not pulls.is_beat_due(1.9, {})
    assert pulls.is_beat_due(0.0, timers)
    pulls.said_beat(1.0, timers)
    assert not pulls.is_beat_due(2.9, timers)
    assert pulls.is_beat_due(3.0, timers)
    # Whatever a learner asks for.
    endless = Pulls(SESSION, have=V5, layouts=(), heartbeat_s=0.0, reply_timeout_s=1.0, now=0.0)
    endless.said_beat(0.0, {})
    assert not endless.is_beat_due(SHORTEST_BEAT_S / 2, {})


def test_a_refusal_may_end_the_session():
    for code, is_over in (("bad_message", False), ("hello_again", True)):
        pulls = pulls_of()
        pulls.take(reject(code, "what?"), [b""], 7.0)
        assert (pulls.is_session_over, pulls.last_heard, pulls.has_heard) == (is_over, 7.0, True)
        assert pulls.answer == "it refuses: what?"
