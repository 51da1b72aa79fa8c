"""Every end-to-end test gets a site of its own."""

import pytest

from tests.e2e import harness


@pytest.fixture
def site(tmp_path):
    with harness.site(tmp_path) as opened:
        yield opened
