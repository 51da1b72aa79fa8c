"""A row for each seed and policy, and the numbers in it."""

import pytest

from impala_async.config.policies import ONE_POLICY, PoliciesSection
from impala_async.evaluation.play import Episode
from impala_async.evaluation.results import as_json, rows_of

PLAYED = [Episode(0, 0, 1.0, 4), Episode(0, 0, 3.0, 6), Episode(7, 0, 8.0, 2)]


def test_there_is_a_row_for_each_seed_and_one_for_all():
    rows = rows_of(PLAYED, ONE_POLICY)
    assert [(row.seed, row.policy, len(row.episodes)) for row in rows] == [
        *((0, None, 2), (7, None, 1), (None, None, 3)),
    ]
    first, second, whole = (row.describe("greedy").splitlines() for row in rows)
    assert first == [
        "seed 0: mean return of 2 greedy episodes: 2.00",
        "seed 0: smallest 1.00, largest 3.00, standard error 1.00",
    ]
    # One episode says nothing of how far its mean may be off.
    assert second[1] == "seed 7: smallest 8.00, largest 8.00, standard error -"
    assert whole[0] == "mean return of 3 greedy episodes: 4.00"


def test_one_seed_has_one_row():
    (only,) = rows_of(PLAYED[:2], ONE_POLICY)
    assert (only.seed, only.as_json()["mean_length"]) == (None, 5.0)


def test_as_json_there_is_each_episode_and_the_mean_of_all():
    found = as_json(PLAYED, ONE_POLICY)
    assert found["mean_return"] == 4.0
    assert found["standard_error"] == pytest.approx((13 / 3) ** 0.5)
    assert [row["seed"] for row in found["rows"]] == [0, 7, None]
    assert found["episodes"][1] == {"seed": 0, "policy": None, "return": 3.0, "length": 6}


def test_in_a_team_the_mean_is_that_of_those_who_learn():
    team = PoliciesSection(names=("main", "old"), copies={"old": "main"}, copy_every_updates=5)
    played = [Episode(0, 0, 1.0, 2), Episode(0, 1, 9.0, 2), Episode(0, 0, 2.0, 2)]
    found = as_json(played, team)
    assert found["mean_return"] == 1.5
    assert [(row["policy"], row["mean_return"]) for row in found["rows"]] == [
        *(("main", 1.5), ("old", 9.0)),
    ]
