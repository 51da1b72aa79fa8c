import pytest

from impala_async.actor.refusals import tell_refusals
from impala_async.wire.messages import VERDICTS, Grant


def test_numbers_that_are_none_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    refused = [[seq, VERDICTS.index(why)] for seq, why in enumerate(("stale", "nonfinite") * 2)]
    tell_refusals(Grant(bytes(16), 0, 0, 0, 0, refused), "told:Once")
    (line,) = caplog.messages
    assert line.startswith("the learner refuses trajectories of told:Once: an observation, a")
