"""The learner's limits, and where it listens: some are refused, and of some we warn."""

from impala_async.config.learner import LearnerSection
from impala_async.config.warnings import warnings_of
from tests.config.made import complaint, config_of


def test_what_follows_a_lease():
    for lease_s, *expected in ((1, 0.2, 0.5), (10, 2, 5), (1e9, 2, 5)):
        learner = LearnerSection(lease_s=lease_s)
        assert [learner.heartbeat_s, learner.starved_after_s] == expected


def test_what_is_nearly_an_address_is_told_as_one():
    for value, meant in (
        ("5555", "tcp://127.0.0.1:5555"),
        ("'5555'", "tcp://127.0.0.1:5555"),
        ("localhost:5555", "tcp://localhost:5555"),
        ("*:5555", "tcp://*:5555"),
        ("h:70000", None),
        ("tcp://::1:5555", None),
    ):
        text = complaint(f"bind.data={value}")
        assert "bind.data: wants tcp://HOST:PORT, or tcp://HOST:* for any free port, where" in text
        assert text.endswith(f"; did you mean {meant}?") == (meant is not None)


def test_what_is_no_address_is_refused():
    for url in (
        *("ipc:///tmp/x", "tcp://:5555", "tcp://host", "tcp://host:", "tcp://host:0"),
        *("tcp://host:65536", "tcp://host:x", "tcp://host:-1", "tcp://h:²", "tcp://h:٣"),
        *("tcp://h:1.5", "udp://h:5", "tcp://[::1:5", "tcp://[h]:5", "tcp://[]:5", "tcp://a b:5"),
        *("tcp://tcp://h:5", "tcp://h/x:5"),
    ):
        assert "wants tcp://HOST:PORT" in complaint(bind={"weights": url})
    for url in ("tcp://h.example:1", "tcp://[::1]:65535", "tcp://[fe80::1%eth0]:5", "tcp://*:*"):
        assert config_of(bind={"weights": url}).bind.weights == url


def test_a_host_is_one_that_can_be_dialled():
    for host in ("*", "0.0.0.0", "[::]", "::1", "tcp://h", "h:5", "", "a b", "h/x"):
        text = complaint(bind={"host": host})
        assert "bind.host: wants the name or the address by which other hosts know this" in text
        assert text.endswith(f"got {host!r}")
    for host in ("learner", "node-7.cluster.local", "10.0.0.7", "[fe80::1%ib0]", None):
        bind = {"host": host, "data": "tcp://0.0.0.0:1", "weights": "tcp://*:2"}
        assert config_of(bind=bind).bind.host == host


def test_a_host_for_others_goes_with_addresses_that_others_reach():
    for bind in ({}, {"data": "tcp://0.0.0.0:1"}, {"weights": "tcp://0.0.0.0:1"}):
        text = complaint(bind={"host": "learner", **bind})
        assert "bind: host (learner) is for other hosts, which do not reach tcp://" in text


def test_open_doors_are_warned_of_where_they_have_no_key():
    for data, weights, told in (
        ("0.0.0.0:5555", "localhost:1", "tcp://0.0.0.0:5555"),
        ("*:1", "[::]:2", "tcp://*:1 and tcp://[::]:2"),
        ("127.0.0.1:1", "example.org:*", "tcp://example.org:*"),
        ("127.9.9.9:1", "[::1]:2", None),
    ):
        bind = f"bind.data=tcp://{data} bind.weights=tcp://{weights}"
        is_half = told is not None and " and " not in told
        warnings = [warnings_of(config_of(f"{bind}{off}")) for off in ("", " bind.encrypt=off")]
        assert [len(each) for each in warnings] == [is_half, is_half + (told is not None)]
        # Actors of other hosts would take weights from a port that is not theirs to reach.
        assert all(
            f"other hosts reach {told} and not tcp://" in each[0] for each in warnings if is_half
        )
        warnings = warnings[1][is_half:]
        for warning in warnings:
            assert warning.startswith(f"bind: other hosts reach {told}, and")
