"""The relay begins at an address that is free, and ends when it is told to."""

import logging
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from impala_async.errors import ConfigError
from impala_async.interrupts import REQUESTS
from impala_async.relay.service import RelayService

NOBODY = "tcp://127.0.0.1:1"
ANY_PORT = "tcp://127.0.0.1:*"


@pytest.fixture
def signals() -> Iterator[None]:
    """Whatever takes them over gives them back."""
    before = {number: signal.getsignal(number) for number in REQUESTS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
@pytest.mark.usefixtures("signals")
def test_a_signal_ends_it(
    number: signal.Signals, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    service = RelayService(NOBODY, ANY_PORT)
    folder = Path(service._link.nonce_path).parent
    service._on_signal(number, None)
    assert service.run() == code
    assert not folder.exists()
    assert re.search(r"start actors with --learner tcp://127.0.0.1:\d+ ", caplog.text)
    assert "0 actors; messages: 0 up" in caplog.text
    with pytest.raises(KeyboardInterrupt):
        service._on_signal(signal.SIGINT, None)


def test_an_address_that_is_taken_is_a_setting_that_is_wrong() -> None:
    first = RelayService(NOBODY, ANY_PORT)
    try:
        with pytest.raises(ConfigError, match=r"--bind: cannot listen on .* in use"):
            RelayService(NOBODY, first._data.url)
    finally:
        first._close()


def test_an_address_that_others_reach_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    RelayService(NOBODY, "tcp://0.0.0.0:*")._close()
    assert "neither encrypted nor authenticated" in caplog.text
