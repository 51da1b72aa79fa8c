"""Every test of an engine gets a run folder of its own."""

import pytest

from tests.e2e import harness


@pytest.fixture
def site(tmp_path):
    with harness.site(tmp_path / "site") as opened:
        yield opened
