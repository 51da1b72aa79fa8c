"""This package, through its door: `python -m bench.peers.run_ours GAME impala SEED`.

Tells what the metrics of the run say, when they are written: up to a quarter of a second late.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

from bench.peers.one_turn import Tail
from bench.peers.say import say

CONFIGS = Path(__file__).parents[2] / "configs"
CONFIG = {"cartpole": CONFIGS / "cartpole.toml", "pong": CONFIGS / "pong_impala.toml"}
# The reader ends a turn, ours as everybody's.
SETTINGS = ["stop.mean_return=none", "stop.env_steps=none", "learner.report_every_s=0.25"]
POLL_S = 0.05


def main() -> int:
    game, _, seed = sys.argv[1:]
    settings = [part for each in [*SETTINGS, f"seed={seed}"] for part in ("--set", each)]
    command = [sys.executable, "-m", "impala_async.train", "--config", str(CONFIG[game])]
    with subprocess.Popen([*command, "--run-dir", "run", *settings]) as training:
        metrics = Tail(Path("run/metrics.jsonl"))
        while training.poll() is None:
            time.sleep(POLL_S)
            for line in metrics.new_lines():
                report = json.loads(line)
                say(report["env_steps_trained"], report["mean_return_100"])
    return training.returncode


if __name__ == "__main__":
    sys.exit(main())
