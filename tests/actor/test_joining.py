import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from unittest.mock import Mock

import msgpack
import pytest

from impala_async.actor import joining
from impala_async.actor.joining import Inquiry, best_urls, find_learner, say_goodbye
from impala_async.errors import EnvError, MismatchError, UnreachableError
from impala_async.output import SeldomLog, Wait
from impala_async.wire import messages as wire
from impala_async.wire.actor_side import Handshake
from impala_async.wire.session import reject
from impala_async.wire.sockets import Dealer, new_context
from tests.actor.scripted import WELCOME, WITHIN_S, settings_of

HELLO = wire.Hello(wire.PROTOCOL, b"a" * 16, "0", b"r" * 16, 2, 5)
BYE = wire.Bye(WELCOME.session, wire.BYE_REASONS.index("leaving"))


class Stopped(Exception):
    pass


def seldom():
    return SeldomLog(joining.logger)


@pytest.fixture
def dealer(scene):
    context = new_context()
    dealer = Dealer(context, scene.learner.url)
    yield dealer
    dealer.close()
    context.term()


@pytest.fixture
def find(dealer, quick_hellos):
    """Looks for the learner on a thread of its own."""
    with ThreadPoolExecutor(1) as thread:

        def begin(within_s=WITHIN_S, check_stop=lambda: None, has_moved=lambda: False):
            return thread.submit(
                *(find_learner, dealer, Handshake(HELLO, time.monotonic())),
                **{
                    "url": "tcp://there:1",
                    "within_s": within_s,
                    "since": time.monotonic(),
                    "has_moved": has_moved,
                    "check_stop": check_stop,
                    "log": seldom(),
                },
            )

        yield begin


@pytest.fixture
def waiting(monkeypatch):
    """Each look of a wait is told of, as after 12 s; and nothing is found out."""
    monkeypatch.setattr(Wait, "look", lambda wait, what: wait.tell(what(12.0)))
    monkeypatch.setattr(Inquiry, "why", lambda inquiry: "it has said nothing")


SILENT = "no learner answers at tcp://there:1 yet (12 s): it has said nothing"
FULL = "the learner at tcp://there:1 refuses us for now (12 s): full up"


def test_nobody_there_is_told_with_the_address_and_the_reason(find, waiting, caplog):
    started = time.monotonic()
    nobody = r"no learner answered at tcp://there:1 within 0\.3 s: it has said nothing"
    with pytest.raises(UnreachableError, match=nobody):
        find(within_s=0.3).result(WITHIN_S)
    assert 0.3 <= time.monotonic() - started < 5.0
    assert SILENT in caplog.messages


def test_a_learner_that_has_moved_is_not_waited_for(find):
    looks = iter((False, False, True))
    assert find(has_moved=lambda: next(looks)).result(WITHIN_S) is None


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (joining.SILENT, "connections end there before a word is understood: it is no learner, or"),
        ("nobody listens", "nobody listens; is it running"),
    ],
)
def test_a_port_that_hangs_up_is_told_of_while_somebody_listens(find, monkeypatch, found, says):
    cut_short = property(lambda dealer: True, lambda dealer, told: None)
    monkeypatch.setattr(Dealer, "is_cut_short", cut_short, raising=False)
    monkeypatch.setattr(Inquiry, "why", lambda inquiry: found)
    with pytest.raises(UnreachableError, match=says):
        find(within_s=0.1).result(WITHIN_S)


def test_who_was_told_to_come_later_says_who_refuses_and_why(scene, find, waiting, caplog):
    def check_stop():
        if caplog.messages.count(FULL) >= 3:
            raise Stopped

    found = find(check_stop=check_stop)
    scene.learner.data.hear(wire.Hello).answer(reject("full", "full up", 10 * WITHIN_S))
    with pytest.raises(Stopped):
        found.result(WITHIN_S)
    assert caplog.messages[-3:] == [FULL] * 3


def test_a_final_refusal_ends_the_search_and_no_other(scene, find, caplog):
    found = find()
    for code in ("full", "hello_again", "bad_message"):
        scene.learner.data.hear(wire.Hello).answer(reject(code, "come later", 0.0))
    scene.learner.data.hear(wire.Hello).answer(reject("mismatch", "field: mine here, yours there"))
    with pytest.raises(MismatchError, match=r"^the learner .* actor: field: mine here, yours"):
        found.result(WITHIN_S)
    assert "the learner refuses us for now: come later" in caplog.messages


def settings_frame(**changes):
    return wire.encode_settings(settings_of().model_dump(mode="json") | changes)


@pytest.mark.parametrize(
    ("frames", "says"),
    [
        ([], "a welcome comes with one frame"),
        ([settings_frame(), b"more"], "a welcome comes with one frame"),
        ([b"\xc1"], ""),
        ([b"\x81\xa1x" + b"\x91" * 3000], r"both sides: \w+"),
        ([msgpack.packb({1: 2})], ""),
        ([msgpack.packb({"x": msgpack.ExtType(1, b"x")})], ""),
        ([msgpack.packb([1])], "Input should be a valid dictionary"),
        ([b"\xc4" + b"x" * 70_000], "64 KiB at most"),
        ([wire.encode_settings({"seed": 0})], ": env: Field required$"),
        ([settings_frame(**{"evil\n\x1b[31m": 1})], r": evil\\n\\x1b\[31m: Extra inputs are not"),
        ([settings_frame(seed=-5)], ": seed: Input should be greater than or equal to 0$"),
        ([settings_frame(max_lag=0)], ": max_lag: Input should be greater than or equal to 1$"),
    ],
)
def test_settings_that_are_not_understood_do_not_fit(scene, find, frames, says):
    found = find()
    scene.learner.data.hear(wire.Hello).answer(WELCOME, *frames)
    with pytest.raises(MismatchError, match="install the same release.*" + says) as caught:
        found.result(WITHIN_S)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("frame", [b"\xc1", wire.pack(HELLO)])
