"""A learner thread runs on the test's own, with its clock; torch's number of threads comes back."""

from collections.abc import Callable, Iterator

import pytest
import torch

from impala_async.learner.threads import learner_thread


class Clock:
    """Time that passes only when a script says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic

    def pass_s(self, seconds: float) -> Callable[[], None]:
        def step() -> None:
            self.now += seconds

        return step


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(learner_thread, "time", made)
    return made


@pytest.fixture(autouse=True)
def threads_of_torch() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)
