"""Stand-ins for what surrounds a sampler: a policy without torch, buffers, weights."""

from typing import NamedTuple

import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from impala_async.actor.sampler import sampler_for
from impala_async.actor.unroll import MessageBuffer
from impala_async.weights import Version, Weights
from tests.columns import flat_schema


def schema_of(rows, num_obs=2, num_choices=2):
    return flat_schema(num_obs, num_choices, rows)


def weights_of(update):
    return Weights(Version(1, update), np.zeros(4, np.uint8))


class FakeAction(NamedTuple):
    actions: dict[str, NDArray[np.int32]]
    log_probs: NDArray[np.float32]
    state: dict[str, NDArray[np.float32]]


class FakePolicy:
    """Chooses by the observation alone, and says so in the log-probability too.

    `log_prob = -(update + 1) / 8 - sum(obs) / 1024`, so that both can be read back from a row.
    """

    def __init__(self, num_choices=2):
        self.num_choices = num_choices
        self.version = Version(1, 0)
        self.num_acts = 0
        self.loads = []

    def first_state(self, num_columns):
        return {}

    def new_generator(self):
        """Chance has no part in it."""

    def act(self, obs, state, rng):
        self.num_acts += 1
        flat = np.stack([a.reshape(len(a), -1).sum(1, dtype=np.float64) for a in obs.values()])
        total = flat.sum(0)
        actions = np.floor(np.abs(total) * 7).astype(np.int64) % self.num_choices
        log_probs = -(self.version.update + 1) / 8 - np.abs(total) / 1024
        return FakeAction({"": actions.astype(np.int32)}, log_probs.astype(np.float32), {})

    def load(self, weights):
        self.version = weights.version
        self.loads.append(weights.version)


def make_dirty(buffer):
    buffer.obs.fill(0xAB)
    buffer.small.fill(0xAB)
    return buffer


def sampler_over(
    envs, schema, policy=None, rng=None, *, take=None, newest=None, seed=0, cuts=None, num_agents=1
):
    """A sampler, with fakes for all that is not given; whatever a buffer is not written shows.
    `cuts`, if given, says after each step whether to cut."""
    width = 1 if envs.autoreset is AutoresetMode.SAME_STEP else envs.num_envs
    return sampler_for(envs)(
        schema,
        envs,
        policy or FakePolicy(),
        rng,
        take_buffer=take or (lambda: make_dirty(MessageBuffer(schema, width))),
        newest=newest or (lambda: None),
        seed=seed,
        num_agents=num_agents,
        is_to_cut=cuts and iter(cuts).__next__,
    )


class Row(NamedTuple):
    """One action row of one column, as plain numbers."""

    obs: tuple[float, ...]
    action: int
    log_prob: float
    reward: float
    terminated: bool
    truncated: bool
    mask: bool
    next_obs: tuple[float, ...]


def rows_of(columns, column):
    """The rows of one column of one message, next to the observation that follows each."""
    obs = [tuple(row.ravel().tolist()) for row in columns.obs[""][column]]
    return [
        Row(
            obs[t],
            int(columns.actions[""][column, t]),
            float(columns.log_probs_CT[column, t]),
            float(columns.rewards_CT[column, t]),
            bool(columns.terminated_CT[column, t]),
            bool(columns.truncated_CT[column, t]),
            bool(columns.mask_CT[column, t]),
            obs[t + 1],
        )
        for t in range(len(obs) - 1)
    ]


def streams_of(messages, num_columns):
    """All rows of each column, across messages of all columns."""
    streams = [[] for _ in range(num_columns)]
    for message in messages:
        for column, stream in enumerate(streams):
            stream += rows_of(message.buffer.columns, column)
    return streams
