"""Two groups of columns, one message each; while one steps, the policy acts for the other."""

import itertools

import numpy as np
import pytest

from bench.probes import CountingVector
from impala_async.actor.samplers.setup import Setup
from impala_async.actor.sending import MessageBuffer
from impala_async.actor.workers import Workers
from impala_async.envs.make import build_envs
from impala_async.envs.vector import VectorEnvs
from impala_async.schema import Schema
from impala_async.weights import Version
from tests.actor.fakes import FakeBuffers, FakePolicy, NoNews, rows_of, weights_of
from tests.actor.worlds import play, section

LENGTHS = (3, 5)


class Split(VectorEnvs):
    """Steps when it is waited for, and writes down who did what."""

    def __init__(self, name, diary, mode="NextStep"):
        super().__init__(CountingVector(2, LENGTHS, autoreset=mode))
        self._me, self._diary = name, diary
        self.num_closed = 0

    def send(self, actions):
        self._diary.append(f"{self._me} begins")
        self._actions = actions

    def receive(self):
        self._diary.append(f"{self._me} ends")
        return self.step(self._actions)

    def reset(self, seed, first_env=0):
        return super().reset(seed, first_env)

    def close(self):
        self.num_closed += 1


class Diarist(FakePolicy):
    def __init__(self, diary):
        super().__init__()
        self._diary = diary

    def act(self, obs, state, rng):
        self._diary.append("act")
        return super().act(obs, state, rng)


class Rig:
    def __init__(self, rows, mode="NextStep", newest=None):
        self.diary = []
        self.groups = [Split("A", self.diary, mode), Split("B", self.diary, mode)]
        first = self.groups[0]
        self.schema = Schema(first.obs_spec, first.action_spec, rows)
        self.policy = Diarist(self.diary)
        self.sampler = Setup("alternating", self.groups).build_sampler(
            self.schema,
            self.policy,
            None,
            buffers=FakeBuffers(self.schema),
            newest=newest or NoNews(),
            seed=0,
        )

    def run(self, num_calls):
        return [message for _ in range(num_calls) for message in self.sampler.step()]


def test_while_one_group_steps_the_policy_acts_for_the_other():
    rig = Rig(rows=4)
    rig.run(4)
    assert rig.diary == [
        *("act", "A begins"),
        *("act", "B begins", "A ends"),
        *("act", "A begins", "B ends"),
        *("act", "B begins", "A ends"),
    ]


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_each_group_has_the_rows_that_it_has_alone(mode):
    found = Rig(rows=4, mode=mode).run(81)
    alone = play(VectorEnvs(CountingVector(2, LENGTHS, autoreset=mode)), 40, rows=4, seed=0)
    width = found[0].buffer.num_columns
    # Per group and column, since both groups show the same columns.
    expected = [row for message in alone for column in range(width)
                for row in rows_of(message.buffer.columns, column)]  # fmt: skip
    rows = [rows_of(message.buffer.columns, c) for message in found for c in range(width)]
    assert sorted(row for part in rows for row in part) == sorted(expected * 2)
    for part in rows:
        for row, following in itertools.pairwise(part):
            assert row.next_obs == following.obs


def test_a_call_brings_the_message_of_one_group_at_most():
    rig = Rig(rows=3)
    brought = [len(rig.sampler.step()) for _ in range(13)]
    assert brought == [*[0] * 5, 1, 1, *[0] * 4, 1, 1]
    assert rig.sampler.timers.take().num_steps == 12
    assert rig.sampler.timers.env_time_s == 0


class Releases:
    """New weights whenever they are asked for."""

    def __init__(self):
        self.update = 0

    def __call__(self):
        self.update += 1
        return weights_of(self.update)


def test_both_groups_swap_together_and_never_within_a_trajectory():
    releases = Releases()
    rig = Rig(rows=3, newest=releases)
    messages = rig.run(3 * 2 * 5 + 1)
    assert [message.version for message in messages] == [
        Version(1, update) for update in (1, 1, 2, 2, 3, 3, 4, 4, 5, 5)
    ]
    for message in messages:
        columns = message.buffer.columns
        acted = np.floor(-8 * columns.log_probs_CT[columns.mask_CT]) - 1
        assert {*acted.tolist()} == {message.version.update}


class TwoBuffers:
    def __init__(self, schema):
        self.idle = [MessageBuffer(schema, 2) for _ in range(2)]

    def take(self, num_columns):
        assert self.idle, "a sampler must not hold a message back while it waits for a buffer"
        return self.idle.pop()


def test_a_buffer_per_group_is_enough():
    diary = []
    groups = [Split("A", diary), Split("B", diary)]
    schema = Schema(groups[0].obs_spec, groups[0].action_spec, 2)
    buffers = TwoBuffers(schema)
    sampler = Setup("alternating", groups).build_sampler(
        schema, FakePolicy(), None, buffers=buffers, newest=NoNews(), seed=0
    )
    for _ in range(30):
        buffers.idle += [message.buffer for message in sampler.step()]


def test_closing_it_closes_both_groups():
    rig = Rig(rows=3)
    rig.run(4)
    rig.sampler.close()
    assert [group.num_closed for group in rig.groups] == [1, 1]


def test_over_workers_it_has_the_trajectories_of_one_process():
    env = section("Masked")
    groups = Workers("alternating", env, 6, 4).halves()
    schema = Schema(groups[0].obs_spec, groups[0].action_spec, 8)
    sampler = Setup("alternating", groups).build_sampler(
        schema, FakePolicy(3), None, buffers=FakeBuffers(schema), newest=NoNews(), seed=3
    )
    halves = [[], []]
    for call in range(8 * 2 * 5 + 1):
        for message in sampler.step():
            halves[1 - call % 2].append(message)
    sampler.close()
    expected = play(build_envs("serial", env, 6), 40)
    assert [len(half) for half in halves] == [5, 5]
    for number, whole in enumerate(expected):
        for half, columns in enumerate((slice(0, 3), slice(3, 6))):
            found = halves[half][number].buffer
            np.testing.assert_array_equal(found.obs, whole.buffer.obs[columns])
            np.testing.assert_array_equal(found.small, whole.buffer.small[columns])
