"""The summary: every key that others read, and quantiles of a histogram."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from impala_async.learner.loop.ledger import DROP_REASONS
from impala_async.metrics.verdict import ADVICE, Verdict
from impala_async.runs.summary import describe, lag_quantiles, summarise
from tests.learner.columns import small_schema
from tests.learner.server_harness import config_of

CONTRACT = {
    *("env_steps_trained", "updates", "wall_s", "env_steps_per_s", "mean_return_100"),
    *("lag_quantiles", "dropped", "bottleneck", "exit_reason", "num_actors"),
}
REPORT = {
    "env_steps_trained": 900,
    "updates": 9,
    "time_s": 5.5,
    "mean_return": 1.5,
    "episodes/count": 12,
    "trajectories/rejected": 3,
    "learner/starved_total_s": 0.25,
    "num_actors": 2,
    **{f"dropped/{reason}": number for number, reason in enumerate(DROP_REASONS)},
}


def summary_of(env_id="tests:None", config=None, **changes):
    arguments = {
        "exit_reason": "env_steps",
        "wall_s": 4.0,
        "env_steps_since": 600,
        "lag_histogram": [1, 1],
        "mean_return": 475.5,
        "verdict": Verdict("learner", "busy"),
    }
    config = config or config_of(small_schema(), env={"id": env_id})
    return summarise(config, REPORT, **{**arguments, **changes})


def test_a_summary_has_what_others_read():
    summary = summary_of()
    assert summary.keys() >= CONTRACT
    assert summary["env_steps_per_s"] == 150.0
    assert summary["dropped"] == {"stale": 0, "nonfinite_update": 1, "shutdown": 2}
    assert summary["mean_return_100"] == 475.5
    assert summary["exit_reason"] == "env_steps"
    assert summary["bottleneck"] == "learner: busy"
    assert summary["advice"] == ADVICE["learner"]
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary


@pytest.mark.parametrize(
    ("schedule", "end", "since"),
    [(None, None, None), (900, None, None), (800, None, 800), (800, 850, 800), (800, 800, None)],
)
def test_steps_at_a_rate_of_0_are_told(schedule, end, since):
    """Not those that the last batch of a run is beyond its end."""
    rates = {"lr_end": 0.0, "schedule_env_steps": schedule} if schedule else {}
    config = config_of(small_schema(), algorithm=rates, stop={"env_steps": end})
    summary = summary_of(config=config)
    assert summary["lr_is_0_since"] == since
    assert ("nothing was learned after env step 800" in describe(summary)) == (since == 800)


def test_frames_are_as_many_as_each_step_takes():
    assert summary_of()["frames_per_s"] == 150.0
    assert summary_of("ALE/Pong-v5")["frames_per_s"] == 600.0


def test_a_summary_in_one_line():
    summary = summary_of() | {"env_steps_trained": 123456, "updates": 1234}
    assert describe(summary) == (
        "ended (env_steps) after 123,456 env steps and 1,234 updates, mean return 476 (12 episodes)"
    )
    assert describe(summary | {"mean_return": None, "episodes": 0}).endswith(", mean return -")


def test_a_run_without_an_update_has_no_rate():
    summary = summary_of(wall_s=0.0, env_steps_since=0, lag_histogram=[], mean_return=None)
    assert summary["env_steps_per_s"] == 0.0
    assert summary["lag_quantiles"] == []
    assert summary["mean_return_100"] is None
    assert summary["mean_return"] == 1.5


@pytest.mark.parametrize(
    ("histogram", "quantiles"),
    [
        ([], []),
        ([0, 0], []),
        ([3], [0, 0, 0, 0, 0]),
        ([0, 0, 5], [2, 2, 2, 2, 2]),
        ([1, 0, 0, 1], [0, 0, 0, 3, 3]),
        ([90, 9, 0, 1], [0, 0, 0, 0, 3]),
        ([10, 80, 11], [0, 1, 1, 2, 2]),
    ],
)
def test_quantiles_of_a_histogram(histogram, quantiles):
    assert lag_quantiles(histogram) == quantiles


@given(st.lists(st.integers(0, 6), min_size=1, max_size=60))
def test_quantiles_are_values_that_occurred(lags):
    got = lag_quantiles(np.bincount(lags).tolist())
    ordered = sorted(lags)
    places = [round(q / 100 * (len(lags) - 1)) for q in (0, 10, 50, 90, 100)]
    assert got == [ordered[place] for place in places]
