"""What every section refuses: unknown keys, changes, numbers that are none, truth for numbers."""

import math
from typing import Any

import pytest
from pydantic import ValidationError

from impala_async.config_section import Section


class Sample(Section):
    count: int = 1
    rate: float | None = 0.5
    is_on: bool = False
    sizes: tuple[int, ...] = (1, 2)


@pytest.mark.parametrize(
    "settings",
    [
        {"cuont": 1},
        {"rate": math.nan},
        {"rate": math.inf},
        {"count": True},
        {"rate": False},
        {"count": [True]},
    ],
)
def test_what_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Sample(**settings)


def test_truth_for_a_number_is_named() -> None:
    with pytest.raises(ValidationError, match="wants a number, got true"):
        Sample(count=True)


def test_what_is_fine_stays_as_it_is() -> None:
    sample = Sample(count=3, rate=None, is_on=True, sizes=(4,))
    assert (sample.count, sample.rate, sample.is_on, sample.sizes) == (3, None, True, (4,))
    with pytest.raises(ValidationError):
        sample.count = 4  # type: ignore[misc]
