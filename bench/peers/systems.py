"""Who is measured: in which virtual environment, by which runner, with which of its algorithms."""

from dataclasses import dataclass


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
