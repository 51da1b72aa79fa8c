from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import FrameStackObservation
from hypothesis import given, settings
from hypothesis import strategies as st

from impala_async.actor.unroll import MessageBuffer, StackWriter, Unroll
from impala_async.config.env import EnvSection
from impala_async.envs.vector import SerialEnvs, VectorEnvs
from impala_async.errors import EnvError
from impala_async.schema import ArraySpec, Schema
from impala_async.weights import Version
from tests.actor.fakes import Row, make_dirty, rows_of, sampler_over, schema_of, streams_of
from tests.columns import find_fault

V1 = Version(1, 3)
NO = (False, False)


class Driver:
    """Feeds an `Unroll` of C columns with rows that can be told apart.

    Row n of column c shows (c, n), has reward n + 1 and action n % 2; where `ends` has flags for
    (n, c), the episode ends there. The row that it feeds after an end is deliberately wrong.
    """

    def __init__(self, schema, ends, c=2):
        self.schema, self.ends, self.num_columns = schema, ends, c
        self.unroll = Unroll(schema, self.obs(0))
        self.num_fed = 0
        self.messages = []

    def obs(self, n):
        return {"": np.array([(c, n) for c in range(self.num_columns)], np.float32)}

    def feed(self, num_rows, version=V1):
        for _ in range(num_rows):
            n = self.num_fed
            if self.unroll.needs_buffer:
                buffer = MessageBuffer(self.schema, self.num_columns)
                make_dirty(buffer)
                self.unroll.begin(buffer, version, {})
            flags = np.array([self.ends.get((n, c), NO) for c in range(self.num_columns)])
            is_after = np.array([(n - 1, c) in self.ends for c in range(self.num_columns)])
            flags |= is_after[:, None]
            actions = np.where(is_after, 1, n % 2).astype(np.int32)
            log_probs = np.where(is_after, np.nan, -0.5).astype(np.float32)
            rewards = np.where(is_after, np.nan, n + 1).astype(np.float32)
            rows = {"": actions}, log_probs, rewards, flags[:, 0], flags[:, 1], self.obs(n + 1)
            self.messages += self.unroll.append(*rows, is_after if is_after.any() else None)
            self.num_fed += 1

    @property
    def episodes(self):
        return [episode for message in self.messages for episode in message.episodes]

    def expected(self, n, c):
        obs, next_obs = (float(c), float(n)), (float(c), float(n + 1))
        if (n - 1, c) in self.ends:
            return Row(obs, 0, 0.0, 0.0, False, False, False, next_obs)
        flags = self.ends.get((n, c), NO)
        return Row(obs, n % 2, -0.5, float(n + 1), *flags, True, next_obs)


def episodes_of(ends, num_sent):
    """Those that a driver has finished when it has sent so many rows."""
    found = []
    for n, column in sorted(ends):
        if n < num_sent:
            begin = max([m + 2 for m, c in ends if c == column and m < n], default=0)
            found.append((float(sum(range(begin + 1, n + 2))), n - begin + 1))
    return found


def test_the_bootstrap_row_survives_its_source():
    obs, no = {"": np.ones((1, 2), np.float32)}, np.array([False])
    number, action = np.zeros(1, np.float32), {"": np.zeros(1, np.int32)}
    unroll = Unroll(schema_of(rows=1), obs)
    buffers = [MessageBuffer(schema_of(rows=1), 1) for _ in range(2)]
    unroll.begin(buffers[0], V1, {})
    unroll.append(action, number, number, no, no, obs)
    obs[""].fill(7)
    buffers[0].obs.fill(0)
    unroll.begin(buffers[1], V1, {})
    assert buffers[1].columns.obs[""][0, 0].tolist() == [1, 1]


def test_returns_are_summed_in_double_precision():
    schema, num_rows = schema_of(rows=1), 3000
    obs = {"": np.zeros((1, 2), np.float32)}
    unroll = Unroll(schema, obs)
    one = {"": np.zeros(1, np.int32)}
    number, no, yes = np.zeros(1, np.float32), np.array([False]), np.array([True])
    reward = np.array([1e6 + 0.25], np.float32)
    buffer = MessageBuffer(schema, 1)
    for n in range(num_rows):
        unroll.begin(buffer, V1, {})
        (message,) = unroll.append(one, number, reward, yes if n == num_rows - 1 else no, no, obs)
    assert message.episodes == [(num_rows * (1e6 + 0.25), num_rows)]


@st.composite
def scripts(draw):
    """T, C, rows to feed, and ends, none of them on the row that follows another."""
    num_rows, num_columns = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    num_fed = draw(st.integers(1, 25))
    flags = st.sampled_from([NO, NO, (True, False), (False, True), (True, True)])
    ends = {}
    for column in range(num_columns):
        for n in range(num_fed):
            drawn = draw(flags)
            if drawn != NO and (n - 1, column) not in ends:
                ends[n, column] = drawn
    return num_rows, num_columns, num_fed, ends


@given(scripts())
@settings(max_examples=150, deadline=None)
def test_any_script_becomes_the_rows_that_it_was(script):
    num_rows, num_columns, num_fed, ends = script
    driver = Driver(schema_of(num_rows), ends, num_columns)
    for update in range(num_fed):
        driver.feed(1, Version(1, update))
    assert [m.version.update for m in driver.messages] == [*range(0, num_fed, num_rows)][
        : len(driver.messages)
    ]
    num_sent = num_fed // num_rows * num_rows
    assert len(driver.messages) == num_fed // num_rows
    assert all(find_fault(driver.schema, m.buffer.columns) is None for m in driver.messages)
    for column, stream in enumerate(streams_of(driver.messages, num_columns)):
        assert stream == [driver.expected(n, column) for n in range(num_sent)]
    assert driver.episodes == episodes_of(ends, num_sent)


