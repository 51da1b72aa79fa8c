"""Episodes, of each column the same number, and their returns and lengths."""

import itertools

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete

from bench.probes import Counting
from impala_async.config.env import EnvSection
from impala_async.envs.agents import AgentEnvs
from impala_async.envs.make import build_envs
from impala_async.envs.vector import SerialEnvs
from impala_async.evaluation.play import columns_for, play
from impala_async.policy import Action
from tests.envs.test_agents import Lives

PROBES = "bench.probes"


class Remembering:
    """Chooses action 1 in a column as long as it remembers as many steps as the episode has had.

    `Counting` gives 10 more for it. So a memory that is lost, or kept too long, shows in returns.
    """

    members = {"": None}  # noqa: RUF012

    def first_state(self, num_columns):
        return {"sum": np.zeros((num_columns, 1), np.float32)}

    def act(self, obs, state, generator=None):
        is_right = state["sum"][:, 0] == obs[""][:, 2]
        return Action({"": is_right.astype(np.int32)}, np.zeros(1), {"sum": state["sum"] + 1})


def returns_of(envs, per_column):
    played = play(Remembering(), envs, per_column, seed=3)
    assert {(each.seed, each.policy) for each in played} == {(3, 0)}
    assert all(each.total == counted(each.length) for each in played)
    envs.close()
    return sorted(each.total for each in played)


def counted(length):
    """The return of `length` steps of `Counting` with action 1: each its number, and 10 more."""
    return sum(step + 10 for step in range(1, length + 1))


@pytest.mark.parametrize("autoreset", ["NextStep", "SameStep"])
@pytest.mark.parametrize("ends", ["terminated", "truncated", "both"])
def test_returns_are_those_of_the_episodes_which_know_nothing_of_each_other(autoreset, ends):
    lengths = (1, 3, 5)
    kwargs = {"lengths": lengths, "autoreset": autoreset, "ends": ends}
    section = EnvSection(id=f"{PROBES}:CountingVector", kwargs=kwargs)
    # As many of each: short episodes are not favoured.
    expected = [counted(length) for length in lengths for _ in range(4)]
    assert returns_of(build_envs("vector", section, 3), 4) == expected
    serial = build_envs("serial", EnvSection(id=f"{PROBES}:Counting", kwargs={"length": 4}), 2)
    assert returns_of(serial, 2) == [counted(4)] * 4
    agents = AgentEnvs([Lives(lengths) for _ in range(2)])
    assert returns_of(agents, 2) == expected


def test_an_agent_that_never_plays_holds_nobody_up():
    for start, lengths in ((0, [3, 4]), (2, [2, 3]), (99, [3])):
        agents = AgentEnvs([Lives((3, 4), [0, start]) for _ in range(2)])
        played = play(Remembering(), agents, 2, 2, max_steps=9)
        assert sorted(each.length for each in played) == [x for x in lengths for _ in range(4)]


def test_a_key_called_policy_means_nothing_where_there_is_one():
    class Named(gym.wrappers.TransformObservation):
        def __init__(self):
            shown = Dict({"": Box(-9, 9, (3,)), "policy": Discrete(9)})
            super().__init__(Counting(2), lambda obs: {"": obs, "policy": 7}, shown)

    assert returns_of(SerialEnvs([Named()]), 4) == [counted(2)] * 4


def test_a_long_play_says_how_far_it_is(capfd):
    envs = SerialEnvs([Counting(2), Counting(2)])
    # Each look at the clock, one per step, is a second later.
    seconds = itertools.count()
    play(Remembering(), envs, 6, clock=lambda: float(next(seconds)))
    out, err = capfd.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "playing: 2 of 12 episodes after 3 s, mean return 23.0",
        "playing: 8 of 12 episodes after 13 s, mean return 23.0",
    ]


def test_sampled_episodes_follow_from_their_seed(tmp_path):
    """`generator` is the policy's to use: the same one for the same seed, and none for greedy."""

    class Drawing(Remembering):
        def act(self, obs, state, generator=None):
            drawn.append(None if generator is None else float(torch.rand(1, generator=generator)))
            return super().act(obs, state)

    seen = []
    for seed, is_sampled in ((1, True), (1, True), (2, True), (1, False)):
        drawn = []
        play(Drawing(), SerialEnvs([Counting(2)]), 2, seed=seed, is_sampled=is_sampled)
        seen.append(drawn)
    first, again, other, greedy = seen
    assert first == again != other
    assert {*greedy} == {None}


def test_few_environments_play_as_many_episodes_as_are_wanted_or_a_few_more():
    for wanted, (num_envs, per_column) in ((1, (1, 1)), (8, (8, 1)), (10, (5, 2)), (100, (8, 13))):
        assert columns_for(wanted) == (num_envs, per_column)


def test_a_look_is_taken_at_each_row_of_an_episode():
    looks = []
    (only,) = play(Remembering(), SerialEnvs([Counting(4)]), 1, look=lambda: looks.append(1))
    assert (only.length, len(looks)) == (4, 5)
