"""Policies by name: what goes together, and what is refused with the key and the way out."""

import pytest

from impala_async.config.policies import ONE_POLICY, PoliciesSection
from tests.config.made import complaint, config_of

PAIR = {"names": ["main", "past"], "copies": {"past": "main"}, "copy_every_updates": 5}


def settings_of(policies, **others):
    return {**{f"policies__{key}": value for key, value in policies.items()}, **others}


def test_without_names_there_is_one_policy():
    assert config_of().policies == ONE_POLICY
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
    assert config_of(**settings_of(settings)).policies.trained == trained


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"train": ["a"]}, ["train (('a',)) does nothing where names is none: drop it, or set"]),
        ({"mapping": "a:b"}, ["mapping (a:b) does nothing where names is none"]),
        ({"copies": {"a": "b"}}, ["does nothing where names is none"]),
        ({"copy_every_updates": 3}, ["copy_every_updates (3) does nothing where names is none"]),
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
            ["copy_every_updates (5) does nothing where copies is none"],
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
    text = complaint(**settings_of(settings))
    assert "policies" in text
    assert all(name in text for name in named), text


def test_it_is_as_it_was_after_json():
    section = PoliciesSection.model_validate(PAIR)
    assert PoliciesSection.model_validate_json(section.model_dump_json()) == section
