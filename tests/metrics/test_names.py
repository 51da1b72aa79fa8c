"""The registry: what a report promises is in it, once, with a unit and a meaning."""

import re
from itertools import product

import pytest

from impala_async.metrics.names import (
    ALIASES,
    REGISTRY,
    SECTIONS,
    is_of_update,
    markdown_table,
    numbers,
    undeclared,
)
from impala_async.metrics.window import WindowStat

PROMISED = """
    time_s env_steps_trained updates env_steps_per_s mean_return_100 num_actors bottleneck
    trajectories/{received,admitted,rejected,trained,dropped,in_slots}
    rejected/{duplicate,invalid,nonfinite,unknown_session,stale,dead_branch}
    dropped/{stale,nonfinite_update,shutdown} partial/{stale,nonfinite_update,shutdown}
    passes/{done,partial,init_short} lag/{mean,max,quantiles} loop/lag_ms_{mean,max}
    learner_queue/size_{count,mean,std,quantiles} learner_queue/capacity
    timing_breakdown/learner_{grad,load,load_wait,dequeue}_time_ms
    queue/{idle,full,ready}_{depth_quantiles,capacity} queue/{full,ready}_get_wait_ms
    learner/starved_since_s learner/starved_total_s learner/skipped_updates
    loss/{total,policy,value,entropy} policy/entropy grad/norm algorithm/{lr,entropy_cost}
    episodes/{count,return_mean,length_mean} batch/valid_rows_mean
    weights/{version_epoch,version_update,served,not_modified,bytes}
    wire/{messages,bad,unroutable} sessions/{opened,expired,refused,closed}
    bad/{unknown_type,oversized_header,malformed_header,wrong_frame_count,wrong_size}
    bad/{unknown_session,not_allowed_now} credit/{granted_columns,free_columns}
    actor/{env_time_ms,act_time_ms,send_wait_ms,weights_wait_ms} host/rss_bytes
"""


def spell_out(pattern: str) -> list[str]:
    """`a/{b,c}_d` as `a/b_d` and `a/c_d`."""
    parts = re.split(r"[{}]", pattern)
    return ["".join(choice) for choice in product(*(part.split(",") for part in parts))]


@pytest.mark.parametrize("pattern", PROMISED.split())
def test_promised_names_are_declared(pattern: str) -> None:
    assert undeclared(spell_out(pattern)) == set()


def test_undeclared_names_are_found() -> None:
    report = {"updates": 3, "loss/totl": 0.1, "rejected/*": 1}
    assert undeclared(report) == {"loss/totl", "rejected/*"}
    assert undeclared({}) == set()


def test_a_name_of_a_users_own_needs_no_declaration() -> None:
    assert undeclared(["user/surprise", "user/x2"]) == set()
    odd = {"user/", "user/a/b", "user/Loss", "user", "others/x", "user/2x"}
    assert undeclared(odd) == odd


def test_an_algorithm_may_report_what_is_of_an_update() -> None:
    assert all(map(is_of_update, ("loss/policy", "policy/kl", "user/surprise")))
    assert not any(map(is_of_update, ("updates", "lag/mean", "mine/kl", "user/")))


def test_numbers_go_by_the_names_of_others_too() -> None:
    report = {"mean_return": 3.0, "loss/total": None, "advice": "none", "lag/quantiles": [1.0]}
    assert numbers(report) == {"mean_return": 3.0, "rollout/ep_rew_mean": 3.0}


def test_aliases_are_of_metrics_and_are_none_themselves() -> None:
    assert set(ALIASES.values()) <= REGISTRY.keys()
    assert not ALIASES.keys() & REGISTRY.keys()


def test_learner_queue_window_fits_its_names() -> None:
    assert undeclared(WindowStat("learner_queue/size").stats()) == set()


@pytest.mark.parametrize("metric", REGISTRY.values(), ids=REGISTRY.keys())
def test_every_metric_is_whole(metric: tuple[str, str, str]) -> None:
    name, unit, text = metric
    assert re.fullmatch(r"[a-z][a-z0-9_]*(/[a-z][a-z0-9_]*)?", name)
    assert unit.strip() == unit
    assert unit
    assert len(text.split()) >= 2


def test_units_agree_with_the_endings() -> None:
    endings = {"_ms": "ms", "_bytes": "bytes", "_per_s": "/s", "_columns": "columns"}
    for metric in REGISTRY.values():
        for ending, unit in endings.items():
            if metric.name.endswith(ending):
                assert metric.unit.endswith(unit), metric


def test_markdown_holds_every_metric_once_under_its_section() -> None:
    blocks = markdown_table().split("## ")[1:]
    assert [block.splitlines()[0] for block in blocks] == list(SECTIONS)
    for section, block in zip(SECTIONS.values(), blocks, strict=True):
        rows = [line for line in block.splitlines() if line.startswith("| `")]
        assert [row.split("`")[1] for row in rows] == [m.name for m in section]
        for row, metric in zip(rows, section, strict=True):
            assert row == f"| `{metric.name}` | {metric.unit} | {metric.help} |"


def test_markdown_ends_with_one_newline() -> None:
    assert markdown_table().endswith("|\n")
