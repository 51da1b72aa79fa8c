"""Training goes on from a captured state, through a checkpoint, bit for bit, or not at all."""

import dataclasses

import numpy as np
import pytest
import torch

from impala_async.errors import CheckpointError
from impala_async.schema import POLICY
from impala_async.training.checkpoint import (
    TrainingState,
    entry,
    save_checkpoint,
    whole_checkpoints,
)
from impala_async.weights import Version
from tests.training.conftest import ALIVE_B, is_same, remembered

SCHEDULE = {"lr": 1e-2, "lr_end": 1e-3, "schedule_env_steps": 150}
STATISTICS = {"normalize_obs": True, "normalize_returns": True}
RMSPROP_TF = {"optimizer": "rmsprop_tf", "optimizer_options": {"momentum": 0.5}}
KL = {"kl_coeff": 0.7, "tau": 0.5, "target_update_every_updates": 3}
RUNS = {
    "impala": SCHEDULE,
    "impala, RMSProp": SCHEDULE | STATISTICS | RMSPROP_TF,
    "appo": SCHEDULE | STATISTICS | KL | {"name": "appo"},
    "appo, parts": SCHEDULE | {"name": "appo", "num_minibatches": 3},
    "ppo": SCHEDULE | STATISTICS | {"name": "ppo", "num_minibatches": 3, "optimizer": "adamw"},
    "impala, a reward of one's own": SCHEDULE | {"intrinsic_reward": "examples.rnd:RND"},
    "a2c": SCHEDULE | {"name": "a2c", "optimizer": "rmsprop"},
}


@pytest.fixture(params=["make_step", "make_team_step"])
def make(request):
    return request.getfixturevalue(request.param)


def train(step, make_batch, seeds):
    for seed in seeds:
        batch = make_batch(seed=seed)
        # Some columns change hands in the middle, and some rows are the copy's.
        players_BS = np.random.default_rng(seed).integers(0, 3, (5, 1), np.uint8).repeat(7, 1)
        players_BS[0, 3:] = players_BS[0, 0] == 0
        obs = {**batch.obs, POLICY: torch.from_numpy(players_BS)}
        mask_BT = batch.mask_BT & (obs[POLICY][:, :-1] < 2)
        step.run(dataclasses.replace(batch, obs=obs, mask_BT=mask_BT), ALIVE_B, seed * 20)


@pytest.mark.parametrize("settings", RUNS.values(), ids=RUNS.keys())
@pytest.mark.parametrize(("core", "num_before"), [(None, 0), ("gru", 5)])
def test_training_goes_on_bit_for_bit(tmp_path, make, make_batch, num_before, settings):
    step = make(**settings)
    train(step, make_batch, range(num_before))
    captured = step.capture()
    save_checkpoint(tmp_path, Version(1, num_before), captured.tensors, captured.state)
    train(step, make_batch, range(num_before, 9))
    found = next(whole_checkpoints(tmp_path), None)
    # The capture is a copy that nobody's training has touched.
    for state in (TrainingState(found.tensors, found.state), captured, captured):
        resumed = make(seed=5, **settings)
        if hasattr(step, "steps"):
            # The seed is not what is captured: it deals columns to the parts of a batch.
            for name, one in resumed.steps.items():
                one.seed = step.steps[name].seed
        resumed.restore(state)
        train(resumed, make_batch, range(num_before, 9))
        assert is_same(remembered(resumed), remembered(step))


def test_what_a_state_holds_and_of_whom(make_step, make_team_step, make_batch):
    appo = {"name": "appo", "target_update_every_updates": 4}
    alone, team = make_step(**appo), make_team_step(**appo)
    for step in (alone, team):
        train(step, make_batch, range(2))
    state = alone.capture()
    assert state.tensors["target"].keys() == state.tensors["model"].keys()
    target = {"kl_coeff": 0.0, "kl_settings": [0.0, 0.01], "age": 2, "kl": alone.target._kl}
    assert state.state["algorithm"] == {"num_updates": 2, "target": target}
    assert make_step().capture().tensors.keys() == {"model", "optimizer"}
    state = team.capture()
    owners = {
        group: {name.partition("/")[0] for name in tensors}
        for group, tensors in state.tensors.items()
    }
    # A copy is in the weights, and has nothing else.
    both = {"a", "b"}
    assert owners == {"model": both | {"past"}, "optimizer": both, "target": both}
    assert state.state["algorithm"].keys() == both
    assert state.tensors["model"].keys() == team.policy.named_tensors().keys()


def test_weights_in_another_memory_order_are_saved_by_their_indices(tmp_path, make_step):
    step = make_step()
    weight = step.policy.model.policy_head.weight
    weight.data = weight.data.t().contiguous().t()
    assert not weight.is_contiguous()
    captured = step.capture()
    save_checkpoint(tmp_path, Version(1, 0), captured.tensors, captured.state)
    tensors = next(whole_checkpoints(tmp_path), None).tensors
    assert torch.equal(tensors["model"]["policy_head.weight"], weight.detach())


def without(state, name):
    tensors = {group: each for group, each in state.tensors.items() if group != name}
    return TrainingState(
        tensors, {part: each for part, each in state.state.items() if part != name}
    )


def as_integers(state, name):
    tensors = {key: tensor.to(torch.int64) for key, tensor in state.tensors[name].items()}
    return TrainingState({**state.tensors, name: tensors}, state.state)


def test_a_state_that_does_not_fit_is_refused_and_said_why(make_step, make_team_step, make_batch):
    step = make_step(name="appo")
    train(step, make_batch, range(2))
    appo, impala, team = step.capture(), make_step().capture(), make_team_step().capture()
    for state, fresh, why in [
        *((as_integers(appo, group), {"name": "appo"}, "torch.int64") for group in appo.tensors),
        *((without(impala, name), {}, f"it has no '{name}'") for name in ("model", *impala.state)),
        (impala, {"name": "appo"}, "it has no 'target'"),
        (impala, {"normalize_returns": True}, "it has no 'return_scale'"),
        (impala, {"hidden": (16, 8)}, "of shape [16, 16], not torch.float32"),
        (impala, {"hidden": (16, 16, 16)}, "it has no 'policy_torso"),
        (impala, {"hidden": (16,)}, "', and this run has not"),
        (team, {}, "it has no 'policy_torso"),
        (without(team, "optimizer"), None, "it has no 'optimizer'"),
        (impala, None, "it has no 'a/"),
    ]:
        with pytest.raises(CheckpointError) as caught:
            (make_team_step() if fresh is None else make_step(**fresh)).restore(state)
        assert why in str(caught.value)


def test_an_entry_is_of_its_kind():
    assert entry({"age": 3}, "age", float) == 3
    for saved in ({"age": "3"}, {"age": None}, {}):
        with pytest.raises(CheckpointError, match="'age'"):
            entry(saved, "age", float)
