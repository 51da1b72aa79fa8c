"""What an update came to."""

import torch

from impala_async.training.result import StepResult, mean_stats


def test_it_is_applied_if_any_update_was_taken():
    nobody = torch.zeros(2, dtype=torch.bool)
    assert StepResult(2, 10, nobody, {}).applied
    assert not StepResult(0, 10, ~nobody, {}).applied


def test_means_are_over_all():
    assert mean_stats([{"a": 1.0, "b": 2.0}, {"a": 3.0, "b": 6.0}]) == {"a": 2.0, "b": 4.0}
    one = {"a": 0.1}
    assert mean_stats([one]) is one
