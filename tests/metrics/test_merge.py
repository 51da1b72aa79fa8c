"""Reports of several ranks as one: accounts add up, and the slowest rank says what limits it."""

import pytest

from impala_async.metrics.merge import EXCEPTIONS, OF_SECTIONS, RULES, merge_ranks
from impala_async.metrics.names import REGISTRY, SECTIONS
from impala_async.metrics.report import BATCH_WAIT_MS, RANK_WAIT_MS, UPDATE_MS, assemble


def report(**changes):
    timers = {UPDATE_MS: 10.0, BATCH_WAIT_MS: 1.0, "num_actors": 2, "updates": 5}
    return assemble(timers | {"learner/starved_since_s": None} | changes)


def test_every_metric_has_a_rule():
    assert RULES.keys() == REGISTRY.keys()
    assert OF_SECTIONS.keys() == SECTIONS.keys()
    assert EXCEPTIONS.keys() <= REGISTRY.keys()


def test_accounts_are_sums_and_progress_is_that_of_all():
    first = report(**{"trajectories/received": 10, "lag/max": 4, "lag/mean": 1.0, "time_s": 3.0})
    second = report(**{"trajectories/received": 7, "lag/max": 9, "lag/mean": 2.0, "time_s": 9.0})
    merged = merge_ranks([first, second])
    assert merged["trajectories/received"] == 17
    assert (merged["lag/max"], merged["lag/mean"]) == (9, 1.5)
    assert (merged["updates"], merged["time_s"], merged["num_actors"]) == (5, 3.0, 4)
    assert merged["ranks/num_actors"] == [2, 2]
    assert merged["trajectories/trained"] is None
    assert merged.keys() == first.keys()


def test_returns_are_those_of_all_episodes():
    many = report(**{"episodes/count": 1000, "mean_return": 200.0})
    one = report(**{"episodes/count": 1, "mean_return": 99.0})
    none = report(**{"episodes/count": 0, "mean_return": None})
    for merged, expected in (
        (merge_ranks([many, one, none]), (100 * 200.0 + 99.0) / 101),
        (merge_ranks([many, many]), 200.0),
        (merge_ranks([none, one]), 99.0),
        (merge_ranks([none, none]), None),
    ):
        assert merged["mean_return"] == expected


def test_what_only_one_has_is_not_lost():
    died = report(**{"actor/last_death": "EnvError: it broke", "trajectories/received": 3})
    merged = merge_ranks([report(), died])
    assert merged["actor/last_death"] == "EnvError: it broke"
    assert merged["trajectories/received"] == 3


def test_the_rank_that_waits_for_batches_is_named_with_its_own_reason():
    busy = report(**{RANK_WAIT_MS: 90.0, "actor/act_time_ms": 50.0})
    assert busy["bottleneck"] == "ranks: the learner waits 89 % of its time for other ranks"
    slow = report(**{BATCH_WAIT_MS: 90.0, "actor/env_time_ms": 40.0, "actor/act_time_ms": 10.0})
    merged = merge_ranks([busy, slow])
    assert merged["bottleneck"] == (
        "environment: the learner waits 90 % of its time for batches, an actor spends 80 % of its "
        "time in environment steps (rank 1)"
    )
    assert "more actors" in merged["advice"]
    assert merged["ranks/batch_wait_ms"] == [1.0, 90.0]


def test_a_rank_without_actors_is_said_to_have_none_whatever_others_have():
    starved = report(**{"learner/starved_since_s": 2.0, "num_actors": 0, "time_s": 12.0})
    merged = merge_ranks([report(time_s=12.0), starved])
    assert merged["num_actors"] == 2
    assert merged["bottleneck"].startswith("actors: the learner has had no batch for 10 s, none")
    assert merged["bottleneck"].endswith("(rank 1)")


@pytest.mark.parametrize("values", [(3, 5), (None, 5), (3, None)])
def test_the_wait_that_began_first_is_that_of_the_run(values):
    ranks = [report(**{"learner/starved_since_s": value}) for value in values]
    expected = min(value for value in values if value is not None)
    assert merge_ranks(ranks)["learner/starved_since_s"] == expected


def test_what_other_ranks_actors_do_is_not_the_reason_of_the_slowest():
    hangs = report(**{"actor/hang": "environments of actor 0 hang", RANK_WAIT_MS: 50.0})
    slow = report(**{BATCH_WAIT_MS: 90.0, "actor/env_time_ms": 40.0})
    merged = merge_ranks([hangs, slow])
    assert merged["actor/hang"] == "environments of actor 0 hang"
    assert merged["bottleneck"].startswith("environment: ")


def test_refusals_of_earlier_starts_are_not_the_reason_of_now():
    refused = {"trajectories/received": 100, "trajectories/rejected": 90, "rejected/stale": 90}
    waits = {BATCH_WAIT_MS: 90.0, "actor/env_time_ms": 40.0}
    first = merge_ranks([report(**waits), report(**waits, **refused)])
    assert first["bottleneck"].startswith("environment: ")
    more = {name: 2 * count for name, count in refused.items()}
    then = merge_ranks([report(**waits), report(**waits, **more)], first)
    assert then["bottleneck"].startswith("rejections: 90 % of what arrived was refused")
