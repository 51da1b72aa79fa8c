"""Real sockets are closed after each test."""

from collections.abc import Iterator

import pytest

from tests.wire.ends import Ends


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.close()
