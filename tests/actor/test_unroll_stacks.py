"""Stacks of frames are written frame by frame, and every row can be had back from them."""

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import FrameStackObservation

from impala_async.actor.unroll import StackWriter
from impala_async.config.env import EnvSection
from impala_async.envs.vector import SerialEnvs, VectorEnvs
from impala_async.errors import EnvError
from impala_async.schema import ArraySpec, Schema
from tests.actor.fakes import sampler_over
from tests.columns import find_fault

STACKED = EnvSection(id="some:Env", frame_stack="on")
LEAF = ArraySpec("", (3, 2, 4), "uint8", is_stack=True)


class Flicker(gym.Env[Any, Any]):
    """Frames of noise; episodes of random lengths, some shorter than a window."""

    action_space = Discrete(2)

    def __init__(self, shape=(4, 6)):
        self.observation_space = Box(0, 255, shape, np.uint8)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(1, 9))
        return self.show(), {}

    def step(self, action):
        self.left -= 1
        return self.show(), float(action), self.left == 0, False, {}

    def show(self):
        return self.np_random.integers(0, 256, self.observation_space.shape, np.uint8)


def flicker(padding, shape):
    return FrameStackObservation(Flicker(shape), 4, padding_type=padding)


def batch_of(mode, make, options):
    if mode == "serial":
        return SerialEnvs([make() for _ in range(3)], options)
    return VectorEnvs(SyncVectorEnv([make] * 3, autoreset_mode=AutoresetMode(mode)), options)


def messages_of(envs, rows, num_steps):
    schema = Schema(envs.obs_spec, envs.action_spec, rows)
    sampler, _ = sampler_over(envs, schema, seed=3)
    finished = [message for _ in range(num_steps) for message in sampler.step()]
    return schema, [message.buffer.columns for message in finished]


def shown(columns, name=""):
    """`[C, S, K, ...]`, as it would have been sent whole."""
    pairs = zip(columns.obs[name], columns.windows[name], strict=True)
    return np.stack([frames[window] for frames, window in pairs])


@pytest.mark.parametrize("rows", [1, 2, 5, 20])
@pytest.mark.parametrize("padding", ["zero", "reset"])
@pytest.mark.parametrize("mode", ["serial", "NextStep", "SameStep"])
@pytest.mark.parametrize("shape", [(4, 6), (3, 5), (2, 2, 2)], ids=str)
def test_nothing_is_lost(mode, padding, rows, shape):
    make = partial(flicker, padding, shape)
    _, whole = messages_of(batch_of(mode, make, EnvSection(id="some:Env")), rows, 60)
    schema, stacked = messages_of(batch_of(mode, make, STACKED), rows, 60)
    assert len(whole) == len(stacked) > 2
    assert any(not columns.mask_CT.all() for columns in stacked)
    for is_, was in zip(stacked, whole, strict=True):
        assert find_fault(schema, is_) is None
        assert np.array_equal(shown(is_), was.obs[""])
        assert np.array_equal(is_.actions[""], was.actions[""])
        assert np.array_equal(is_.rewards_CT, was.rewards_CT)
        assert np.array_equal(is_.mask_CT, was.mask_CT)


def writer_of(*rows):
    """One column whose frames are filled with these numbers."""
    writer = StackWriter(LEAF, filled(rows[0]))
    frames = np.full((1, 1 + 3 + 5, 2, 4), 77, np.uint8)
    windows = np.full((1, 6, 3), -1, np.int32)
    writer.begin(frames, windows)
    for number, row in enumerate(rows[1:], 1):
        writer.write(number, filled(row))
    return writer, frames, windows


def filled(row):
    return np.broadcast_to(np.uint8(row)[None, :, None, None], (1, 3, 2, 4)).copy()


def test_where_the_frames_are():
    _, frames, windows = writer_of([1, 2, 3], [2, 3, 4], [0, 0, 9], [0, 9, 8], [5, 5, 5])
    assert frames[0, :, 0, 0].tolist() == [0, 1, 2, 3, 4, 9, 8, 5, 77]
    assert windows[0].tolist() == [
        [1, 2, 3], [2, 3, 4], [0, 0, 5], [0, 5, 6], [7, 7, 7], [-1, -1, -1]
    ]  # fmt: skip


def test_old_frames_may_come_in_any_order_and_one_new_one():
    for row in ([1, 2, 9], [3, 2, 4], [3, 3, 3], [4, 0, 4]):
        _, frames, windows = writer_of([1, 2, 3], row)
        assert frames[0, windows[0, 1], 0, 0].tolist() == row
    says = r"^env\.frame_stack: the observation does not slide by one frame per step"
    for row in ([9, 8, 4], [9, 3, 4], [1, 9, 3]):
        with pytest.raises(EnvError, match=says):
            writer_of([1, 2, 3], row)


def test_other_leaves_are_sent_as_ever():
    class Both(Flicker):
        def __init__(self):
            super().__init__()
            image = Box(0, 255, (4, 2, 2), np.uint8)
            self.observation_space = Dict(image=image, number=Box(-1, 1, (2,)))

        def show(self):
            frame = np.full((4, 2, 2), self.left, np.uint8)
            return {"image": frame, "number": np.full(2, self.left / 10, np.float32)}

    _, (columns, *_) = messages_of(SerialEnvs([Both()], STACKED), 5, 12)
    assert columns.windows.keys() == {"image"}
    assert columns.obs["number"].shape == (1, 6, 2)
    image = shown(columns, "image")[0, :, 0, 0, 0]
    assert np.allclose(image / 10, columns.obs["number"][0, :, 0])
