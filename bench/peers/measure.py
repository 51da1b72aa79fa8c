"""The systems, each with its virtual environment, runner and algorithm, and how they are measured:
by their speed in a game, and by the time to solve CartPole."""

import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.paired import Sample
from bench.peers.one_turn import Turn, run_turn
from bench.peers.venvs import python_of

GOAL = 475.0
# The first seconds fill queues and caches, and are not counted.
WARM_S = 10.0
START_LIMIT_S = 180.0


@dataclass(frozen=True)
class System:
    """Somebody who trains. Without a virtual environment of its own it is this package."""

    name: str
    runner: str
    algorithm: str
    venv: str | None = None


OURS = System("impala_async", "run_ours", "impala")
SF = System("Sample Factory APPO", "run_sample_factory", "appo", "sf")
A2C = System("SB3 A2C", "run_sb3", "a2c", "sb3")
PPO = System("SB3 PPO", "run_sb3", "ppo", "sb3")
RLLIB_IMPALA = System("RLlib IMPALA", "run_rllib", "impala", "rllib")
RLLIB_APPO = System("RLlib APPO", "run_rllib", "appo", "rllib")
SYSTEMS = (OURS, SF, A2C, PPO, RLLIB_IMPALA, RLLIB_APPO)


def command_of(system: System, venvs: Path, game: str, seed: int) -> list[str]:
    python = python_of(venvs, system.venv) if system.venv else sys.executable
    return [str(python), "-m", f"bench.peers.{system.runner}", game, system.algorithm, str(seed)]


def speed(system: System, venvs: Path, game: str, seconds: float) -> Callable[[], Sample]:
    """A measurement of trained steps per second, start-up and memory, each time with a new seed."""
    seeds = itertools.count()

    def measure() -> Sample:
        turn = run_turn(
            command_of(system, venvs, game, next(seeds)),
            lambda turn: turn.has_trained(WARM_S + seconds),
            START_LIMIT_S + WARM_S + seconds,
        )
        return speed_of(turn, system.name)

    return measure


def speed_of(turn: Turn, name: str) -> Sample:
    start_s = turn.start_s()
    if start_s is None or not turn.has_trained(2 * WARM_S):
        raise RuntimeError(f"{name} has trained on nothing, or for too short, in the time it had")
    return {
        "per_s": turn.rate(WARM_S),
        "start_s": start_s,
        "rss_gb": turn.peak_bytes / 1e9,
    }


def solving(system: System, venvs: Path, limit_s: float) -> Callable[[], Sample]:
    """A measurement of the seconds to CartPole's goal, each time with the next seed."""
    seeds = itertools.count()

    def measure() -> Sample:
        turn = run_turn(
            command_of(system, venvs, "cartpole", next(seeds)),
            lambda turn: turn.reached_s(GOAL) is not None,
            limit_s,
        )
        reached_s = turn.reached_s(GOAL)
        in_time = reached_s is not None and reached_s <= limit_s
        return {"goal_s": reached_s if in_time and reached_s else limit_s, "in_time": in_time}

    return measure
