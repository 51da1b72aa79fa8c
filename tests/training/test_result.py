"""What an update came to."""

import math
from typing import Any

import torch

from impala_async.training.result import Outcome, StepResult, mean_stats, names_not_finite


def test_it_is_applied_if_any_update_was_taken():
    nobody = torch.zeros(2, dtype=torch.bool)
    assert StepResult(2, 10, nobody, {}).applied
    assert not StepResult(0, 10, ~nobody, {}).applied


def test_means_are_over_all():
    assert mean_stats([{"a": 1.0, "b": 2.0}, {"a": 3.0, "b": 6.0}]) == {"a": 2.0, "b": 4.0}
    one = {"a": 0.1}
    assert mean_stats([one]) is one


def test_what_failed_is_named_once_and_what_was_taken_is_not():
    nothing: Any = None
    outcomes = [
        Outcome(nothing, is_applied, num_valid, nothing, stats)
        for is_applied, num_valid, stats in [
            (True, 3, {"loss/value": 1.0}),
            (False, 0, {"loss/value": math.nan}),
            (False, 3, {"loss/value": math.inf, "grad/norm": math.nan, "loss/policy": 1.0}),
            (False, 3, {"loss/value": math.nan}),
        ]
    ]
    assert names_not_finite(outcomes) == ("loss/value", "grad/norm")
    assert names_not_finite([Outcome(nothing, False, 3, nothing, {"grad/norm": 1.0})]) == (
        "weights",
    )
