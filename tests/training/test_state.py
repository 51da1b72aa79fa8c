"""What is captured of a team is all that it needs to go on bit for bit."""

import dataclasses
import json

import pytest
import torch

from impala_async.errors import CheckpointError
from impala_async.schema import POLICY
from impala_async.training.checkpoint import newest_checkpoint, save_checkpoint
from impala_async.training.state import TrainingState
from impala_async.weights import Version

RUNS = {
    "impala": {"lr": 1e-2, "normalize_returns": True, "normalize_obs": True},
    "appo": {"name": "appo", "kl_coeff": 0.7, "tau": 0.5, "target_update_every_updates": 3},
    "ppo": {"name": "ppo", "num_minibatches": 3, "optimizer": "rmsprop"},
}


def train(step, make_batch, seeds):
    for seed in seeds:
        batch = make_batch(seed=seed)
        # Some columns change hands in the middle, and some rows are the copy's.
        players = torch.randint(0, 3, (5, 1), generator=torch.Generator().manual_seed(seed))
        players_BS = players.repeat(1, 7).to(torch.uint8)
        players_BS[0, 3:] = 1 - players_BS[0, 0].clamp(max=1)
        own_BT = players_BS[:, :-1] < 2
        obs = {**batch.obs, POLICY: players_BS}
        batch = dataclasses.replace(batch, obs=obs, mask_BT=batch.mask_BT & own_BT)
        step.run(batch, torch.ones(5, dtype=torch.bool), seed * 20)


@pytest.mark.parametrize("settings", RUNS.values(), ids=RUNS.keys())
@pytest.mark.parametrize("core", [None, "gru"])
@pytest.mark.parametrize("num_before", [0, 5])
def test_a_team_goes_on_bit_for_bit(tmp_path, make_team_step, make_batch, num_before, settings):
    step = make_team_step(**settings)
    train(step, make_batch, range(num_before))
    captured = step.capture()
    save_checkpoint(tmp_path, Version(1, num_before), captured.tensors, captured.state)
    train(step, make_batch, range(num_before, 11))

    resumed = make_team_step(seed=5, **settings)
    # The seed is not what is captured: it deals columns to the parts of a batch.
    for name, one in resumed.steps.items():
        one._seed = step.steps[name]._seed
    found = newest_checkpoint(tmp_path)
    resumed.restore(TrainingState(found.tensors, found.state))
    train(resumed, make_batch, range(num_before, 11))
    mine, theirs = resumed.capture(), step.capture()
    assert json.dumps(mine.state) == json.dumps(theirs.state)
    assert mine.tensors.keys() == theirs.tensors.keys()
    for group, tensors in theirs.tensors.items():
        assert tensors.keys() == mine.tensors[group].keys()
        for name, tensor in tensors.items():
            assert torch.equal(mine.tensors[group][name], tensor), (group, name)


def test_the_copys_weights_are_among_them_and_nothing_else_of_it(make_team_step, make_batch):
    step = make_team_step(name="appo")
    train(step, make_batch, range(3))
    captured = step.capture()
    owners = {
        group: {name.partition("/")[0] for name in tensors}
        for group, tensors in captured.tensors.items()
    }
    assert owners == {
        "model": {"a", "b", "past"},
        "optimizer": {"a", "b"},
        "target": {"a", "b"},
    }
    assert captured.state["algorithm"].keys() == {"a", "b"}
    assert captured.tensors["model"].keys() == step.policy.named_tensors().keys()


def test_a_capture_is_a_copy_that_training_does_not_touch(make_team_step, make_batch):
    step = make_team_step()
    captured = step.capture()
    kept = {name: tensor.clone() for name, tensor in captured.tensors["model"].items()}
    train(step, make_batch, range(4))
    assert all(
        torch.equal(tensor, kept[name]) for name, tensor in captured.tensors["model"].items()
    )


def test_the_state_of_another_kind_does_not_fit(make_team_step, make_step):
    with pytest.raises(CheckpointError, match="it has no 'a/"):
        make_team_step().restore(make_step().capture())
    with pytest.raises(CheckpointError, match="it has no 'policy_torso"):
        make_step().restore(make_team_step().capture())
    with pytest.raises(CheckpointError, match=r"^it has no 'return_scale'"):
        make_step(normalize_returns=True).restore(make_step().capture())
