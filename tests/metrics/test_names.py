"""The registry: what a report promises is in it, once, with a unit and a meaning."""

import re
from itertools import product

from impala_async.metrics import names

# From outside these are read by their names.
PROMISED = """
    time_s env_steps_trained updates env_steps_per_s mean_return_100 num_actors bottleneck
    trajectories/{received,admitted,rejected,trained,dropped,in_slots}
    rejected/{duplicate,invalid,nonfinite,unknown_session,stale,dead_branch}
    dropped/{stale,nonfinite_update,shutdown} passes/{done,partial} lag/{mean,max,quantiles}
    loop/lag_ms_{mean,max} learner_queue/size_{count,mean,std,quantiles}
    timing_breakdown/learner_{grad,load,load_wait,dequeue}_time_ms learner/starved_since_s
"""


def spell_out(pattern):
    """`a/{b,c}_d` as `a/b_d` and `a/c_d`."""
    parts = re.split(r"[{}]", pattern)
    return ["".join(choice) for choice in product(*(part.split(",") for part in parts))]


def test_promised_names_are_declared_and_others_are_found():
    for pattern in PROMISED.split():
        assert names.undeclared(spell_out(pattern)) == set()
    odd = {"loss/totl", "rejected/*", "user/", "user/a/b", "user/Loss", "user", "user/2x"}
    odd |= {"policies/a/loss/totl", "policies/loss/total", "policies/a/updates", "policies/a/user/"}
    odd |= {"policies/a/b/loss/total", "policies/a/policies/b/loss/total"}
    own = {"updates", "user/surprise", "user/x2", "policies/a_B-1/loss/total", "policies/a/user/x2"}
    assert names.undeclared(own | odd) == odd


def test_an_algorithm_may_report_what_is_of_an_update():
    assert all(map(names.is_of_update, ("loss/policy", "policy/kl", "user/surprise")))
    not_his = ("updates", "lag/mean", "mine/kl", "user/", "policies/a/loss/policy")
    assert not any(map(names.is_of_update, not_his))


def test_settings_are_told_from_what_has_a_mean():
    """Though somebody may call a policy so."""
    for policy in ("main", "algorithm"):
        for name, is_setting in (("algorithm/lr", True), ("loss/total", False), ("user/x", False)):
            assert names.is_setting(name) == is_setting
            assert names.is_setting(names.of_policy(policy, name)) == is_setting
            assert names.undeclared([names.of_policy(policy, name)]) == set()


def test_numbers_go_by_the_names_of_others_too():
    report = {"mean_return": 3.0, "loss/total": None, "advice": "none", "lag/quantiles": [1.0]}
    assert names.numbers(report) == {"mean_return": 3.0, "rollout/ep_rew_mean": 3.0}
    assert set(names.ALIASES.values()) <= names.REGISTRY.keys()
    assert not names.ALIASES.keys() & names.REGISTRY.keys()


def test_every_metric_is_whole_and_its_unit_agrees_with_its_ending():
    assert len(names.REGISTRY) == sum(map(len, names.SECTIONS.values())), "a name stands twice"
    endings = {"_ms": "ms", "_bytes": "bytes", "_per_s": "/s", "_columns": "columns"}
    for name, (unit, text) in names.REGISTRY.items():
        assert re.fullmatch(r"[a-z][a-z0-9_]*(/[a-z][a-z0-9_]*)?", name)
        assert unit.strip() == unit != "", name
        assert len(text.split()) >= 2, name
        for ending, wanted in endings.items():
            assert not name.endswith(ending) or unit.endswith(wanted), name
