"""Real sockets are closed after each test."""

from collections.abc import Iterator

import pytest

from impala_async.wire.session import SessionTable
from tests.wire.ends import Ends
from tests.wire.tables import new_table


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.close()


@pytest.fixture
def table() -> SessionTable:
    return new_table()
