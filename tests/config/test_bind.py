"""Where a learner listens: what is refused, and what is warned of."""

import pytest

from impala_async.config.bind import is_loopback
from tests.config.test_run import complaint, config_of


@pytest.mark.parametrize(
    ("data", "weights", "is_fine"),
    [
        ("127.0.0.1:5000", "127.0.0.1:5000", False),
        ("127.0.0.1:5556", None, False),
        ("0.0.0.0:5000", "10.0.0.1:5000", False),
        ("10.0.0.1:5000", "*:5000", False),
        ("[::]:5000", "[::1]:5000", False),
        ("10.0.0.1:5000", "10.0.0.2:5000", True),
        ("127.0.0.1:5000", "127.0.0.1:5001", True),
        ("127.0.0.1:*", "127.0.0.1:*", True),
        ("*:*", "*:*", True),
    ],
)
def test_each_socket_has_a_port_of_its_own(data, weights, is_fine):
    settings = {"bind__data": f"tcp://{data}"}
    if weights is not None:
        settings["bind__weights"] = f"tcp://{weights}"
    if is_fine:
        config_of(**settings)
        return
    (line,) = complaint(**settings).splitlines()
    assert line == (
        f"config: bind: data and weights each need a port of their own, got tcp://{data} and "
        f"tcp://{weights or '127.0.0.1:5556'}"
    )


def test_an_ipv6_address_stands_in_brackets():
    config_of(bind__data="tcp://[fe80::1%eth0]:5555", bind__weights="tcp://[::]:*")
    text = complaint(bind__data="tcp://::1:5555")
    assert "bind.data: wants tcp://HOST:PORT" in text
    assert "an IPv6 address stands in brackets, as in tcp://[::1]:5555" in text
    assert "IPv6" not in complaint(bind__data="tcp://host")


@pytest.mark.parametrize(
    ("value", "meant"),
    [
        (5555, "tcp://127.0.0.1:5555"),
        ("5555", "tcp://127.0.0.1:5555"),
        ("localhost:5555", "tcp://localhost:5555"),
        ("*:5555", "tcp://*:5555"),
        ("70000", None),
        ({"port": 1}, None),
    ],
)
def test_what_is_nearly_an_address_is_told_as_one(value, meant):
    text = complaint(bind__data=value)
    assert "bind.data: wants tcp://HOST:PORT, or tcp://HOST:* for any free port, got " in text
    assert text.endswith(f"; did you mean {meant}?") == (meant is not None)


def test_open_doors_are_warned_of():
    warnings = config_of(
        bind__data="tcp://0.0.0.0:5555", bind__weights="tcp://10.0.0.1:*"
    ).warnings()
    assert [warning.split(" ")[0] for warning in warnings] == ["bind.data", "bind.weights"]
    assert all("trust" in warning for warning in warnings)


def test_half_an_open_door_is_warned_of():
    first, *_ = config_of(bind__data="tcp://0.0.0.0:5555").warnings()
    assert first.endswith("actors of other hosts must reach both")


@pytest.mark.parametrize(
    ("host", "is_ours"),
    [
        *(("127.0.0.1", True), ("127.9.9.9", True), ("localhost", True), ("[::1]", True)),
        *(("0.0.0.0", False), ("*", False), ("[::]", False), ("10.0.0.1", False)),
        ("example.org", False),
    ],
)
def test_loopback(host, is_ours):
    assert is_loopback(f"tcp://{host}:5555") == is_ours
