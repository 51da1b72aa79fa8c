"""Real sockets are closed after each test."""

import pytest

from tests.wire.ends import Ends
from tests.wire.tables import new_table


@pytest.fixture
def ends():
    ends = Ends()
    yield ends
    ends.close()


@pytest.fixture
def table():
    return new_table()
