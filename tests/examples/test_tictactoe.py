"""The example game keeps its rules."""

from pathlib import Path

import numpy as np

from examples.tictactoe import NUM_PLACES, WAIT, TicTacToe
from impala_async.config.env import EnvSection
from impala_async.config.load import load_config
from impala_async.envs.make import build_envs


def play(*places):
    """The sides take places in turn; what the last step gave."""
    game = TicTacToe()
    game.reset()
    for number, place in enumerate(places):
        sides = (place, WAIT) if number % 2 == 0 else (WAIT, place)
        result = game.step(dict(zip(game.possible_agents, sides, strict=True)))
    return game, result


def test_a_line_wins_and_a_full_board_is_a_draw():
    for places, rewards in (
        ((0, 3, 1, 4, 2), (1, -1)),
        ((0, 3, 1, 4, 8, 5), (-1, 1)),
        ((0, 1, 4, 2, 8), (1, -1)),
        ((0, 1, 2, 4, 3, 5, 7, 6, 8), (0, 0)),
        ((1, 0, 3, 2, 4, 5, 6, 7, 8), (0, 0)),
    ):
        game, (_, given, terminated, truncated, _) = play(*places)
        assert (given["first"], given["second"]) == rewards
        assert list(terminated.values()) == [True, True]
        assert list(truncated.values()) == [False, False]
        assert game.agents == []
        assert game.num_illegal == 0


def test_each_side_sees_the_board_as_its_own_and_moves_in_turn():
    game, (obs, given, terminated, _, _) = play(0, 4, 8)
    assert set(given.values()) == {0}
    assert not any(terminated.values())
    assert game.agents == ["first", "second"]
    for agent in game.agents:
        assert game.observation_space(agent).contains(obs[agent])
    first, second = obs["first"], obs["second"]
    assert np.flatnonzero(first["board"][0]).tolist() == [0, 8]
    assert np.flatnonzero(first["board"][1]).tolist() == [4]
    np.testing.assert_array_equal(first["board"], second["board"][::-1])
    assert (first["is_to_move"], second["is_to_move"]) == (0, 1)
    assert np.flatnonzero(first["action_mask"]).tolist() == [WAIT]
    free = [place for place in range(NUM_PLACES) if place not in (0, 4, 8)]
    assert np.flatnonzero(second["action_mask"]).tolist() == free


def test_what_is_not_legal_loses_and_is_counted():
    for sides, rewards, num_illegal in (
        ((0, WAIT), (-1, 1), 1),
        ((WAIT, WAIT), (-1, 1), 1),
        ((2, 3), (1, -1), 1),
        ((0, 3), (-1, 1), 2),
    ):
        game, _ = play(0, 4)
        _, given, terminated, _, _ = game.step(dict(zip(game.agents, sides, strict=True)))
        assert game.num_illegal == num_illegal
        assert (given["first"], given["second"]) == rewards
        assert all(terminated.values())


def test_the_package_takes_its_mask():
    config = load_config(Path(__file__).resolve().parents[2] / "configs/self_play.toml")
    envs = build_envs("auto", EnvSection(id="examples.tictactoe:TicTacToe"), 2, config.policies)
    assert envs.num_envs == 4
    assert envs.action_spec.legal == "action_mask"
    envs.close()
