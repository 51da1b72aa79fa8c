"""Which state acts at each row, and which travels with each trajectory.

The policy here has a state that counts the rows of an episode: it adds 1 with every act, says in
its log-probability what it was given, and so both can be read back from a message.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from impala_async.actor.samplers.build import build_sampler
from impala_async.actor.unroll import Finished
from impala_async.envs.probes import Counting, CountingVector
from impala_async.envs.vector import EnvBatch, SerialEnvs, VectorEnvs
from impala_async.spec import ArraySpec, Schema
from impala_async.weights import Version, Weights
from tests.actor.fakes import FakeAction, FakeBuffers, NoNews

STATE = (ArraySpec("hidden", (2,), "float32"), ArraySpec("cell", (), "float32"))
LENGTHS = (1, 2, 3, 7)


class CountingPolicy:
    """Remembers how many rows it has seen of an episode."""

    version = Version(1, 0)

    def first_state(self, num_columns: int) -> dict[str, NDArray[np.float32]]:
        return {spec.name: np.zeros((num_columns, *spec.shape), np.float32) for spec in STATE}

    def act(
        self, obs: dict[str, NDArray[Any]], state: Mapping[str, NDArray[np.float32]], rng: Any
    ) -> FakeAction:
        seen = state["cell"].copy()
        np.testing.assert_array_equal(state["hidden"], np.stack([seen, -seen], -1))
        after = {"hidden": state["hidden"] + (1, -1), "cell": state["cell"] + 1}
        actions = {"": np.zeros(len(seen), np.int32)}
        return FakeAction(actions, -seen, {k: v.astype(np.float32) for k, v in after.items()})

    def load(self, weights: Weights) -> None:
        raise AssertionError("nobody sent any")


class Seen(NamedTuple):
    """A row: how many rows of the episode were there before it, as acting and the state say."""

    before: int
    acted: int | None
    is_valid: bool


def envs_of(mode: str) -> EnvBatch:
    if mode == "serial":
        return SerialEnvs([Counting(length) for length in LENGTHS])
    return VectorEnvs(CountingVector(len(LENGTHS), LENGTHS, autoreset=mode))


def run(mode: str, rows: int, num_steps: int = 60) -> list[list[tuple[int, list[Seen]]]]:
    """Of each column its trajectories: the state that travelled with it, and its rows."""
    envs = envs_of(mode)
    schema = Schema(envs.obs_spec, envs.action_spec, rows, STATE)
    buffers = FakeBuffers(schema)
    sampler = build_sampler(
        schema, envs, CountingPolicy(), None, buffers=buffers, newest=NoNews(), seed=0
    )
    found: list[list[tuple[int, list[Seen]]]] = [[] for _ in LENGTHS]
    serials = mode == "serial"
    for message in [message for _ in range(num_steps) for message in sampler.step()]:
        for place in range(message.buffer.num_columns):
            column = place if serials else int(message.buffer.columns.obs[""][place, 0, 0])
            found[column].append(read(message, place))
    return found


def read(message: Finished, place: int) -> tuple[int, list[Seen]]:
    columns = message.buffer.columns
    state = float(columns.state["cell"][place])
    assert columns.state["hidden"][place].tolist() == [state, -state]
    rows = []
    # The last number of an observation counts the steps of its episode.
    for obs, log_prob, is_valid in zip(
        columns.obs[""][place], columns.log_probs_CT[place], columns.mask_CT[place], strict=False
    ):
        acted = -round(float(log_prob)) if is_valid else None
        rows.append(Seen(int(obs[-1]), acted, bool(is_valid)))
    return int(state), rows


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "serial"])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8])
def test_a_row_is_acted_with_what_its_episode_left(mode: str, rows: int) -> None:
    for column, trajectories in enumerate(run(mode, rows)):
        seen = [row for _, stream in trajectories for row in stream]
        assert len(seen) >= 50
        assert {row.is_valid for row in seen} == {True, False}
        for row in seen:
            # As many rows as its episode had before it: none at its first, and after a reset.
            assert row.acted == (row.before if row.is_valid else None)
        assert {row.before for row in seen if row.is_valid} == set(range(LENGTHS[column]))


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "serial"])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8])
def test_the_state_before_row_0_travels(mode: str, rows: int) -> None:
    """Zero where row 0 begins an episode; the old episode's where it shows its last observation."""
    num_masked = 0
    for column, trajectories in enumerate(run(mode, rows)):
        for state, stream in trajectories:
            assert state == stream[0].before
            if not stream[0].is_valid:
                assert state == LENGTHS[column]
                num_masked += 1
    assert num_masked > 0


def test_both_ways_to_reset_give_the_same_states() -> None:
    for ours, theirs in zip(run("NextStep", 4), run("SameStep", 4), strict=True):
        num_common = min(len(ours), len(theirs))
        assert num_common >= 14
        assert ours[:num_common] == theirs[:num_common]


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_a_message_keeps_its_state_while_acting_goes_on(mode: str) -> None:
    envs = VectorEnvs(CountingVector(1, (50,), autoreset=mode))
    schema = Schema(envs.obs_spec, envs.action_spec, 4, STATE)
    sampler = build_sampler(
        schema, envs, CountingPolicy(), None, buffers=FakeBuffers(schema), newest=NoNews(), seed=0
    )
    messages = [message for _ in range(20) for message in sampler.step()]
    states = [float(message.buffer.columns.state["cell"][0]) for message in messages]
    assert states == [0, 4, 8, 12, 16]
