"""Policies by name: what goes together, and what is refused with the key and the way out."""

import pytest

from impala_async.config.load import validate_config
from impala_async.config.policies import ONE_POLICY, PoliciesSection
from impala_async.errors import ConfigError
from tests.config.test_run import nested

PAIR = {"names": ["main", "past"], "copies": {"past": "main"}, "copy_every_updates": 5}


def config_of(policies, **others):
    keys = {f"policies.{key}": value for key, value in policies.items()}
    others = {key.replace("__", "."): value for key, value in others.items()}
    return validate_config(nested({"env.id": "X", **keys, **others}))


def test_without_names_there_is_one_policy():
    assert config_of({}).policies == ONE_POLICY
    assert ONE_POLICY.trained == ()


@pytest.mark.parametrize(
    ("settings", "trained"),
    [
        ({"names": ["a", "b"]}, ("a", "b")),
        ({"names": ["a", "b"], "train": ["b"]}, ("b",)),
        ({"names": ["a", "b", "c"], "train": ["c", "a"]}, ("a", "c")),
        (PAIR, ("main",)),
        ({**PAIR, "train": ["main"]}, ("main",)),
        ({"names": ["a", "b"], "mapping": "my.module:deal"}, ("a", "b")),
    ],
)
def test_all_learn_that_are_no_copies_unless_they_are_named(settings, trained):
    assert config_of(settings).policies.trained == trained


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"train": ["a"]}, ["train does nothing without names", 'names = ["main", "past"]']),
        ({"mapping": "a:b"}, ["mapping does nothing without names"]),
        ({"copies": {"a": "b"}}, ["copies does nothing without names"]),
        ({"copy_every_updates": 3}, ["copy_every_updates does nothing without names"]),
        ({"names": ["a"]}, ["names must be 2 to 64", '["a"]', "needs no section"]),
        ({"names": [f"p{i}" for i in range(65)]}, ["names must be 2 to 64"]),
        ({"names": ["a", "a"]}, ["names must differ"]),
        ({"names": ["a", "b/c"]}, ["letters, digits, _ and -", '["b/c"]']),
        ({"names": ["a", "b"], "mapping": "by_turns"}, ["shuffled or package.module:function"]),
        ({"names": ["a", "b"], "train": ["c"]}, ["train: 'c' is none of names (a, b)"]),
        ({"names": ["a", "b"], "train": []}, ["train must name each policy that learns"]),
        ({"names": ["a", "b"], "train": ["a", "a"]}, ["train must name each policy", "once"]),
        ({**PAIR, "train": ["main", "past"]}, ["train: 'past' is a copy of 'main'", "drop it"]),
        ({**PAIR, "copies": {"old": "main"}}, ["copies: 'old' is none of names (main, past)"]),
        ({**PAIR, "copies": {"past": "old"}}, ["copies: 'old' is none of names (main, past)"]),
        ({**PAIR, "copies": {"past": "past"}}, ["copies: 'past'", "which is a copy itself"]),
        (
            {**PAIR, "names": ["main", "past", "old"], "copies": {"past": "main", "old": "past"}},
            ["copies: 'old' is to be a copy of 'past', which is a copy itself"],
        ),
        (
            {"names": ["main", "past"], "copies": {"past": "main"}},
            ["copies must be taken anew", "set copy_every_updates"],
        ),
        (
            {"names": ["a", "b"], "copy_every_updates": 5},
            ["copy_every_updates (5) does nothing without copies"],
        ),
        (
            {**PAIR, "names": ["main", "past", "new"], "train": ["new"]},
            ["'past' is a copy of 'main', which never changes: add that to train"],
        ),
        ({"names": "main"}, ["policies.names: wants a list", '["main", "past"]']),
        ({**PAIR, "copy_every_updates": 0}, ["policies.copy_every_updates: wants", "from 1 up"]),
    ],
    ids=str,
)
def test_what_does_not_go_together_is_refused(settings, named):
    with pytest.raises(ConfigError) as caught:
        config_of(settings)
    text = str(caught.value)
    assert "policies" in text
    assert all(name in text for name in named), text


def test_a_batch_of_lockstep_has_the_columns_of_all_agents():
    lockstep = {"pace__mode": "lockstep", "train__num_actors": 2, "actor__num_envs": 4}
    assert config_of(PAIR, **lockstep).learner.batch_columns == 8
    assert config_of(PAIR, **lockstep, learner__batch_columns=24).learner.batch_columns == 24
    with pytest.raises(ConfigError, match=r"\(8\).* times the agents of an environment"):
        config_of(PAIR, **lockstep, learner__batch_columns=20)


def test_it_is_as_it_was_after_json():
    section = PoliciesSection.model_validate(PAIR)
    assert PoliciesSection.model_validate_json(section.model_dump_json()) == section
