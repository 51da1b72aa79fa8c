"""Means of the updates of an interval: each one counts, and what is known stays known."""

import math

import pytest

from impala_async.metrics.means import UpdateMeans


def test_every_update_since_the_last_report_counts_and_then_no_more():
    means = UpdateMeans()
    assert means.take() == {}
    for loss in (1.0, 2.0, 6.0):
        means.add({"loss/total": loss}, 1)
    assert means.take() == {"loss/total": 3.0}
    # An interval without any has what was known last.
    assert means.take() == {"loss/total": 3.0}
    means.add({"loss/total": 10.0}, 1)
    assert means.take() == {"loss/total": 10.0}


def test_a_batch_counts_by_its_updates_and_a_statistic_by_those_that_have_it():
    means = UpdateMeans()
    means.add({"loss/total": 1.0, "user/x": 5.0}, 3)
    means.add({"loss/total": 5.0}, 1)
    assert means.take() == {"loss/total": 2.0, "user/x": 5.0}
    means.add({"loss/total": 4.0}, 1)
    assert means.take() == {"loss/total": 4.0, "user/x": 5.0}


def test_a_member_of_a_team_counts_by_its_own_updates():
    means = UpdateMeans()
    means.add({"loss/total": 1.0, "policies/a/loss/total": 1.0}, 4, {"policies/a/loss/total": 1})
    means.add({"loss/total": 2.0, "policies/a/loss/total": 2.0}, 4, {"policies/a/loss/total": 3})
    means.add({"policies/a/loss/total": 9.0}, 4, {"policies/a/loss/total": 0})
    assert means.take() == {"loss/total": 1.5, "policies/a/loss/total": 1.75}


def test_settings_are_those_of_now():
    means, names = UpdateMeans(), ("algorithm/lr", "policies/a/algorithm/lr")
    for lr in (3.0, 2.0, 1.0):
        means.add(dict.fromkeys(names, lr), 1)
    assert means.take() == dict.fromkeys(names, 1.0)


def test_what_is_not_finite_hides_nothing():
    means = UpdateMeans()
    means.add({"loss/total": 1.0, "user/x": math.nan, "user/y": math.inf}, 1)
    means.add({"loss/total": 3.0, "user/x": 7.0, "user/y": math.inf}, 1)
    assert means.take() == {"loss/total": 2.0, "user/x": 7.0, "user/y": math.inf}


def test_skipped_updates_are_told_while_no_other_is_made():
    """A report of nothing but failures must not look like one of the good days before."""
    means = UpdateMeans()
    means.add({"loss/total": 2.0}, 1)
    means.add({"loss/total": math.nan}, 0)
    assert means.take() == {"loss/total": 2.0}
    means.add({"loss/total": math.nan}, 0)
    assert means.take() == pytest.approx({"loss/total": math.nan}, nan_ok=True)
