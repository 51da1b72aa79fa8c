"""The summary: every key that others read, and quantiles of a histogram."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from impala_async.metrics.names import DROP_REASONS
from impala_async.metrics.report import ADVICE
from impala_async.runs.summary import describe, lag_quantiles, summarise
from tests.learner.columns import small_schema
from tests.learner.server_harness import config_of

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
        "verdict": "learner: busy",
    }
    config = config or config_of(small_schema(), env={"id": env_id})
    return summarise(config, REPORT, **{**arguments, **changes})


def test_a_summary_has_what_others_read():
    summary = summary_of()
    told = {
        "env_steps_trained": 900,
        "updates": 9,
        "wall_s": 4.0,
        "run_s": 5.5,
        "env_steps_per_s": 150.0,
        "frames_per_s": 150.0,
        "mean_return": 475.5,
        "mean_return_100": 475.5,
        "episodes": 12,
        "lag_quantiles": [0, 0, 0, 1, 1],
        "dropped": {"stale": 0, "nonfinite_update": 1, "shutdown": 2},
        "rejected": 3,
        "starved_total_s": 0.25,
        "bottleneck": "learner: busy",
        "advice": ADVICE["learner"],
        "exit_reason": "env_steps",
        "num_actors": 2,
    }
    assert {key: summary[key] for key in told} == told
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    assert summary_of("ALE/Pong-v5")["frames_per_s"] == 600.0
    # Without an update there is no rate.
    summary = summary_of(wall_s=0.0, env_steps_since=0, lag_histogram=[], mean_return=None)
    none = {"env_steps_per_s": 0.0, "lag_quantiles": [], "mean_return_100": None}
    assert {key: summary[key] for key in none} == none
    assert summary["mean_return"] == 1.5


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


def test_a_summary_in_one_line():
    summary = summary_of() | {"env_steps_trained": 123456, "updates": 1234}
    assert describe(summary) == (
        "ended (env_steps) after 123,456 env steps and 1,234 updates, mean return 476 (12 episodes)"
    )
    assert describe(summary | {"mean_return": None, "episodes": 0}).endswith(", mean return -")


@given(st.lists(st.integers(0, 6), max_size=60))
def test_quantiles_are_values_that_occurred(lags):
    ordered = sorted(lags)
    places = [round(q / 100 * (len(lags) - 1)) for q in (0, 10, 50, 90, 100)]
    got = lag_quantiles(np.bincount(lags, minlength=9).tolist())
    assert got == [ordered[place] for place in places if lags]
    assert lag_quantiles([]) == []
