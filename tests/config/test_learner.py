"""What follows from the learner's limits."""

import pytest

from impala_async.config.learner import LearnerSection


@pytest.mark.parametrize(
    ("lease_s", "heartbeat_s", "starved_after_s"), [(1, 0.2, 0.5), (10, 2, 5), (1e9, 2, 5)]
)
def test_what_follows_a_lease(lease_s, heartbeat_s, starved_after_s):
    learner = LearnerSection(lease_s=lease_s)
    assert (learner.heartbeat_s, learner.starved_after_s) == (heartbeat_s, starved_after_s)
