"""This package, through its door: `python -m bench.peers.run_ours GAME impala SEED`.

Tells what the metrics of the run say, when they are written: up to a quarter of a second late.
"""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.peers.one_turn import Tail
from bench.peers.say import say

CONFIGS = Path(__file__).parents[2] / "configs"
CONFIG = {"cartpole": CONFIGS / "cartpole.toml", "pong": CONFIGS / "atari.toml"}
# The reader ends a turn, ours as everybody's.
SETTINGS = ["stop.mean_return=none", "stop.env_steps=none", "learner.report_every_s=0.25"]
POLL_S = 0.05


def main() -> int:
    game, _, seed = sys.argv[1:]
    return train_and_say([*SETTINGS, f"seed={seed}"], "--config", str(CONFIG[game]))


def train_and_say(settings: Sequence[str], *flags: str) -> int:
    """Train to the end, and tell each report; the exit code."""
    given = [part for each in settings for part in ("--set", each)]
    command = [sys.executable, "-m", "impala_async.train", *flags, "--run-dir", "run", *given]
    with subprocess.Popen(command) as training:
        metrics, has_ended = Tail(Path("run/metrics.jsonl")), False
        while not has_ended:
            time.sleep(POLL_S)
            # Asked before: the last report is written before the end.
            has_ended = training.poll() is not None
            for report in map(json.loads, metrics.new_lines()):
                say(report["env_steps_trained"], report["mean_return_100"])
    return training.returncode


if __name__ == "__main__":
    sys.exit(main())
