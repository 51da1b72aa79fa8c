"""Every algorithm learns, in a second or two, what a sound one must learn."""

import pytest

from tests import matrix
from tests.training.games import bandit, delayed, probabilities, trained, values

SEEDS = pytest.mark.parametrize("seed", matrix.first_of(0, 1))
APPO = {"name": "appo", "lr": 5e-3}
PPO = {"name": "ppo", "lr": 5e-3, "num_minibatches": 4}
# Settings, and passes of each batch.
CASES = {
    "impala": ({"name": "impala", "lr": 5e-3}, 1),
    "impala, TF1's RMSProp": (
        # Its mean square starts at 1, far above these gradients: 0.9 forgets that soon.
        {"lr": 5e-3, "optimizer": "rmsprop_tf", "optimizer_options": {"eps": 1e-4, "decay": 0.9}},
        1,
    ),
    "impala, RMSProp": ({"name": "impala", "lr": 2e-3, "optimizer": "rmsprop"}, 1),
    "impala, AdamW": ({"name": "impala", "lr": 5e-3, "optimizer": "adamw"}, 1),
    "impala, normal advantages": (
        {"name": "impala", "lr": 5e-3, "normalize_advantages": True},
        1,
    ),
    "appo": (APPO, 2),
    "appo, KL and a slow target": (
        APPO | {"kl_coeff": 0.2, "tau": 0.5, "target_update_every_updates": 2},
        2,
    ),
    "ppo": (PPO, 2),
    "ppo, V-trace": (PPO | {"returns": "vtrace"}, 2),
    "a2c": ({"name": "a2c", "lr": 5e-3}, 1),
}
EACH = pytest.mark.parametrize(("settings", "num_passes"), CASES.values(), ids=CASES.keys())


@SEEDS
@EACH
def test_a_contextual_bandit_is_solved(settings, num_passes, seed):
    num_batches = 250 // num_passes
    settings = settings | {"gamma": 0.0}
    policy = trained(bandit, settings, seed=seed, num_batches=num_batches, num_passes=num_passes)
    assert probabilities(policy).min() > 0.8
    assert min(values(policy)) > 0.7


@SEEDS
@pytest.mark.parametrize("name", ["impala", "appo", "ppo", "a2c"])
def test_a_reward_that_comes_later_is_won(name, seed):
    """Values are gamma at the start and 1 before the reward."""
    settings, num_passes = CASES[name]
    settings = settings | {"gamma": 0.9}
    policy = trained(delayed, settings, seed=seed, num_batches=200, num_passes=num_passes)
    assert probabilities(policy)[:2].min() > 0.8
    first, second, paid, _ = values(policy)
    assert [first, second] == pytest.approx([0.9, 0.9], abs=0.15)
    assert paid == pytest.approx(1, abs=0.15)


@SEEDS
@pytest.mark.parametrize("factor", [1e-1, 1e3])
def test_normal_returns_make_rewards_of_any_size_learnable(factor, seed):
    settings = {"lr": 5e-3, "gamma": 0.0, "normalize_returns": True}
    policy = trained(bandit, settings, seed=seed, num_batches=250, reward_factor=factor)
    assert probabilities(policy).min() > 0.8
    # In units of the returns' deviation, which a tenth of their mean bounds from below.
    assert 1 < min(values(policy)) < max(values(policy)) < 10
