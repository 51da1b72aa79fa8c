"""Who plays whom: dealt at random, or as an own function says."""

from collections import Counter
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from impala_async.config.policies import PoliciesSection
from impala_async.envs.mapping import PolicyMapping
from impala_async.errors import EnvError

HERE = "tests.envs.test_mapping"
AGENTS = ["left", "right", "keeper"]


def mapping(*names: str, of: str = "shuffled", agents: list[str] = AGENTS, **more: Any) -> Any:
    section = PoliciesSection(names=names, mapping=of, **more)
    return PolicyMapping(section, agents)


def drawn(mapped: PolicyMapping, num: int = 300) -> list[tuple[int, ...]]:
    return [tuple(mapped.draw().tolist()) for _ in range(num)]


def test_two_agents_are_dealt_two_policies_either_way_round() -> None:
    counts = Counter(drawn(mapping("a", "b", agents=AGENTS[:2])))
    assert counts.keys() == {(0, 1), (1, 0)}
    assert min(counts.values()) > 100


def test_more_agents_than_policies_are_dealt_in_rounds() -> None:
    counts = Counter(drawn(mapping("a", "b")))
    # Two of one and one of the other, whoever they are.
    assert counts.keys() == {(0, 0, 1), (0, 1, 0), (1, 0, 0), (1, 1, 0), (1, 0, 1), (0, 1, 1)}
    assert min(counts.values()) > 25


def test_of_more_policies_than_agents_some_are_left_out() -> None:
    found = drawn(mapping("a", "b", "c", "d"))
    assert all(len(set(one)) == 3 for one in found)
    assert {number for one in found for number in one} == {0, 1, 2, 3}


def test_what_is_drawn_follows_from_the_seed() -> None:
    mapped = mapping("a", "b")
    runs = []
    for seed in (3, 4, 3):
        mapped.seed(seed)
        runs.append(drawn(mapped))
    assert runs[0] == runs[2] != runs[1]


def test_it_draws_from_another_stream_than_an_environment_of_the_same_seed() -> None:
    mapped = mapping("a", "b", of=f"{HERE}:first_draw")
    for seed in range(20):
        mapped.seed(seed)
        DRAWN.clear()
        mapped.draw()
        assert [gym.utils.seeding.np_random(seed)[0].random()] != DRAWN


DRAWN: list[float] = []


def first_draw(agents: list[str], rng: np.random.Generator) -> dict[str, str]:
    DRAWN.append(rng.random())
    return dict.fromkeys(agents, "a")


def test_it_knows_who_is_trained() -> None:
    copied = mapping("a", "past", "b", copies={"past": "a"}, copy_every_updates=1)
    assert copied.is_trained.tolist() == [True, False, True]
    assert copied.leaf.choices == (3,)


def keeper_is_past(agents: list[str], rng: np.random.Generator) -> dict[str, str]:
    assert agents == AGENTS
    others = str(rng.choice(["main", "past"]))
    return {agent: "past" if agent == "keeper" else others for agent in agents}


def nobody_keeps(agents: list[str], rng: np.random.Generator) -> dict[str, str]:
    return dict.fromkeys(agents[:-1], "main")


def a_stranger(agents: list[str], rng: np.random.Generator) -> dict[str, str]:
    return dict.fromkeys(agents, "alice")


def a_list(agents: list[str], rng: np.random.Generator) -> list[str]:
    return ["main"] * len(agents)


def failing(agents: list[str], rng: np.random.Generator) -> dict[str, str]:
    raise RuntimeError("no idea")


def test_an_own_function_says_who_plays() -> None:
    found = drawn(mapping("main", "past", of=f"{HERE}:keeper_is_past"))
    assert set(found) == {(0, 0, 1), (1, 1, 1)}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("nobody_keeps", "says nobody plays keeper: every agent needs a policy"),
        ("a_stranger", r"lets 'alice' play left, which is none of policies.names \(main, past\)"),
        ("a_list", "must give a dict from agent to policy, it gave a list"),
        ("failing", "failed to say who plays whom: RuntimeError: no idea"),
        ("keeper_is_pasd", "Did you mean: `keeper_is_past`"),
    ],
)
def test_a_wrong_answer_is_told_at_once(name: str, text: str) -> None:
    with pytest.raises(EnvError, match=text) as caught:
        mapping("main", "past", of=f"{HERE}:{name}")
    assert f"policies.mapping: {HERE}:{name}" in str(caught.value)
