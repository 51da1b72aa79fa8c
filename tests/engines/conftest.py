"""Every test of an engine gets a run folder of its own, and none may be skipped where all engines
are to be here."""

import os

import pytest

from tests.e2e import harness


@pytest.fixture
def site(tmp_path):
    with harness.site(tmp_path / "site") as opened:
        yield opened


def pytest_sessionfinish(session):
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("ENGINES") == "required" and reporter.stats.get("skipped"):
        reporter.write_line("\nan engine is missing: its tests were skipped, with the reason below")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
