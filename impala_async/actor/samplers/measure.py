"""How long a stage takes to step all of its columns once, acting included: a round.

Runs on: sampler thread
"""

import resource
import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

from impala_async.actor.samplers.protocols import ActingPolicy, SamplerTimers
from impala_async.actor.samplers.stage import Stage
from impala_async.actor.sending import MessageBuffer
from impala_async.actor.worker import LookUp
from impala_async.spec import Schema

# A stage is played for so long; a round that takes longer is the only one.
BUDGET_S = 0.15
MAX_ROUNDS = 100
# Steps wait if the process computes for less than this share of their time.
WAIT_SHARE = 0.5


class Measured(NamedTuple):
    """Seconds of a round, how much of it environments and policy took, and whether the steps waited
    more than they computed."""

    round_s: float
    env_s: float
    act_s: float
    is_waiting: bool = False


class Play(NamedTuple):
    """What is needed to play a stage, besides the stage."""

    schema: Schema
    make_player: Callable[[str], tuple[ActingPolicy, Any]]
    """On a device: a policy, and the generator that it acts with."""
    look_up: LookUp


def measure(stage: Stage, play: Play) -> Measured:
    """Play with a stage's environments, which a later reset starts anew."""
    buffers = Scrap(play.schema)
    policy, rng = play.make_player(stage.device)
    sampler = stage.build_sampler(
        play.schema, policy, rng, buffers=buffers, newest=lambda: None, seed=0
    )
    rounds: list[float] = []
    spent: list[SamplerTimers] = []
    ends_at = time.monotonic() + BUDGET_S
    # The first one warms up. It may be all there is time for; of two groups it is not whole.
    least = len(stage.groups)
    cpu_s, num_sleeps = time.process_time(), _count_sleeps()
    while len(rounds) < least or (len(rounds) <= MAX_ROUNDS and time.monotonic() < ends_at):
        play.look_up()
        before = time.perf_counter()
        for _ in stage.groups:
            for finished in sampler.step():
                buffers.give_back(finished.buffer)
        rounds.append(time.perf_counter() - before)
        spent.append(sampler.timers.take())
    # A busy machine takes the processor away too, but then nothing here went to sleep.
    is_waiting = time.process_time() - cpu_s < WAIT_SHARE * sum(
        one.env_time_s for one in spent
    ) and _count_sleeps() - num_sleeps >= len(rounds)
    rounds, spent = rounds[1:] or rounds, spent[1:] or spent
    return Measured(
        median(rounds),
        median(one.env_time_s for one in spent),
        median(one.act_time_s for one in spent),
        is_waiting,
    )


def _count_sleeps() -> int:
    """How often this thread gave up its processor by itself."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


class Scrap:
    """Message buffers that nobody reads."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._free: list[MessageBuffer] = []

    def take(self, num_columns: int) -> MessageBuffer:
        return self._free.pop() if self._free else MessageBuffer(self._schema, num_columns)

    def give_back(self, buffer: MessageBuffer) -> None:
        self._free.append(buffer)
