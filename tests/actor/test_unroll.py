import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from impala_async.actor.unroll import MessageBuffer, Unroll
from impala_async.weights import Version
from tests.actor.fakes import Row, make_dirty, schema_of, streams_of
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

    def expected(self, n, c):
        obs, next_obs = (float(c), float(n)), (float(c), float(n + 1))
        if (n - 1, c) in self.ends:
            return Row(obs, 0, 0.0, 0.0, False, False, False, next_obs)
        flags = self.ends.get((n, c), NO)
        return Row(obs, n % 2, -0.5, float(n + 1), *flags, True, next_obs)


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
    episodes = [episode for message in driver.messages for episode in message.episodes]
    expected = []
    for n, column in sorted(ends):
        if n < num_sent:
            begin = max([m + 2 for m, c in ends if c == column and m < n], default=0)
            expected.append((float(sum(range(begin + 1, n + 2))), n - begin + 1))
    assert episodes == expected
