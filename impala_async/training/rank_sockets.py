"""Sums over the ranks of a learner by sockets of their own, for what is short or what two have.

gloo hands each message to a thread of its own, and from there to the one that waits: that takes
longer than the way of a short one. Here the message itself wakes whoever waits for it.
"""

import secrets
import socket
import struct
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

import numpy as np
from torch import Tensor

from impala_async.config.ranks import Place
from impala_async.errors import RankError

# Where there are more than two, so many numbers of all of them together go through rank 0.
MOST_NUMBERS = 1 << 18
# Each of two sends so many pieces before it reads one. The kernel keeps more than that, though
# nobody reads: so never do both wait to send.
PIECE_BYTES, AHEAD = 1 << 15, 2
KEPT_BYTES = (AHEAD + 2) * PIECE_BYTES
# A rank that has not come to rank 0 by then never will, as where only gloo is let through.
OPEN_S, GREET_S = 10.0, 1.0
# A secret of this start, and the number of the rank.
_GREETING = struct.Struct("=16sI")
_TIMEOUT = struct.Struct("@ll")


class RankSockets:
    """Owns a socket to each other rank at rank 0, and at the others the one to rank 0."""

    def __init__(self, place: Place, others: Mapping[int, socket.socket], wait_s: float) -> None:
        self._place, self._wait_s = place, wait_s
        # Whom it speaks to.
        self._at = 0
        # In their order, so that the sum is the same each time.
        self._others = {number: others[number] for number in sorted(others)}
        timeout = _TIMEOUT.pack(int(wait_s), int(wait_s % 1 * 1e6))
        for each in others.values():
            # It is the kernel that waits: with a timeout of Python's, each read is two calls.
            each.settimeout(None)
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                each.setsockopt(socket.SOL_SOCKET, option, timeout)
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, KEPT_BYTES)
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def can_sum(self, shares: Tensor) -> bool:
        """Whether this is a good way for it: where many have much, rank 0 would be a narrow one."""
        is_short = shares.numel() * self._place.count <= MOST_NUMBERS
        return shares.device.type == "cpu" and (is_short or self._place.count == 2)

    def sum(self, shares: Tensor) -> None:
        """The sum over ranks, in place, and the same at each to the bit; RankError where one is
        lost."""
        numbers = shares.view(-1).numpy()
        try:
            if self._place.count == 2:
                self._exchange(numbers)
            else:
                self._sum_at_rank_0(numbers)
        except BlockingIOError:
            told = f"rank {self._at} has said nothing for {self._wait_s:g} s"
            raise RankError(told) from None
        except OSError as error:
            raise RankError(f"rank {self._at} has ended: {error.strerror or error}") from None

    def close(self) -> None:
        for each in self._others.values():
            each.close()

    def _exchange(self, numbers: np.ndarray) -> None:
        """Each sends its own, and adds those of the other: no answer has to come back."""
        (other,) = self._others
        size = PIECE_BYTES // numbers.itemsize
        theirs = np.empty(min(size, len(numbers)), numbers.dtype)
        pieces = [numbers[start : start + size] for start in range(0, len(numbers), size)]
        for number in range(len(pieces) + AHEAD):
            if number < len(pieces):
                self._send(other, pieces[number])
            if number >= AHEAD:
                piece = pieces[number - AHEAD]
                self._read(other, theirs[: len(piece)])
                piece += theirs[: len(piece)]

    def _sum_at_rank_0(self, numbers: np.ndarray) -> None:
        if not self._place.is_first:
            self._send(0, numbers)
            self._read(0, numbers)
            return
        theirs = np.empty_like(numbers)
        for number in self._others:
            self._read(number, theirs)
            numbers += theirs
        for number in self._others:
            self._send(number, numbers)

    def _send(self, number: int, numbers: np.ndarray) -> None:
        self._at = number
        self._others[number].sendall(numbers.data.cast("B"))

    def _read(self, number: int, into: np.ndarray) -> None:
        self._at, left = number, into.data.cast("B")
        while left:
            size = self._others[number].recv_into(left, 0, socket.MSG_WAITALL)
            if not size:
                raise RankError(f"rank {number} has ended")
            left = left[size:]


def open_sockets(
    place: Place, host: str, gather: Callable[[bytes], list[bytes]], wait_s: float
) -> RankSockets | None:
    """Connect all ranks with rank 0, which `host` names; None at each if one does not get there.
    `gather` returns what all ranks give it, and waits no longer than `wait_s` for one."""
    others: dict[int, socket.socket] = {}
    open_s = min(OPEN_S, wait_s / 2)
    with socket.create_server(("", 0)) if place.is_first else socket.socket() as listener:
        secret = secrets.token_bytes(16)
        said = secret + listener.getsockname()[1].to_bytes(2) if place.is_first else b""
        first = gather(said)[0]
        secret, port = first[:16], int.from_bytes(first[16:])
        with suppress(OSError):
            if place.is_first:
                others |= _accept(listener, place.count - 1, secret, open_s)
            else:
                others[0] = socket.create_connection((host, port), open_s)
                others[0].sendall(_GREETING.pack(secret, place.number))
    opened = RankSockets(place, others, wait_s)
    num_wanted = place.count - 1 if place.is_first else 1
    if b"" in gather(b"here" * (len(others) == num_wanted)):
        opened.close()
        return None
    return opened


def _accept(
    listener: socket.socket, count: int, secret: bytes, open_s: float
) -> dict[int, socket.socket]:
    """So many ranks, by their number: whoever does not know the secret is none."""
    found: dict[int, socket.socket] = {}
    give_up_at = time.monotonic() + open_s
    while len(found) < count and (left_s := give_up_at - time.monotonic()) > 0:
        listener.settimeout(left_s)
        try:
            one, _ = listener.accept()
        except TimeoutError:
            break
        one.settimeout(min(GREET_S, left_s))
        greeting = b""
        with suppress(OSError):
            greeting = one.recv(_GREETING.size, socket.MSG_WAITALL)
        known, number = _GREETING.unpack(greeting.ljust(_GREETING.size, b"\0"))
        if secrets.compare_digest(known, secret):
            found[number] = one
        else:
            one.close()
    return found
