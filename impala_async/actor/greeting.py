"""The first words between an actor and a learner: hello, welcome or refusal, and the way to it.

Runs on: sampler thread
"""

import logging
import time
from collections.abc import Callable
from pathlib import Path

from impala_async.config import ActorSettings
from impala_async.errors import ImpalaAsyncError, MismatchError, NotAllowedError
from impala_async.wire.codec import decode_settings
from impala_async.wire.messages import REJECT_CODES, Hello, Reject, Welcome, pack, unpack
from impala_async.wire.sockets import Dealer

logger = logging.getLogger(__name__)

CONNECT_POLL_S = 0.02
ANSWER_POLL_S = 0.1


def greet(
    socket: Dealer, hello: Hello, *, until: float, should_stop: Callable[[], bool]
) -> tuple[Welcome, ActorSettings] | None:
    """Say hello once there is a connection, and wait for the answer; None if none came in time."""
    is_sent = False
    while (left_s := until - time.monotonic()) > 0 and not should_stop():
        is_sent = is_sent or socket.send([pack(hello)])
        frames = socket.receive(min(left_s, ANSWER_POLL_S if is_sent else CONNECT_POLL_S))
        if frames is None:
            continue
        message = unpack(frames[0])
        if isinstance(message, Reject):
            raise_if_final(message)
        elif isinstance(message, Welcome) and len(frames) == 2:
            return (message, _read_settings(frames[1])) if _is_current(message, hello) else None
    return None


def raise_if_final(refusal: Reject) -> None:
    """A refusal that no second try will change ends this actor."""
    code = REJECT_CODES[refusal.code]
    if code in ("mismatch", "protocol"):
        raise MismatchError(refusal.text)
    if code == "not_allowed":
        raise NotAllowedError(refusal.text)
    if code == "full":
        logger.warning("%s; trying again", refusal.text)


def best_urls(welcome: Welcome, dialled_url: str) -> tuple[str, str]:
    """Data and weights: ipc if we can read the learner's nonce, else the host that was dialled."""
    try:
        is_same_host = Path(welcome.nonce_path).read_bytes() == welcome.nonce
    except OSError:
        is_same_host = False
    if is_same_host:
        return f"ipc://{welcome.ipc_data}", f"ipc://{welcome.ipc_weights}"
    host = dialled_url.rpartition(":")[0]
    return dialled_url, f"{host}:{welcome.weights_port}"


def _is_current(welcome: Welcome, hello: Hello) -> bool:
    """Within a run a lower epoch is a learner that should be dead."""
    if welcome.run_id != hello.run_id or welcome.epoch >= hello.epoch:
        return True
    logger.warning(
        "a learner of epoch %d answered, but this run is in epoch %d: is an old learner process "
        "still alive?",
        welcome.epoch,
        hello.epoch,
    )
    return False


def _read_settings(frame: bytes) -> ActorSettings:
    try:
        return ActorSettings.model_validate(decode_settings(frame))
    except (ImpalaAsyncError, ValueError) as error:
        raise MismatchError(
            "the learner's settings are not understood here; install the same release of "
            f"impala-async on both sides: {error}"
        ) from None
