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


@pytest.mark.filterwarnings("ignore:.*(spec|render|infinity)")
def test_probes_are_what_gymnasium_calls_an_environment():
    kinds = probes.ActionReward, probes.MatchObservation, probes.Endless, probes.Counting
    for kind in (*kinds, probes.Slow):
        check_env(kind(), skip_render_check=True)


def test_rewards_are_what_the_probes_say():
    by_action = probes.ActionReward(num_actions=3, start=5)
    assert [play(by_action, [action])[1] for action in (5, 6, 7)] == [[0.0], [1.0], [2.0]]
    with pytest.raises(ValueError, match="is not in Discrete"):
        play(by_action, [0])
    match = probes.MatchObservation()
    match.reset(seed=1)
    for action in (0, 1) * 15:
        (obs, _), (reward,), *_ = play(match, [action])
        assert reward == (action == (obs[0] > 0))


def test_counting_tells_every_row_from_every_other():
    env = probes.Counting(length=2, ends="both")
    obs, rewards, terminated, truncated = play(env, [0, 1])
    assert [o.tolist() for o in obs] == [[0, 0, 0], [0, 0, 1], [0, 0, 2]]
    assert (rewards, terminated, truncated) == ([1.0, 12.0], [False, True], [False, True])
    assert env.reset()[0].tolist() == [0, 1, 0]
