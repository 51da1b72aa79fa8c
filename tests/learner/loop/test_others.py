"""The reports of other ranks reach rank 0, the last ones too."""

import asyncio
import json

import pytest

from impala_async.config.ranks import Place
from impala_async.errors import ConfigError, RankError
from impala_async.learner.loop.others import OtherRanks
from tests.learner.columns import small_schema


class Said:
    """Ranks of which the others say what the test decides."""

    are_many = True

    def __init__(self, number, *others):
        self.place, self.others, self.heard = Place(number, 1 + len(others)), others, []

    def gather(self, own):
        self.heard.append(own)
        if None in self.others:
            raise RankError("another rank has ended")
        return [own, *self.others] if self.place.is_first else [*self.others, own]


def other(spaces=None, **accounts):
    """The word of another rank when all meet."""
    return json.dumps({"url": "tcp://b:2", "spaces": spaces, "accounts": accounts}).encode()


def test_addresses_are_those_of_all_in_their_order():
    ranks = OtherRanks(Said(0, other()))
    assert asyncio.run(ranks.meet("tcp://a:1", None, {})) == ["tcp://a:1", "tcp://b:2"]


def test_environments_that_are_not_alike_are_told():
    ranks = OtherRanks(Said(0, other(spaces="00")))
    with pytest.raises(ConfigError, match=r'spaces is "[0-9a-f]+" at rank 0, and "00" at rank 1'):
        asyncio.run(ranks.meet("tcp://a:1", small_schema(), {}))


def test_until_a_rank_reports_its_accounts_are_those_with_which_it_begins():
    first, second = OtherRanks(Said(0, other(updates=7))), OtherRanks(Said(1, other(updates=5)))
    for ranks in (first, second):
        asyncio.run(ranks.meet("tcp://a:1", None, {"updates": 6}))
    assert first.reports == [{"updates": 7}]
    # Rank 0 may ask for its report before there is any.
    assert (second.newest, second.reports) == ([b'{"updates": 6}'], ())


def test_rank_0_writes_its_last_report_when_it_has_those_of_others():
    said = Said(0, b'{"updates": 7}')
    ranks = OtherRanks(said)
    seen = []
    found = asyncio.run(ranks.report_last(lambda: seen.append(ranks.reports) or {"updates": 8}))
    assert (found, seen) == ({"updates": 8}, [[{"updates": 7}]])


def test_others_say_what_they_have_written_last():
    said = Said(1, b"{}")
    ranks = OtherRanks(said)

    def report():
        ranks.write({"updates": 9, "advice": None})
        return {"updates": 9}

    assert asyncio.run(ranks.report_last(report)) == {"updates": 9}
    assert said.heard == [b'{"updates": 9, "advice": null}']
    assert ranks.reports == ()


@pytest.mark.parametrize("number", [0, 1])
def test_a_rank_that_is_gone_at_the_end_does_not_take_the_report_with_it(number, caplog):
    ranks = OtherRanks(Said(number, None))
    ranks.take([b'{"updates": 5}'])
    assert asyncio.run(ranks.report_last(lambda: {"updates": 8})) == {"updates": 8}
    assert ranks.reports == [{"updates": 5}]
    assert "the last report lacks what other ranks did" in caplog.text
