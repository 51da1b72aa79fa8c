"""The loop that the learner runs on, and fixtures around `tests.learner.world`."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import ExitStack
from typing import Any

import pytest
import uvloop

from tests.learner.world import Harbour


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
async def make_harbour() -> AsyncIterator[Callable[..., Harbour]]:
    """Makes fronts with open slots, by the settings of a test, and closes them at its end."""
    with ExitStack() as stack:

        def make(*args: Any, **settings: Any) -> Harbour:
            made = Harbour(*args, **settings)
            stack.callback(made.close)
            return made

        yield make
