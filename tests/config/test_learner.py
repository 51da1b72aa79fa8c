"""What follows from the learner's limits, and where it listens: what is refused and warned of."""

import pytest

from impala_async.config.learner import LearnerSection
from tests.config.made import complaint, config_of


@pytest.mark.parametrize(
    ("lease_s", "heartbeat_s", "starved_after_s"), [(1, 0.2, 0.5), (10, 2, 5), (1e9, 2, 5)]
)
def test_what_follows_a_lease(lease_s, heartbeat_s, starved_after_s):
    learner = LearnerSection(lease_s=lease_s)
    assert (learner.heartbeat_s, learner.starved_after_s) == (heartbeat_s, starved_after_s)


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
    assert complaint(**settings) == (
        f"config: bind: data and weights each need a port of their own, got tcp://{data} and "
        f"tcp://{weights or '127.0.0.1:5556'}"
    )


def test_an_ipv6_address_stands_in_brackets():
    config_of(bind__data="tcp://[fe80::1%eth0]:5555", bind__weights="tcp://[::]:*")
    text = complaint(bind__data="tcp://::1:5555")
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


@pytest.mark.parametrize(
    ("data", "weights", "told"),
    [
        ("0.0.0.0:5555", "10.0.0.1:*", ["bind.data =", "bind.weights ="]),
        ("0.0.0.0:5555", "localhost:1", ["bind.data (tcp://0.0.0.0:5555)", "bind.data ="]),
        ("*:1", "[::]:2", ["bind.data =", "bind.weights ="]),
        ("example.org:1", "10.0.0.1:2", ["bind.data =", "bind.weights ="]),
        ("127.9.9.9:1", "[::1]:2", []),
    ],
)
def test_open_doors_are_warned_of(data, weights, told):
    urls = {"bind__data": f"tcp://{data}", "bind__weights": f"tcp://{weights}"}
    warnings = config_of(**urls).warnings()
    assert len(warnings) == len(told)
    for warning, start in zip(warnings, told, strict=True):
        assert warning.startswith(start)
        assert warning.endswith("must reach both" if "(" in start else "that you trust")
