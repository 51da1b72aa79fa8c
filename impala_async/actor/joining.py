"""The first and the last words between an actor and a learner: hello, welcome or refusal, goodbye.

Runs on: sampler thread; `read` on the link thread too
"""

import logging
import random
import time
from collections.abc import Callable, Sequence

from pydantic import ValidationError

from impala_async import __version__
from impala_async.actor.retrying import Inquiry, Log, Pauses
from impala_async.config.run import ActorSettings
from impala_async.errors import (
    ImpalaAsyncError,
    MismatchError,
    NotAllowedError,
    ProtocolError,
    UnreachableError,
)
from impala_async.waiting import Wait
from impala_async.wire.codec import Frame, decode_settings
from impala_async.wire.local_link import is_socket, read_nonce
from impala_async.wire.messages import (
    BYE_REASONS,
    MAX_WHY,
    PROTOCOL,
    REJECT_CODES,
    WRONG_PORT,
    Bye,
    ByeOk,
    Grant,
    Hello,
    Message,
    Reject,
    Welcome,
    pack,
    plain,
    unpack,
)
from impala_async.wire.sockets import Dealer

logger = logging.getLogger(__name__)

HELLO_EVERY_S = 1.0
CONNECT_POLL_S = 0.02
ANSWER_POLL_S = 0.1
BYE_OK_S = 0.5
NO_RUN = bytes(16)
NOT_UNDERSTOOD = "what it answers is not understood: it may be no learner, or another release"
MAX_NAMED, MAX_NAMED_CHARS = 3, 100


def hello_of(actor_id: bytes, number: int, known: Welcome | None, lowest_unsettled: int) -> Hello:
    """What an actor says first, or again to a learner that it has worked for before."""
    return Hello(
        protocol=PROTOCOL,
        actor=actor_id,
        build=__version__,
        run_id=known.run_id if known else NO_RUN,
        epoch=known.epoch if known else 0,
        lowest_unsettled=lowest_unsettled,
        number=number,
    )


def find_learner(
    socket: Dealer,
    hello: Hello,
    *,
    url: str,
    within_s: float,
    check_stop: Callable[[], None],
    log: Log = logger,
) -> tuple[Welcome, ActorSettings]:
    """Say hello now and then, until a learner of this run or of another one welcomes us.

    Raises:
        UnreachableError: none did within the time; the text has the last refusal, if there was one.
        MismatchError, NotAllowedError: this learner refuses this actor for good.
    """
    say_at = greet_at = now = time.monotonic()
    give_up_at = now + within_s
    inquiry, wait = Inquiry(url), Wait(logger.warning)
    pauses, refused, is_told, is_understood = Pauses(), "", False, True

    def why() -> str:
        return inquiry.why() if is_understood else NOT_UNDERSTOOD

    def say_wait(seconds: float) -> str:
        # Until it is asked again, what it said last is how things are.
        if is_told and socket.is_greeted:
            return f"the learner at {url} refuses us for now ({seconds:.0f} s): {refused}"
        return f"no learner answers at {url} yet ({seconds:.0f} s): {why()}"

    while now < give_up_at:
        check_stop()
        wait.look(say_wait)
        is_due = now >= say_at or (now >= greet_at and not socket.is_greeted)
        if is_due and socket.greet([pack(hello)]):
            is_told = False
            # Over each new connection, but what only hangs up is not hammered at.
            greet_at = now + pauses.take()
            # Not all at once, when many actors lost the same learner.
            say_at = now + HELLO_EVERY_S * random.uniform(0.5, 1.0)
        poll_s = min(ANSWER_POLL_S, max(say_at - now, CONNECT_POLL_S), give_up_at - now)
        frames = socket.receive(poll_s)
        message = read(frames[0], log) if frames else None
        if frames:
            is_understood = isinstance(message, Reject | Welcome)
        if isinstance(message, Reject):
            raise_if_final(message, is_joined=False)
            log.warning("the learner refuses us for now: %s", message.text)
            refused, is_told = message.text, True
            say_at = max(say_at, time.monotonic() + message.retry_after_s)
            wait = Wait(logger.warning)
        elif frames and isinstance(message, Welcome) and _is_current(message, hello, log):
            return message, _read_settings(frames)
        now = time.monotonic()
    if refused:
        raise UnreachableError(f"the learner at {url} refused us for {within_s:g} s: {refused}")
    raise UnreachableError(
        f"no learner answered at {url} within {within_s:g} s: {why()}; is it running, and "
        "is this the address that it printed?"
    )