def test_what_answers_and_is_not_understood_has_not_said_nothing(scene, find, monkeypatch, frame):
    monkeypatch.setattr(Inquiry, "why", lambda inquiry: "it has said nothing")
    found = find(within_s=0.5)
    scene.learner.data.hear(wire.Hello).answer_raw(frame)
    with pytest.raises(UnreachableError, match="what it answers is not understood"):
        found.result(WITHIN_S)


def test_a_learner_of_an_older_epoch_is_told_to_the_last(scene, find, monkeypatch, caplog):
    monkeypatch.setattr(Inquiry, "why", lambda inquiry: "it has said nothing")
    found = find(within_s=0.5)
    scene.learner.data.hear(wire.Hello).answer(
        WELCOME._replace(run_id=HELLO.run_id, epoch=HELLO.epoch - 1), settings_frame()
    )
    said = f"a learner of epoch {HELLO.epoch - 1} answered, but this run is in epoch {HELLO.epoch}"
    with pytest.raises(UnreachableError, match=said):
        found.result(WITHIN_S)
    assert said in caplog.text


def urls(nonce_path, **changes):
    welcome = WELCOME._replace(nonce_path=str(nonce_path), **changes)
    return best_urls(welcome, "tcp://learner.example:5555")


@pytest.fixture
def served(tmp_path):
    """The two paths of a learner that listens at them."""
    paths = {"ipc_data": str(tmp_path / "d"), "ipc_weights": str(tmp_path / "w")}
    with ExitStack() as stack:
        for path in paths.values():
            end = stack.enter_context(socket.socket(socket.AF_UNIX))
            end.bind(path)
            end.listen()
        yield paths


def test_ipc_only_for_those_who_can_read_the_nonce_and_where_somebody_listens(tmp_path, served):
    nonce, other, stale = (tmp_path / name for name in ("nonce", "other", "stale"))
    with socket.socket(socket.AF_UNIX) as end:
        end.bind(str(stale))
    nonce.write_bytes(WELCOME.nonce)
    other.write_bytes(b"o" * 16)
    tcp = "tcp://learner.example:5555", "tcp://learner.example:5556"
    assert best_urls(WELCOME, "tcp://[::1]:5555")[1] == "tcp://[::1]:5556"
    assert urls(nonce, **served) == (f"ipc://{tmp_path}/d", f"ipc://{tmp_path}/w")
    assert urls(other, **served) == tcp
    # A false learner's paths: there is tcp still.
    for path in ("", "/" + "x" * 250, "a\0b", str(nonce), "/nowhere\n\x1b[31m", str(stale)):
        assert urls(nonce, **served | {"ipc_data": path}) == tcp
        assert urls(nonce, **served | {"ipc_weights": path}) == tcp
    for unreadable in (tmp_path / "none", tmp_path, "", "null\0byte", "/dev/zero"):
        assert urls(unreadable, **served) == tcp


@pytest.mark.parametrize(
    "last_word", [wire.ByeOk(b"s" * 16), reject("hello_again", "gone", 0.0), None]
)
def test_goodbye_waits_for_an_answer_and_not_for_long(scene, dealer, monkeypatch, last_word):
    if last_word is not None:
        monkeypatch.setattr(joining, "BYE_OK_S", WITHIN_S)
    with ThreadPoolExecutor(1) as thread:
        # Sent at once, or not at all: there must be a connection.
        while not dealer.send([wire.pack(HELLO)]):
            pass
        hello = scene.learner.data.hear(wire.Hello)
        said = thread.submit(say_goodbye, dealer, BYE, seldom())
        bye = scene.learner.data.hear(wire.Bye)
        assert bye.message == BYE
        hello.answer(wire.Grant(b"s" * 16, 0, 0, 0, 0, []))
        bye.answer_raw(b"nonsense")
        if last_word is not None:
            bye.answer(last_word)
        said.result(WITHIN_S / 2)


def test_a_silent_learner_is_told_from_none(monkeypatch):
    with socket.socket() as taken:
        # Bound, so that nobody else takes it, and not listening.
        taken.bind(("127.0.0.1", 0))
        url = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        assert Inquiry(url).why(WITHIN_S) == "it cannot be reached (Connection refused)"
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"tcp://[127.0.0.1]:{server.getsockname()[1]}"
        assert Inquiry(url).why(WITHIN_S).startswith("something listens there")
    unknown = socket.gaierror(-2, "Name or service not known")
    for error, says in (
        (unknown, "Name or service not known"),
        (TimeoutError("timed out"), "timed out"),
        (UnicodeError("label too long"), "label too long"),
    ):
        monkeypatch.setattr(socket, "create_connection", Mock(side_effect=error))
        assert Inquiry("tcp://no-such-host:5555").why(WITHIN_S) == f"it cannot be reached ({says})"


@pytest.mark.parametrize(
    ("reason", "says"), [("nonfinite", "an observation, a re"), ("invalid", "they have what no ")]
)
def test_an_actor_whose_messages_are_never_good_ends_and_names_its_environment(
    reason, says, caplog
):
    def check(*refused, of_all=""):
        joining.check_refused(refused, "my:Env", seldom(), of_all)

    check("stale")
    assert caplog.messages == []
    check("stale", reason)
    assert caplog.messages[0].startswith(f"the learner refuses trajectories of my:Env: {says}")
    with pytest.raises(EnvError, match=rf"^my:Env: the learner refuses nearly all .*: {says}"):
        check(of_all=reason)
