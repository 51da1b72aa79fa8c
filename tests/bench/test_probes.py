import time

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from bench import probes


def play(env, actions):
    """Observations, rewards and flags of one episode."""
    obs, _ = env.reset()
    seen, rewards, terminated, truncated = [obs], [], [], []
    for action in actions:
        obs, reward, is_terminated, is_truncated, _ = env.step(np.int64(action))
        seen.append(obs)
        rewards.append(reward)
        terminated.append(is_terminated)
        truncated.append(is_truncated)
    return seen, rewards, terminated, truncated


@pytest.mark.parametrize(
    "kind",
    [
        probes.ConstantReward,
        probes.ActionReward,
        probes.ObservationReward,
        probes.MatchObservation,
        probes.DelayedReward,
        probes.Endless,
        probes.Counting,
        probes.Slow,
    ],
)
@pytest.mark.filterwarnings("ignore:.*(spec|render|infinity)")
def test_probes_are_what_gymnasium_calls_an_environment(kind):
    check_env(kind(), skip_render_check=True)


def test_constant_reward_is_one_step_worth_1():
    assert play(probes.ConstantReward(), [0])[1:] == ([1.0], [True], [False])


def test_action_reward_is_the_index_of_the_action():
    env = probes.ActionReward(num_actions=3, start=5)
    assert [play(env, [action])[1] for action in (5, 6, 7)] == [[0.0], [1.0], [2.0]]
    with pytest.raises(ValueError, match="is not in Discrete"):
        play(env, [0])


def test_observation_reward_is_the_observation():
    env = probes.ObservationReward()
    env.reset(seed=1)
    episodes = [play(env, [0]) for _ in range(50)]
    assert all(obs[0] == reward for (obs, _), (reward,), _, _ in episodes)
    assert {reward for _, (reward,), _, _ in episodes} == {-1.0, 1.0}


def test_match_observation_pays_for_the_right_action_only():
    env = probes.MatchObservation()
    env.reset(seed=1)
    for _ in range(20):
        for action in (0, 1):
            (obs, _), (reward,), _, _ = play(env, [action])
            assert reward == (action == (obs[0] > 0))


def test_delayed_reward_comes_with_the_second_step():
    obs, rewards, terminated, truncated = play(probes.DelayedReward(), [0, 1])
    assert [float(o[0]) for o in obs] == [0, 1, 1]
    assert (rewards, terminated, truncated) == ([0.0, 1.0], [False, True], [False, False])


def test_a_value_of_1_is_the_fixed_point_of_endless_unless_it_terminates():
    gamma = 0.9
    _, rewards, terminated, truncated = play(probes.Endless(gamma, length=4), [0] * 4)
    assert truncated == [False, False, False, True]
    targets = [r + gamma * (not t) for r, t in zip(rewards, terminated, strict=True)]
    assert targets == pytest.approx([1] * 4)
    _, rewards, terminated, _ = play(probes.Endless(gamma, 4, ends="terminated"), [0] * 4)
    targets = [r + gamma * (not t) for r, t in zip(rewards, terminated, strict=True)]
    assert targets == pytest.approx([1, 1, 1, 0.1])


def test_counting_tells_every_row_from_every_other():
    env = probes.Counting(length=2, ends="both")
    obs, rewards, terminated, truncated = play(env, [0, 1])
    assert [o.tolist() for o in obs] == [[0, 0, 0], [0, 0, 1], [0, 0, 2]]
    assert (rewards, terminated, truncated) == ([1.0, 12.0], [False, True], [False, True])
    assert env.reset()[0].tolist() == [0, 1, 0]


def test_slow_takes_its_time():
    env = probes.Slow(step_s=0.005)
    before = time.perf_counter()
    play(env, [0] * 4)
    assert time.perf_counter() - before >= 0.02


def test_failing_raises_after_so_many_steps():
    env = probes.Failing(after=4, length=3)
    play(env, [0] * 3)
    with pytest.raises(RuntimeError, match="as it was told to"):
        play(env, [0] * 2)


def test_not_finite_shows_nan_from_then_on():
    env = probes.NotFinite(after=2, length=9)
    obs, *_ = play(env, [0] * 4)
    assert [bool(np.isfinite(o).all()) for o in obs] == [True, True, True, False, False]


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_the_vector_steps_like_its_single_ones(mode):
    vector = probes.CountingVector(3, lengths=(2, 3), autoreset=mode, ends="truncated")
    obs, _ = vector.reset(seed=0)
    starts = obs.tolist()
    rows, finals = [], []
    for _ in range(4):
        obs, rewards, _, truncated, infos = vector.step(np.array([0, 1, 0]))
        rows.append((obs.tolist(), rewards.tolist(), truncated.tolist()))
        finals.append(infos["final_obs"].tolist() if infos else None)
    assert starts == [[0, 0, 0], [1, 0, 0], [2, 0, 0]]
    # Columns 0 and 2 end with the second step, column 1 with the third.
    assert [flags for _, _, flags in rows[:2]] == [[False] * 3, [True, False, True]]
    if mode == "NextStep":
        assert rows[1] == ([[0, 0, 2], [1, 0, 2], [2, 0, 2]], [2, 12, 2], [True, False, True])
        assert rows[2] == ([[0, 1, 0], [1, 0, 3], [2, 1, 0]], [0, 13, 0], [False, True, False])
        assert rows[3] == ([[0, 1, 1], [1, 1, 0], [2, 1, 1]], [1, 0, 1], [False, False, False])
    else:
        assert rows[1] == ([[0, 1, 0], [1, 0, 2], [2, 1, 0]], [2, 12, 2], [True, False, True])
        assert finals[1][0] == [0, 0, 2]
        assert finals[1][2] == [2, 0, 2]
        assert rows[2] == ([[0, 1, 1], [1, 1, 0], [2, 1, 1]], [1, 13, 1], [False, True, False])
        assert finals[2][1] == [1, 0, 3]
        assert rows[3] == ([[0, 2, 0], [1, 1, 1], [2, 2, 0]], [2, 11, 2], [True, False, True])
