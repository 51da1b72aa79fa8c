"""The first and the last words between an actor and a learner: hello, welcome or refusal, goodbye;
and what an actor does where all that it sends is refused.

Runs on: sampler thread; `read` on the link thread too
"""

import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgpack
from pydantic import ValidationError

from impala_async import __version__
from impala_async.config.learner import KEY_VARIABLE, is_loopback
from impala_async.config.run import ActorSettings
from impala_async.errors import (
    EnvError,
    ImpalaAsyncError,
    MismatchError,
    NotAllowedError,
    ProtocolError,
    UnreachableError,
    plain,
)
from impala_async.output import SeldomLog, Wait
from impala_async.wire import messages as wire
from impala_async.wire.actor_side import REFUSALS, ActorSide, Handshake, read_answer
from impala_async.wire.local_link import is_served, read_nonce
from impala_async.wire.sockets import Dealer

logger = logging.getLogger(__name__)

CONNECT_POLL_S = 0.02
ANSWER_POLL_S = 0.1
BYE_OK_S = 0.5
DIAL_S = 3.0
NOT_UNDERSTOOD = "what it answers is not understood: it may be no learner, or another release"
SILENT = "something listens there, but has said nothing: it starts, or is no learner"
HAS_NONE = (
    "it has no key, and we have one: it is not the learner of this run, unless that was started "
    "with bind.encrypt=off"
)
CUT_SHORT = "connections end there before a word is understood: "
# By whether we have a key.
WHY_CUT_SHORT = {
    False: "it is no learner, or a proxy that reaches none, or one that wants a key",
    True: "the key that we have is not that of its run, or it is no learner",
}
WANTS_KEY = (
    f"the learner at %s wants the key of its run: set {KEY_VARIABLE} to what the file `key` in its "
    "run folder has, or let --learner name that folder, where it can be seen from here"
)
OUTDATED = (
    "a learner of epoch %d answered, but this run is in epoch %d: an old learner process may still "
    "be alive"
)
MAX_FAULT_CHARS = 200


class Inquiry:
    """Finds out why a learner is silent; in a thread, since to look up a name may take long."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._found = "it is not known yet why"
        self._thread: threading.Thread | None = None

    def why(self, wait_s: float = 0.2) -> str:
        """One clause, as far as it is known by now."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._ask, name="inquiry", daemon=True)
            self._thread.start()
        self._thread.join(wait_s)
        return self._found

    def _ask(self) -> None:
        host, _, port = self._url.removeprefix("tcp://").rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), DIAL_S).close()
        except (OSError, ValueError) as error:
            self._found = f"it cannot be reached ({getattr(error, 'strerror', None) or error})"
            return
        self._found = SILENT


def find_learner(
    dealer: Dealer,
    handshake: Handshake,
    *,
    url: str,
    within_s: float,
    since: float,
    has_moved: Callable[[], bool],
    check_stop: Callable[[], None],
    log: SeldomLog,
) -> tuple[wire.Welcome, ActorSettings] | None:
    """Say hello now and then, until a learner of this run or of another one welcomes us; None if it
    `has_moved`. If none did in time, that is an UnreachableError with the last refusal, if there
    was one; a learner that refuses for good is a MismatchError or a NotAllowedError."""
    now = time.monotonic()
    give_up_at = since + within_s
    inquiry, wait, odd = Inquiry(url), Wait(logger.warning), ""

    def why() -> str:
        found = odd or inquiry.why()
        # Nobody may listen there any more.
        return _why_cut_short(dealer) if found == SILENT and dealer.is_cut_short else found

    def say_wait(seconds: float) -> str:
        # Until it is asked again, what it said last is how things are.
        if handshake.is_refused and dealer.is_greeted:
            return f"the learner at {url} refuses us for now ({seconds:.0f} s): {handshake.refusal}"
        return f"no learner answers at {url} yet ({seconds:.0f} s): {why()}"

    while now < give_up_at:
        check_stop()
        if has_moved():
            return None
        wait.look(say_wait)
        is_due = handshake.is_due(now, is_greeted=dealer.is_greeted)
        if is_due and dealer.greet([wire.pack(handshake.hello)]):
            handshake.said(now)
        wait_s = max(handshake.say_at - now, CONNECT_POLL_S)
        frames = dealer.receive(min(ANSWER_POLL_S, wait_s, give_up_at - now))
        message = read(frames[0], log) if frames else None
        if frames:
            odd = "" if isinstance(message, wire.Reject | wire.Welcome) else NOT_UNDERSTOOD
        now = time.monotonic()
        welcome = handshake.take(message, now)
        if frames and welcome is not None:
            return welcome, _read_settings(frames)
        if isinstance(message, wire.Reject) and not handshake.elsewhere:
            log.warning("the learner refuses us for now: %s", message.text)
            wait = Wait(logger.warning)
        elif isinstance(message, wire.Welcome):
            epochs = message.epoch, handshake.hello.epoch
            log.warning(OUTDATED, *epochs)
            odd = OUTDATED % epochs
    if handshake.refusal:
        told = f"the learner at {url} refused us for {within_s:g} s: {handshake.refusal}"
        raise UnreachableError(told)
    raise UnreachableError(
        f"no learner answered at {url} within {within_s:g} s: {why()}; is it running, and "
        "is this the address that it printed?"
    )


