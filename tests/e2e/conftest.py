"""Every end-to-end test gets a site of its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e import harness


@pytest.fixture
def site(tmp_path: Path) -> Iterator[harness.Site]:
    with harness.site(tmp_path) as opened:
        yield opened
