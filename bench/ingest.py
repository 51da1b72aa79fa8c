"""How much of a line's capacity reaches the learner's slots, and at which cost.

A real actor's client sends the same trajectories without end; the learner's ports, sessions,
credit, checks and slots receive them. A bare TCP socket receives as many bytes, in turns with it.
"""

import json
import os
import secrets
import subprocess
import sys
from functools import partial
from typing import Any

from bench.door import run
from bench.ingest_ends import CROWD, message_bytes
from bench.one_run import end_with_parent
from bench.paired import Figure, Sample, figure_of, in_turns, new_parser, publish, ratio
from impala_async.config.learner import KEY_VARIABLE

SIDES = (
    ("stacked", ("raw", "tcp", "keyed", "ipc", "narrow")),
    ("frames", ("tcp",)),
    ("cartpole", ("raw", "tcp", "keyed", "crowd")),
)
NUM_MESSAGES = {"stacked": 4000, "frames": 12_000, "cartpole": 60_000}
NOTES = """
Both ends are processes of one machine, over loopback TCP. Throughput is messages in slots;
"receive CPU" is all CPU time of the receiving process, ZeroMQ's threads included. With a key, both
ends encrypt. `ipc` is what
actors of the learner's own host use by themselves. One actor sends, with four streams, so that
eight messages may be under way; in the row with two it has one stream, and waits for answers.

A large message is copied once more than by the bare socket, out of ZeroMQ's memory into its slot,
and the two cores have four busy threads. With each frame once there are a third of the bytes, but
as many calls. The kernel's part of a small one alone is more than the limit: by a profile of
messages that came one at a time ZeroMQ's thread spent 38 µs of each in system calls, and Python
about 60, half of it on receiving and answering over the socket. Those that come together
are checked at once, and fewer threads are woken.
"""


def main() -> int:
    """Measure all cases; 1 if a limit was missed."""
    args = new_parser("Ingest", __doc__, rounds=5, has_cases=False).parse_args()
    # All in one circle: cases are compared, too.
    turns = {
        f"{case}, {side}": partial(one_turn, side, case) for case, sides in SIDES for side in sides
    }
    figures = figures_of(in_turns(turns, args.rounds))
    return publish("Ingest", figures, notes=NOTES, is_json=args.json, folder=args.write)


def one_turn(side: str, case: str) -> Sample:
    """A fresh receiver and a fresh sender, or a crowd of them."""
    ends = [sys.executable, "-m", "bench.ingest_ends"]
    key = {KEY_VARIABLE: secrets.token_hex(32)} if side == "keyed" else {}
    started: dict[str, Any] = {"preexec_fn": end_with_parent, "env": os.environ | key}
    role = side if side in ("raw", "crowd") else "ours"
    receive = [*ends, "receive", role, case, str(NUM_MESSAGES[case])]
    with subprocess.Popen(receive, stdout=subprocess.PIPE, text=True, **started) as receiver:
        assert receiver.stdout is not None
        url = json.loads(receiver.stdout.readline())["url"]
        send = [*ends, "send", "tcp" if side == "crowd" else side, case, "0", url]
        num_senders = CROWD if side == "crowd" else 1
        senders = [subprocess.Popen(send, **started) for _ in range(num_senders)]
        sample: Sample = json.loads(receiver.stdout.readline())
        for sender in senders:
            sender.kill()
            sender.wait()
    return sample


def figures_of(samples: dict[str, list[Sample]]) -> list[Figure]:
    stacked, frames, small = (
        {side: samples[f"{case}, {side}"] for side in sides} for case, sides in SIDES
    )
    # The same frames, four times over or once: what counts is trajectories.
    return [
        ratio("stacked Atari, 593 kB: throughput, tcp over raw TCP",
              stacked["tcp"], stacked["raw"], "per_s", at_least=0.9),
        ratio("the same, ipc over raw TCP", stacked["ipc"], stacked["raw"], "per_s"),
        ratio("the same, tcp, two messages under way and not eight, over raw TCP",
              stacked["narrow"], stacked["raw"], "per_s"),
        ratio("the same, tcp with a key, over raw TCP", stacked["keyed"], stacked["raw"], "per_s"),
        _cpu("the same: receive CPU, tcp", stacked["tcp"], 175),
        _cpu("the same: receive CPU, tcp with a key", stacked["keyed"]),
        ratio("each frame once, 177 kB: trajectories, tcp over stacked tcp",
              frames["tcp"], stacked["tcp"], "per_s", at_least=2.5),
        _cpu("the same: receive CPU, tcp", frames["tcp"], 65),
        ratio(f"CartPole, {message_bytes('cartpole') / 1000:.1f} kB: throughput, tcp over raw TCP",
              small["tcp"], small["raw"], "per_s"),
        _cpu("the same: receive CPU, tcp", small["tcp"], 10),
        ratio("the same, tcp with a key, over raw TCP", small["keyed"], small["raw"], "per_s"),
        _cpu("the same: receive CPU, tcp with a key", small["keyed"]),
        ratio(f"the same from {CROWD} actors at once: throughput, tcp over raw TCP",
              small["crowd"], small["raw"], "per_s"),
        _cpu("the same: receive CPU, tcp", small["crowd"], 10),
    ]  # fmt: skip


def _cpu(name: str, samples: list[Sample], at_most: float | None = None) -> Figure:
    return figure_of(name, samples, "cpu_us", unit="µs", at_most=at_most)


if __name__ == "__main__":
    run(main)
