"""What passes between the learner thread and the loop."""

from impala_async.learner.channels import LearnerReport, Progress
from impala_async.weights import Version


def test_progress_names_its_version_and_before_any_reading_nothing_else_is_known() -> None:
    progress = Progress(3, update=7, env_steps_trained=900)
    assert progress.version == Version(3, 7)
    assert LearnerReport(progress) == (progress, None, None, {}, ())
