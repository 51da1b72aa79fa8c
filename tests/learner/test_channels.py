"""What passes between the learner thread and the loop."""

from impala_async.learner.channels import LearnerReport, Progress
from impala_async.weights import Version


def test_progress_names_the_version_that_it_is_at() -> None:
    assert Progress(3, update=7, env_steps_trained=900).version == Version(3, 7)


def test_before_any_reading_there_is_one_that_says_so() -> None:
    report = LearnerReport.before_any(Progress(2, update=5))
    assert report.progress == Progress(2, update=5)
    assert (report.starved_at, report.first_update) == (None, None)
    assert (report.metrics, report.lag_histogram) == ({}, [])
