"""The key of a run: one secret that its learner and its actors share. By it all that they say over
tcp is encrypted, and nobody else is heard.

It is the learner's secret key of CURVE. Actors derive from it the learner's public key, which CURVE
never sends and without which no handshake comes to its end; theirs is another one each time.
"""

import os
import re
import secrets
import socket
import time
from contextlib import suppress

import zmq
from zmq.utils import z85

from impala_async.config.learner import KEY_VARIABLE
from impala_async.errors import ConfigError

# A frame is so much longer when it is encrypted, at most: a nonce, a signature and flags.
OVERHEAD_BYTES = 64
_TEXT = re.compile(r"[0-9a-fA-F]{64}", re.ASCII)
# How a connection begins (ZMTP 3.0): a signature and the version. The greeting of the other end
# names its mechanism in bytes 12 to 31.
_GREETING, _MECHANISM = b"\xff" + bytes(8) + b"\x7f\x03", slice(12, 32)
_WANTS = "wants 64 hexadecimal digits and no quotes, as `openssl rand -hex 32` prints them, got"


class Key:
    """It is shown nowhere: `repr` has nothing of it."""

    def __init__(self, text: str, where: str, fix: str = "") -> None:
        """Raise ConfigError for what is no key, and say where it was and what can be done."""
        if not _TEXT.fullmatch(text := text.strip()):
            are_wrong = ", which are not all such digits" if len(text) == 64 else ""
            kind = f"{len(text)} characters{are_wrong}"
            raise ConfigError(f"{where}: {_WANTS} {kind}{fix}")
        self.text = text.lower()
        self._secret = z85.encode(bytes.fromhex(text))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and secrets.compare_digest(self.text, other.text)

    __hash__ = None  # type: ignore[assignment]  # it is no key of dictionaries

    def guard(self, router: zmq.Socket[bytes]) -> None:
        """Open what this socket binds from now on to those alone who have the key."""
        router.set(zmq.CURVE_SERVER, 1)
        router.set(zmq.CURVE_SECRETKEY, self._secret)

    def show(self, dealer: zmq.Socket[bytes]) -> None:
        """Let this socket, which is yet to dial, find a learner that has the key, or nobody."""
        public, secret = zmq.curve_keypair()
        dealer.set(zmq.CURVE_SERVERKEY, zmq.curve_public(self._secret))
        dealer.set(zmq.CURVE_PUBLICKEY, public)
        dealer.set(zmq.CURVE_SECRETKEY, secret)


def wants_key(url: str, within_s: float) -> bool | None:
    """Whether who listens there talks with a key alone; None where it does not say so in time.

    Where one end alone has a key, ZeroMQ ends the connection, mostly before its own greeting is
    out. Here that greeting is waited for."""
    host, _, port = url.removeprefix("tcp://").rpartition(":")
    said, give_up_at = b"", time.monotonic() + within_s
    with (
        suppress(OSError, ValueError),
        socket.create_connection((host.strip("[]"), int(port)), within_s) as connection,
    ):
        connection.sendall(_GREETING)
        while len(said) < _MECHANISM.stop:
            connection.settimeout(max(give_up_at - time.monotonic(), 0.001))
            if not (more := connection.recv(_MECHANISM.stop)):
                break
            said += more
    return {b"CURVE": True, b"NULL": False}.get(said[_MECHANISM].rstrip(b"\0"))


def new_key() -> Key:
    return Key(secrets.token_hex(32), "a new key")


def key_in_environment() -> Key | None:
    text = os.environ.get(KEY_VARIABLE, "")
    return Key(text, KEY_VARIABLE) if text else None
