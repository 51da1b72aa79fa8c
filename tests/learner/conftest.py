"""The loop that the learner runs on, fixtures around `tests.learner.server_harness`, and the clock
of a learner thread that runs on the test's own."""

from contextlib import ExitStack

import pytest
import torch
import uvloop

from impala_async.learner import learner_thread, stats
from tests.learner.server_harness import ServerHarness


def pytest_asyncio_loop_factories(config, item):
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
async def make_harness():
    """Makes servers with open slots, by the settings of a test, and closes them at its end."""
    with ExitStack() as stack:

        def make(**settings):
            made = ServerHarness(**settings)
            stack.callback(made.close)
            return made

        yield make


class Clock:
    """Time that passes only when a script says so."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now

    perf_counter = monotonic

    def pass_s(self, seconds):
        def step():
            self.now += seconds

        return step


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(learner_thread, "time", made)
    monkeypatch.setattr(stats, "time", made)
    return made


@pytest.fixture(autouse=True)
def threads_of_torch():
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)
