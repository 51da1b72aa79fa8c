"""Which state acts at each row, and which travels with each trajectory.

The policy here has a state that counts the rows of an episode: it adds 1 with every act, says in
its log-probability what it was given, and so both can be read back from a message.
"""

from typing import NamedTuple

import numpy as np
import pytest

from bench.probes import Counting, CountingVector
from impala_async.config.policies import PoliciesSection
from impala_async.envs.agents import AgentEnvs
from impala_async.envs.vector import SerialEnvs, VectorEnvs
from impala_async.schema import ArraySpec, Schema
from impala_async.weights import Version
from tests.actor.fakes import FakeAction, sampler_over
from tests.envs.test_agents import Lives

STATE = (ArraySpec("hidden", (2,), "float32"), ArraySpec("cell", (), "float32"))
LENGTHS = (1, 2, 3, 7)


class CountingPolicy:
    """Remembers how many rows it has seen of an episode."""

    version = Version(1, 0)

    def first_state(self, num_columns):
        return {spec.name: np.zeros((num_columns, *spec.shape), np.float32) for spec in STATE}

    def act(self, obs, state, rng):
        seen = state["cell"].copy()
        np.testing.assert_array_equal(state["hidden"], np.stack([seen, -seen], -1))
        after = {"hidden": state["hidden"] + (1, -1), "cell": state["cell"] + 1}
        actions = {"": np.zeros(len(seen), np.int32)}
        return FakeAction(actions, -seen, {k: v.astype(np.float32) for k, v in after.items()})

    def load(self, weights):
        raise AssertionError("nobody sent any")


class Seen(NamedTuple):
    """A row: how many rows of the episode were there before it, as acting and the state say."""

    before: int
    acted: int | None
    is_valid: bool


def run(mode, rows, num_steps=60, cuts=None):
    """The trajectories of each column: the state that travelled with it, and its rows."""
    serials = mode == "serial"
    if serials:
        envs = SerialEnvs([Counting(length) for length in LENGTHS])
    else:
        envs = VectorEnvs(CountingVector(len(LENGTHS), LENGTHS, autoreset=mode))
    schema = Schema(envs.obs_spec, envs.action_spec, rows, STATE)
    sampler = sampler_over(envs, schema, CountingPolicy(), cuts=cuts)
    found = [[] for _ in LENGTHS]
    for message in [message for _ in range(num_steps) for message in sampler.step()]:
        for place in range(message.buffer.num_columns):
            column = place if serials else int(message.buffer.columns.obs[""][place, 0, 0])
            found[column].append(read(message, place))
    return found


def read(message, place):
    columns = message.buffer.columns
    state = float(columns.state["cell"][place])
    assert columns.state["hidden"][place].tolist() == [state, -state]
    rows = []
    num_rows = len(columns.mask_CT[place]) - message.num_cut
    arrays = columns.obs[""], columns.log_probs_CT, columns.mask_CT
    # The last number of an observation counts the steps of its episode.
    for obs, log_prob, is_valid in zip(*(array[place][:num_rows] for array in arrays), strict=True):
        acted = -round(float(log_prob)) if is_valid else None
        rows.append(Seen(int(obs[-1]), acted, bool(is_valid)))
    return int(state), rows


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "serial"])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("cut_every", [0, 5])
def test_a_row_is_acted_with_what_its_episode_left_and_so_is_row_0(mode, rows, cut_every):
    """Also where trajectories are cut: what is remembered goes on in the next one."""
    num_masked = 0
    cuts = [n % cut_every == 0 for n in range(60)] if cut_every else None
    for column, trajectories in enumerate(run(mode, rows, cuts=cuts)):
        seen = [row for _, stream in trajectories for row in stream]
        # With one row a step may only hand over what beginning has completed.
        assert len(seen) >= (30 if rows == 1 else 50)
        for row in seen:
            # As many rows as its episode had before it: none at its first, and after a reset.
            assert row.acted == (row.before if row.is_valid else None)
        assert {row.before for row in seen if row.is_valid} == set(range(LENGTHS[column]))
        # The state before row 0 travels, the old episode's where it shows its last observation.
        for state, (first, *_) in trajectories:
            assert state == first.before
            assert first.is_valid or state == LENGTHS[column]
            num_masked += not first.is_valid
    assert num_masked > 0


class Watched(CountingPolicy):
    """Notes for each act who played, the step of the episode, and the rows remembered."""

    def __init__(self):
        self.noted = []

    def act(self, obs, state, rng):
        numbers = obs["policy"], obs[""][:, -1], state["cell"]
        self.noted += list(zip(*(array.astype(int).tolist() for array in numbers), strict=True))
        return super().act(obs, state, rng)


@pytest.mark.parametrize("rows", [1, 4, 5])
def test_who_is_not_trained_remembers_and_is_masked(rows):
    pair = PoliciesSection(names=("main", "past"), copies={"past": "main"}, copy_every_updates=1)
    envs = AgentEnvs([Lives((3, 3)), Lives((3, 3))], policies=pair)
    schema = Schema(envs.obs_spec, envs.action_spec, rows, STATE, pair.names)
    policy = Watched()
    sampler = sampler_over(envs, schema, policy)
    messages = [message for _ in range(60) for message in sampler.step()]
    # The player has seen as many rows as the episode has had, the one after its end included.
    assert {who for who, _, _ in policy.noted} == {0, 1}
    assert all(step == remembered for _, step, remembered in policy.noted)
    num_valid = 0
    for message in messages:
        columns = message.buffer.columns
        is_own = columns.obs["policy"][:, :-1] == 0
        is_final = columns.obs[""][:, :-1, -1] == 3
        np.testing.assert_array_equal(columns.mask_CT, is_own & ~is_final)
        rewards = np.where(columns.mask_CT, columns.obs[""][:, 1:, -1], 0)
        np.testing.assert_array_equal(columns.rewards_CT, rewards)
        assert not (columns.terminated_CT & ~columns.mask_CT).any()
        assert not columns.log_probs_CT[~columns.mask_CT].any()
        num_valid += int(columns.mask_CT.sum())
        # An episode of one that is not trained is none.
        assert all(episode == (6.0, 3) for episode in message.episodes)
    assert num_valid == 60 * 2 * 3 // 4
    assert sum(len(message.episodes) for message in messages) == 60 * 2 // 4