def _why_cut_short(dealer: Dealer) -> str:
    if not dealer.is_key_one_sided:
        return CUT_SHORT + WHY_CUT_SHORT[dealer.has_key]
    return HAS_NONE if dealer.has_key else "it wants a key, and we have none"


def check_key(dealer: Dealer, url: str) -> None:
    """Raise NotAllowedError where the learner wants a key and we have none. The other way it is a
    wait: anybody may listen there who is no learner of ours, and would like to be taken for one."""
    if dealer.is_key_one_sided and not dealer.has_key:
        raise NotAllowedError(WANTS_KEY % url)


def say_goodbye(dealer: Dealer, bye: wire.Bye, log: SeldomLog) -> None:
    if not dealer.send([wire.pack(bye)]):
        return
    give_up_at = time.monotonic() + BYE_OK_S
    while (left_s := give_up_at - time.monotonic()) > 0:
        frames = dealer.receive(left_s)
        if frames and isinstance(read(frames[0], log), wire.ByeOk | wire.Reject):
            return


def is_compressed(choice: Literal["auto", "on", "off"], data_url: str) -> bool:
    """Whether observations are compressed on their way there: in vain if they stay on the host."""
    is_remote = data_url.startswith("tcp://") and not is_loopback(data_url)
    return choice == "on" or (choice == "auto" and is_remote)


def end_since_welcome(
    dealer: Dealer, side: ActorSide[Any], log: SeldomLog
) -> wire.Bye | wire.Reject | None:
    """The word by which a session is over before its Spec: environments may take long to make."""
    while frames := dealer.receive(0):
        message = read(frames[0], log)
        found = None if message is None else side.take(message, time.monotonic())
        if isinstance(found, wire.Bye):
            dealer.send_last([wire.pack(wire.ByeOk(found.session))])
        if isinstance(found, wire.Bye | wire.Reject):
            return found
    return None


def read(frame: wire.Frame, log: SeldomLog) -> wire.Message | None:
    """Read what the learner says; None, and a line in the log, if it is no message of ours."""
    try:
        return read_answer(frame)
    except ProtocolError as error:
        log.warning("a message of the learner is not understood: %s", error)
        return None


def best_urls(welcome: wire.Welcome, dialled_url: str) -> tuple[str, str]:
    """Data and weights: ipc if we can read the learner's nonce and both sockets are served, else
    the host that was dialled."""
    is_here = read_nonce(welcome.nonce_path) == welcome.nonce
    if is_here and is_served(welcome.ipc_data) and is_served(welcome.ipc_weights):
        return f"ipc://{welcome.ipc_data}", f"ipc://{welcome.ipc_weights}"
    host = dialled_url.rpartition(":")[0]
    return dialled_url, f"{host}:{welcome.weights_port}"


def _read_settings(frames: Sequence[wire.Frame]) -> ActorSettings:
    try:
        if len(frames) != 2 or len(frames[1]) > wire.MAX_SETTINGS_BYTES:
            raise ProtocolError("wrong_size", "a welcome comes with one frame, of 64 KiB at most")
        return ActorSettings.model_validate(msgpack.unpackb(frames[1], max_ext_len=0))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        fault = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    except (ValueError, TypeError, RecursionError, ImpalaAsyncError) as error:
        fault = str(error) or type(error).__name__
    raise MismatchError(
        f"the learner's settings do not fit impala-async {__version__}, which runs here; install "
        f"the same release of impala-async on both sides: {plain(fault)[:MAX_FAULT_CHARS]}"
    )


def check_refused(refused: Sequence[str], env_id: str, log: SeldomLog, reason: str) -> None:
    """Tell of messages that were refused for what is in them; EnvError where there is a reason for
    which nearly all are. Any other refusal is mostly nobody's fault."""
    if reason:
        told = "the learner refuses nearly all that this actor sends, and its log says why"
        raise EnvError(f"{env_id}: {told}: {REFUSALS[reason]}")
    for each, what in REFUSALS.items():
        if each in refused:
            log.warning(f"the learner refuses trajectories of %s: {what}", env_id)
