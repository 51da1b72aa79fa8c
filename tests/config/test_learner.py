"""The learner's limits: what is refused."""

from impala_async.config.learner import LearnerSection
from tests.config.test_run import complaint


def test_what_is_stuck_is_shown_before_it_is_ended():
    LearnerSection(stuck_dump_s=2, stuck_end_s=2.5)
    said = complaint(learner__stuck_dump_s=60.0)
    assert "learner: stuck_dump_s (60.0) must be below stuck_end_s (60.0)" in said
