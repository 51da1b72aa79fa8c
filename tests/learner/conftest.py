"""The loop that the learner runs on, and fixtures around `tests.learner.server_harness`."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import ExitStack
from typing import Any

import pytest
import uvloop

from tests.learner.server_harness import ServerHarness


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
async def make_harness() -> AsyncIterator[Callable[..., ServerHarness]]:
    """Makes servers with open slots, by the settings of a test, and closes them at its end."""
    with ExitStack() as stack:

        def make(*args: Any, **settings: Any) -> ServerHarness:
            made = ServerHarness(*args, **settings)
            stack.callback(made.close)
            return made

        yield make
