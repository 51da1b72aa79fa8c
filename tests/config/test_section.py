"""What every section refuses: unknown keys, changes, broken rules, truth for numbers."""

import math

import pytest
from pydantic import ValidationError

from impala_async.config.section import Section


class Sample(Section):
    count: int = 1
    rate: float | None = 0.5
    is_on: bool = False
    sizes: tuple[int, ...] = (1, 2)

    def broken_rules(self):
        if self.count > 5:
            yield "count is too large"
        yield from self.idle("rate", "is_on", str(self.is_on), ["True"])


def test_every_broken_rule_is_told():
    Sample(is_on=True, rate=0.1)
    says = "count is too large\nrate \\(0.1\\) does nothing where is_on is False: drop it, or set"
    with pytest.raises(ValidationError, match=says):
        Sample(count=6, rate=0.1)


def test_what_is_refused():
    for settings in (
        *({"cuont": 1}, {"rate": math.nan}, {"rate": math.inf}, {"count": True}, {"rate": False}),
        *({"is_on": 1}, {"is_on": "yes"}, {"sizes": [True]}, {"count": [True]}),
    ):
        with pytest.raises(ValidationError):
            Sample(**settings)


def test_what_is_fine_stays_as_it_is():
    sample = Sample(count=3, rate=None, is_on=True, sizes=(4,))
    assert (sample.count, sample.rate, sample.is_on, sample.sizes) == (3, None, True, (4,))
    with pytest.raises(ValidationError):
        sample.count = 4
