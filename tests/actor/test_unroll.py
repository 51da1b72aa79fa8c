import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from impala_async.actor.unroll import MessageBuffer, Unroll
from impala_async.schema import ActionPart, ActionSpec, ArraySpec, ObsSpec, Schema
from impala_async.trajectory import columns_over
from impala_async.weights import Version
from tests.actor.fakes import Row, make_dirty, rows_of, schema_of, streams_of
from tests.columns import find_fault

V1 = Version(1, 3)
NO = (False, False)


class Driver:
    """Feeds an `Unroll` of C columns with rows that can be told apart.

    Row n of column c shows (c, n), has reward n + 1 and action n % 2; where `ends` has flags for
    (n, c), the episode ends there. What it feeds for a row after an end is deliberately wrong.
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
                self.unroll.begin(buffer, version)
            flags = np.array([self.ends.get((n, c), NO) for c in range(self.num_columns)])
            is_after = np.array([(n - 1, c) in self.ends for c in range(self.num_columns)])
            flags |= is_after[:, None]
            actions = np.where(is_after, 1, n % 2).astype(np.int32)
            log_probs = np.where(is_after, np.nan, -0.5).astype(np.float32)
            rewards = np.where(is_after, np.nan, n + 1).astype(np.float32)
            self.messages += self.unroll.append(
                {"": actions}, log_probs, rewards, flags[:, 0], flags[:, 1], self.obs(n + 1)
            )
            self.num_fed += 1

    def expected(self, n, c):
        obs, next_obs = (float(c), float(n)), (float(c), float(n + 1))
        if (n - 1, c) in self.ends:
            return Row(obs, 0, 0.0, 0.0, False, False, False, next_obs)
        flags = self.ends.get((n, c), NO)
        return Row(obs, n % 2, -0.5, float(n + 1), *flags, True, next_obs)


def test_a_message_buffer_is_the_planes_of_its_columns():
    schema = schema_of(rows=4)
    buffer = MessageBuffer(schema, 3)
    layout = schema.layout
    assert buffer.obs.shape == (3, layout.obs_bytes)
    assert buffer.small.shape == (3, layout.small_bytes)
    assert buffer.num_columns == 3
    assert not buffer.obs.any()
    assert not buffer.small.any()
    buffer.rewards_TC[2][1] = 7
    buffer.obs_SC[""][4][1] = 5
    again = columns_over(schema, buffer.obs, buffer.small)
    assert again.rewards_CT[1, 2] == 7
    assert again.obs[""][1, 4].tolist() == [5, 5]
    assert again.rewards_CT.sum() == 7


def test_the_bootstrap_row_survives_its_source():
    obs, no = {"": np.ones((1, 2), np.float32)}, np.array([False])
    number, action = np.zeros(1, np.float32), {"": np.zeros(1, np.int32)}
    unroll = Unroll(schema_of(rows=1), obs)
    buffers = [MessageBuffer(schema_of(rows=1), 1) for _ in range(2)]
    unroll.begin(buffers[0], V1)
    unroll.append(action, number, number, no, no, obs)
    obs[""].fill(7)
    buffers[0].obs.fill(0)
    unroll.begin(buffers[1], V1)
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
        unroll.begin(buffer, V1)
        (message,) = unroll.append(one, number, reward, yes if n == num_rows - 1 else no, no, obs)
    assert message.episodes == [(num_rows * (1e6 + 0.25), num_rows)]


def test_a_buffer_that_comes_back_is_written_anew():
    schema = schema_of(rows=3)
    buffer = MessageBuffer(schema, 1)
    obs = {"": np.ones((1, 2), np.float32)}
    unroll = Unroll(schema, obs)
    number, no, yes = np.full(1, -1, np.float32), np.array([False]), np.array([True])
    messages = []
    for is_over in (True, False):
        unroll.begin(buffer, V1)
        for _ in range(3):
            flag = yes if is_over else no
            done = unroll.append({"": np.ones(1, np.int32)}, number, number, flag, flag, obs)
        messages.append((done[0].episodes, rows_of(done[0].buffer.columns, 0)))
    episodes, rows = messages[0]
    assert episodes == [(-1.0, 1), (-1.0, 1)]
    assert [row.mask for row in rows] == [True, False, True]
    episodes, rows = messages[1]
    assert episodes == []
    assert [row.mask for row in rows] == [False, True, True]
    assert not any(row.terminated or row.truncated for row in rows)


def test_a_finished_buffer_is_not_touched_any_more():
    driver = Driver(schema_of(rows=2), {(1, 0): (True, False)})
    driver.feed(2)
    buffer = driver.messages[0].buffer
    before = buffer.obs.tobytes(), buffer.small.tobytes()
    driver.feed(5)
    assert (buffer.obs.tobytes(), buffer.small.tobytes()) == before


def test_initial_state_and_several_leaves_are_written():
    schema = Schema(
        ObsSpec((ArraySpec("a/b", (2, 3), "uint8"), ArraySpec("z", (), "int64"))),
        ActionSpec((ActionPart("x", "discrete", (2,)), ActionPart("y", "discrete", (3,)))),
        rows=2,
        state=(ArraySpec("core", (4,), "float32"),),
    )

    def obs(n):
        return {"a/b": np.full((2, 2, 3), n, np.uint8), "z": np.array([n, -n])}

    unroll = Unroll(schema, obs(0))
    buffer = MessageBuffer(schema, 2)
    state = np.arange(8, dtype=np.float32).reshape(2, 4)
    unroll.begin(buffer, V1, {"core": state})
    ending = np.array([True, False])
    no = np.zeros(2, np.bool_)
    for n in range(2):
        actions = {"x": np.array([1, 1], np.int32), "y": np.array([2, 2], np.int32)}
        number = np.zeros(2, np.float32)
        unroll.append(actions, number, number, no if n else ending, no, obs(n + 1))
    np.testing.assert_array_equal(buffer.columns.state["core"], state)
    assert buffer.columns.obs["a/b"][1, :, 0, 0].tolist() == [0, 1, 2]
    assert buffer.columns.obs["z"].tolist() == [[0, 1, 2], [0, -1, -2]]
    assert buffer.columns.actions["x"].tolist() == [[1, 0], [1, 1]]
    assert buffer.columns.actions["y"].tolist() == [[2, 0], [2, 2]]


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
    episodes = [episode for message in driver.messages for episode in message.episodes]
    expected = []
    for n, column in sorted(ends):
        if n < num_sent:
            begin = max([m + 2 for m, c in ends if c == column and m < n], default=0)
            expected.append((float(sum(range(begin + 1, n + 2))), n - begin + 1))
    assert episodes == expected


@pytest.mark.parametrize("rows", [1, 3, 4, 20])
def test_rows_in_which_a_column_only_waits_are_masked(rows):
    """Column 1 ends at row 1 and waits with rows 2 to 4 for the others; row 4 resets both."""
    unroll, messages = Unroll(schema_of(rows), {"": np.zeros((2, 2), np.float32)}), []
    ends = {(1, 1), (3, 0)}
    for n in range(20):
        if unroll.needs_buffer:
            unroll.begin(MessageBuffer(schema_of(rows), 2), V1)
        terminated = np.array([(n, c) in ends for c in range(2)])
        idle = np.array([n == 4, n in (2, 3, 4)])
        messages += unroll.append(
            {"": np.ones(2, np.int32)},
            np.full(2, -1.0, np.float32),
            np.full(2, 5.0, np.float32),
            terminated,
            np.zeros(2, np.bool_),
            {"": np.full((2, 2), n + 1, np.float32)},
            idle if idle.any() else None,
        )
    mask = np.concatenate([m.buffer.columns.mask_CT for m in messages], axis=1)
    num_rows = mask.shape[1]
    waits = {0: {4}, 1: {2, 3, 4}}
    for c in range(2):
        assert set(np.flatnonzero(~mask[c]).tolist()) == {n for n in waits[c] if n < num_rows}
    episodes = [tuple(e) for m in messages for e in m.episodes]
    assert sorted(episodes) == [(10.0, 2), (20.0, 4)]
