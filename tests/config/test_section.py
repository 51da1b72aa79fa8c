"""What every section refuses: unknown keys, changes, numbers that are none, truth for numbers."""

import math

import pytest
from pydantic import ValidationError

from impala_async.config.section import Section


class Sample(Section):
    count: int = 1
    rate: float | None = 0.5
    is_on: bool = False
    sizes: tuple[int, ...] = (1, 2)


class Ruled(Sample):
    def broken_rules(self):
        if self.count > self.sizes[0]:
            yield "count is too large"
        if self.is_on and self.rate is None:
            yield "what is on has a rate"


def test_every_broken_rule_is_told():
    Ruled(is_on=True)
    with pytest.raises(ValidationError, match="count is too large\nwhat is on has a rate"):
        Ruled(count=2, is_on=True, rate=None)


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
def test_what_is_refused(settings):
    with pytest.raises(ValidationError):
        Sample(**settings)


def test_truth_for_a_number_is_named():
    with pytest.raises(ValidationError, match="wants a number, got true"):
        Sample(count=True)


def test_what_is_fine_stays_as_it_is():
    sample = Sample(count=3, rate=None, is_on=True, sizes=(4,))
    assert (sample.count, sample.rate, sample.is_on, sample.sizes) == (3, None, True, (4,))
    with pytest.raises(ValidationError):
        sample.count = 4
