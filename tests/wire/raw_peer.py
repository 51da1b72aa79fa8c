"""Peers that speak ZMTP themselves, byte by byte, as no library of ours would."""

import socket
import struct

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x05READY" + b"\x0bSocket-Type" + (6).to_bytes(4, "big") + b"DEALER"
EMPTY_AND_MORE = b"\x01\x00"


def message(body):
    """One small frame that is a whole message."""
    return b"\x00" + bytes([len(body)]) + body


def connect(url, route=b""):
    """A connection to a router's tcp address; what is written to it now are frames.

    A peer may claim the route that the router knows it by; else it is given one.
    """
    host, _, port = url.removeprefix("tcp://").rpartition(":")
    raw = socket.create_connection((host, int(port)), timeout=10.0)
    ready = READY + b"\x08Identity" + len(route).to_bytes(4, "big") + route
    raw.sendall(GREETING + b"\x06" + len(ready).to_bytes(8, "big") + ready)
    received = b""
    while len(received) < len(GREETING) + 2:
        more = raw.recv(4096)
        received += more
        if not more:
            raw.close()
            raise ConnectionError("the router does not speak with us")
    return raw


def accept(listening):
    """A connection of who dials, to whom we are a router."""
    raw, _ = listening.accept()
    raw.settimeout(10.0)
    ready = READY.replace(b"DEALER", b"ROUTER")
    raw.sendall(GREETING + b"\x04" + bytes([len(ready)]) + ready)
    num_left = len(GREETING) + len(READY)
    while num_left > 0:
        num_left -= len(raw.recv(num_left))
    return raw


def hang_up(raw):
    """Reset the connection at once, whatever is still under way."""
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    raw.close()