# -------------------- cut


def padding(obs):
    """A row behind a cut: it shows what was there."""
    return Row(obs, 0, 0.0, 0.0, False, False, False, obs)


@pytest.mark.parametrize(
    ("ends", "flags"),
    [
        ({}, [(False, True), (False, True)]),
        # Column 0 ends in the last row before the cut, or in the one before: then that is no row.
        ({(2, 0): (True, False)}, [(True, False), (False, True)]),
        ({(2, 0): (False, True)}, [(False, True), (False, True)]),
        ({(2, 0): (True, True)}, [(True, True), (False, True)]),
        ({(1, 0): (True, False)}, [(False, False), (False, True)]),
    ],
)
def test_a_cut_is_a_truncation_and_its_rest_is_masked(ends, flags):
    driver = Driver(schema_of(8), ends)
    driver.feed(1)
    # It has too few rows.
    assert driver.unroll.cut() == []
    driver.feed(2)
    (cut,) = driver.unroll.cut()
    assert (cut.num_cut, cut.version, driver.unroll.needs_buffer) == (5, V1, True)
    assert find_fault(driver.schema, cut.buffer.columns) is None
    assert driver.unroll.cut() == []
    driver.feed(8)
    (after,) = driver.messages
    assert after.num_cut == 0
    for column, (terminated, truncated) in enumerate(flags):
        *before, last = (driver.expected(n, column) for n in range(3))
        last = last._replace(terminated=terminated, truncated=truncated)
        rest = [padding((float(column), 3.0))] * 5
        assert rows_of(cut.buffer.columns, column) == [*before, last, *rest]
        # The next one begins where it stopped.
        expected = [driver.expected(n, column) for n in range(3, 11)]
        assert rows_of(after.buffer.columns, column) == expected


@pytest.mark.parametrize(("num_rows", "least"), [(1, 1), (2, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_a_quarter_of_the_rows_is_enough_for_a_cut(num_rows, least):
    driver = Driver(schema_of(num_rows), {})
    for _ in range(least - 1):
        driver.feed(1)
        assert driver.unroll.cut() == []
    driver.feed(1)
    # With all of its rows it is no longer there.
    assert [cut.num_cut for cut in driver.unroll.cut()] == [num_rows - least] * (num_rows > 1)


@given(scripts(), st.data())
@settings(max_examples=100, deadline=None)
def test_wherever_it_is_cut_no_row_is_lost_and_episodes_go_on(script, data):
    num_rows, num_columns, num_fed, ends = script
    driver = Driver(schema_of(num_rows), ends, num_columns)
    for _ in range(num_fed):
        driver.feed(1)
        if data.draw(st.booleans()):
            driver.messages += driver.unroll.cut()
    n = 0
    for message in driver.messages:
        assert find_fault(driver.schema, message.buffer.columns) is None
        num_valid = num_rows - message.num_cut
        for column in range(num_columns):
            expected = [driver.expected(n + t, column) for t in range(num_valid)]
            if message.num_cut and expected[-1].mask and not expected[-1].terminated:
                expected[-1] = expected[-1]._replace(truncated=True)
            expected += [padding((float(column), float(n + num_valid)))] * message.num_cut
            assert rows_of(message.buffer.columns, column) == expected
        n += num_valid
    assert driver.episodes == episodes_of(ends, n)


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


def batch_of(mode, make, options):
    if mode == "serial":
        return SerialEnvs([make() for _ in range(3)], options)
    return VectorEnvs(SyncVectorEnv([make] * 3, autoreset_mode=AutoresetMode(mode)), options)


def messages_of(envs, rows, num_steps, cuts=None):
    schema = Schema(envs.obs_spec, envs.action_spec, rows)
    sampler = sampler_over(envs, schema, seed=3, cuts=cuts)
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
@pytest.mark.parametrize("cut_every", [0, 7])
def test_nothing_is_lost(mode, padding, rows, shape, cut_every):
    def make():
        return FrameStackObservation(Flicker(shape), 4, padding_type=padding)

    cuts = [n % cut_every == 0 for n in range(60)] if cut_every else None
    _, whole = messages_of(batch_of(mode, make, EnvSection(id="some:Env")), rows, 60, cuts)
    schema, stacked = messages_of(batch_of(mode, make, STACKED), rows, 60, cuts)
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


def test_frames_are_compared_with_those_before_whatever_their_memory_order():
    # As a screen of pygame lies in memory: height and width are changed over.
    rows = [np.full((1, 3, 4, 2), n, np.uint8).swapaxes(2, 3) for n in (1, 2)]
    writer = StackWriter(LEAF, rows[0])
    frames, windows = np.zeros((1, 8, 2, 4), np.uint8), np.zeros((1, 4, 3), np.int32)
    writer.begin(frames, windows)
    # The last one repeats the first, as behind a reset: it does not slide from the one before.
    for row, obs in enumerate((rows[1], rows[0]), 1):
        writer.write(row, obs)
        np.testing.assert_array_equal(frames[0, windows[0, row]], obs[0])


def test_old_frames_may_come_in_any_order_and_one_new_one():
    for row in ([1, 2, 9], [3, 2, 4], [3, 3, 3], [4, 0, 4]):
        _, frames, windows = writer_of([1, 2, 3], row)
        assert frames[0, windows[0, 1], 0, 0].tolist() == row
    says = r"^env\.frame_stack: the observation does not slide by one frame per step"
    for row in ([9, 8, 4], [9, 3, 4], [1, 9, 3]):
        with pytest.raises(EnvError, match=says):
            writer_of([1, 2, 3], row)
