"""A network for images acts and learns on stacks of coloured frames, whole or each frame once."""

import numpy as np
import pytest
import torch

from impala_async.config.algorithm import AlgorithmSection
from impala_async.config.model import ModelSection
from impala_async.policy import Policy
from impala_async.schema import ActionPart, ActionSpec, ArraySpec, ObsSpec, Schema
from impala_async.training.batch import Batch
from impala_async.training.step import UpdateStep

NUM_COLUMNS, NUM_ROWS, NUM_WINDOW, SIZE = 32, 3, 4, 36
ALIVE_B = torch.ones(NUM_COLUMNS, dtype=torch.bool)


def seen_by(policy, source, colours_BS, *, is_stack):
    """A batch of its own play: the action that has the number of the colour is paid for."""
    num_frames = 1 + NUM_WINDOW + NUM_ROWS
    frames = np.zeros((NUM_COLUMNS, num_frames, SIZE, SIZE, 3), np.uint8)
    # Only the newest frame of a row has a colour; before it lie frames of other rows, or empty.
    columns = np.arange(NUM_COLUMNS)
    for row, colours_B in enumerate(colours_BS.T):
        frames[columns, NUM_WINDOW + row, :, :, colours_B] = 255
    window_SK = np.arange(NUM_ROWS + 1)[:, None] + np.arange(1, NUM_WINDOW + 1)
    whole = frames[:, window_SK]
    acted = policy.act({"": whole[:, :-1].reshape(-1, *whole.shape[2:])}, {}, source)
    shape = (NUM_COLUMNS, NUM_ROWS)
    actions_BT = acted.actions[""].reshape(shape)
    windows = np.broadcast_to(window_SK.astype(np.int32), (NUM_COLUMNS, *window_SK.shape)).copy()
    return Batch(
        obs={"": torch.from_numpy(frames if is_stack else whole)},
        windows={"": torch.from_numpy(windows)} if is_stack else {},
        actions={"": torch.from_numpy(actions_BT)},
        state={},
        rewards_BT=torch.from_numpy((actions_BT == colours_BS[:, :-1]).astype(np.float32)),
        log_probs_BT=torch.from_numpy(acted.log_probs.reshape(shape)),
        terminated_BT=torch.ones(shape, dtype=torch.bool),
        truncated_BT=torch.zeros(shape, dtype=torch.bool),
        mask_BT=torch.ones(shape, dtype=torch.bool),
    )


@pytest.mark.parametrize("is_stack", [False, True])
def test_nature_cnn_learns_what_colour_the_newest_frame_has(is_stack):
    image = ArraySpec("", (NUM_WINDOW, SIZE, SIZE, 3), "uint8", is_stack=is_stack)
    action = ActionSpec((ActionPart("", "discrete", (3,)),))
    schema = Schema(ObsSpec((image,)), action, rows=NUM_ROWS)
    policy = Policy(schema, ModelSection(name="nature_cnn", hidden_sizes=(32,)), seed=0)
    step = UpdateStep(policy, AlgorithmSection(lr=2e-3, entropy_cost=0), "cpu")
    rng, source = np.random.default_rng(0), torch.Generator().manual_seed(0)
    paid = []
    for number in range(60):
        colours_BS = rng.integers(0, 3, (NUM_COLUMNS, NUM_ROWS + 1))
        batch = seen_by(policy, source, colours_BS, is_stack=is_stack)
        paid.append(float(batch.rewards_BT.mean()))
        assert step.run(batch, ALIVE_B, number).applied
    assert np.mean(paid[:3]) < 0.6
    assert np.mean(paid[-3:]) > 0.9, paid