def say_goodbye(socket: Dealer, session: bytes, why: str = "") -> None:
    """End a session, and wait a moment until the learner has understood."""
    bye = Bye(session, BYE_REASONS.index("leaving"), plain(why)[:MAX_WHY])
    if not socket.send([pack(bye)]):
        return
    give_up_at = time.monotonic() + BYE_OK_S
    while (left_s := give_up_at - time.monotonic()) > 0:
        frames = socket.receive(left_s)
        if frames and isinstance(read(frames[0]), ByeOk | Reject):
            return


def read(frame: Frame, log: Log = logger) -> Message | None:
    """What the learner says; None, and a line in the log, if that is no message of ours."""
    try:
        message = unpack(frame)
        _check_sense(message)
    except ProtocolError as error:
        log.warning("a message of the learner is not understood: %s", error)
        return None
    if not isinstance(message, Reject):
        return message
    text = plain(message.text.strip()) or f"it does not say why ({REJECT_CODES[message.code]})"
    return message._replace(text=text)


def _check_sense(message: Message) -> None:
    """Fields that are right one by one may not go together."""
    if isinstance(message, Grant) and message.settled > message.granted:
        text = f"Grant.settled = {message.settled}, beyond granted = {message.granted}"
        raise ProtocolError("malformed_header", text)
    if isinstance(message, Welcome) and message.heartbeat_s > message.lease_s:
        text = f"Welcome.heartbeat_s = {message.heartbeat_s:g}, over lease_s = {message.lease_s:g}"
        raise ProtocolError("malformed_header", text)


def raise_if_final(refusal: Reject, *, is_joined: bool) -> None:
    """A refusal that no second try will change ends this actor.

    Once it has joined, a message that the learner does not understand is only one message.
    """
    code = REJECT_CODES[refusal.code]
    if code == "not_allowed":
        raise NotAllowedError(f"the learner does not admit this actor: {refusal.text}")
    if WRONG_PORT in refusal.text:
        raise MismatchError("this is the weights port of a learner: dial its data port instead")
    if code in ("mismatch", "protocol") or (refusal.retry_after_s < 0 and not is_joined):
        raise MismatchError(f"the learner refuses this actor: {refusal.text}")


def best_urls(welcome: Welcome, dialled_url: str) -> tuple[str, str]:
    """Data and weights: ipc if we can read the learner's nonce, else the host that was dialled."""
    is_here = read_nonce(welcome.nonce_path) == welcome.nonce
    if is_here and is_socket(welcome.ipc_data) and is_socket(welcome.ipc_weights):
        return f"ipc://{welcome.ipc_data}", f"ipc://{welcome.ipc_weights}"
    host = dialled_url.rpartition(":")[0]
    return dialled_url, f"{host}:{welcome.weights_port}"


def _is_current(welcome: Welcome, hello: Hello, log: Log) -> bool:
    """Within a run a lower epoch is a learner that should be dead."""
    if welcome.run_id != hello.run_id or welcome.epoch >= hello.epoch:
        return True
    log.warning(
        "a learner of epoch %d answered, but this run is in epoch %d: is an old learner process "
        "still alive?",
        welcome.epoch,
        hello.epoch,
    )
    return False


def _read_settings(frames: Sequence[Frame]) -> ActorSettings:
    try:
        if len(frames) != 2:
            raise ProtocolError("wrong_frame_count", "a welcome comes with one frame")
        return ActorSettings.model_validate(decode_settings(frames[1]))
    except (ImpalaAsyncError, ValidationError) as error:
        raise MismatchError(
            f"the learner's settings do not fit impala-async {__version__}, which runs here; "
            f"install the same release of impala-async on both sides: {_first_faults(error)}"
        ) from None


def _first_faults(error: Exception) -> str:
    """In one line, whatever the learner wrote."""
    if not isinstance(error, ValidationError):
        return plain(str(error))
    details = error.errors(include_url=False, include_input=False)
    faults = [
        plain(f"{'.'.join(map(str, each['loc']))}: {each['msg']}")[:MAX_NAMED_CHARS]
        for each in details
    ]
    more = [f"and {len(faults) - MAX_NAMED} more"] if len(faults) > MAX_NAMED else []
    return "; ".join(faults[:MAX_NAMED] + more)
