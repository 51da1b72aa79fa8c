from impala_async.config.policies import ONE_POLICY, PoliciesSection
from tests.config.made import complaint, config_of

COPIED = {"names": ["main", "past"], "copies": {"past": "main"}, "copy_every_updates": 5}
THREE = {**COPIED, "names": ["main", "past", "new"]}


def test_all_learn_that_are_no_copies_unless_they_are_named():
    for settings, trained in (
        ({}, ()),
        ({"names": ["a", "b"], "mapping": "my.module:deal"}, ("a", "b")),
        ({"names": ["a", "b", "c"], "train": ["c", "a"]}, ("a", "c")),
        (COPIED, ("main",)),
        ({**COPIED, "train": ["main"]}, ("main",)),
        ({"names": [f"p{i}" for i in range(64)], "train": ["p7"]}, ("p7",)),
    ):
        section = config_of(policies=settings).policies
        assert section.trained == trained
        assert PoliciesSection.model_validate_json(section.model_dump_json()) == section
        assert (section == ONE_POLICY) == (not settings)


def test_what_does_not_go_together_is_refused():
    for settings, says in (
        ({"names": ["a"]}, "names must be 2 to 64 that differ, of letters, digits, _ and -, got"),
        ({"names": [f"p{i}" for i in range(65)]}, "names must be 2 to 64"),
        ({"names": ["a"]}, 'got ["a"]: a single policy for all agents needs no section policies'),
        ({"names": ["a", "a"]}, 'got ["a", "a"]'),
        ({"names": ["a", "b/c"], "train": ["x"]}, "names must be 2 to 64"),
        ({"names": ["a", "b"], "mapping": "by_turns"}, "mapping must be shuffled or package.mod"),
        ({"names": ["a", "b"], "train": ["c"]}, "train must name each policy that learns once, of"),
        ({"names": ["a", "b"], "train": []}, "train must name each policy"),
        ({"names": ["a", "b"], "train": ["a", "a"]}, 'that are no copies (a, b), got ["a", "a"]'),
        ({**COPIED, "train": ["main", "past"]}, "that are no copies (main), got"),
        ({**COPIED, "copies": {"old": "main"}}, "'old' cannot be a copy of 'main': both must"),
        ({**COPIED, "copies": {"past": "old"}}, "'past' cannot be a copy of 'old'"),
        ({**COPIED, "copies": {"past": "past"}}, "'past' cannot be a copy of 'past'"),
        ({**THREE, "copies": {"past": "main", "new": "past"}}, "'new' cannot be a copy of 'past'"),
        ({**THREE, "train": ["new"]}, "must be of names, and the second learn, as new does"),
        (
            {**COPIED, "copies": {"main": "past", "past": "main"}},
            "all policies are copies",
        ),
        ({**COPIED, "copy_every_updates": None}, "copies must be taken anew from time to time"),
    ):
        text = complaint(policies=settings)
        assert text.startswith("config: policies: ")
        assert says in text
        assert len(text.splitlines()) == 1
