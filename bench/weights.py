"""How soon new weights are with the actors, and what it costs the learner to publish them.

A learner thread makes real updates and publishes after each; actors' clients in processes of their
own pull whatever is newest and load it. With none, one and eight of them, in turns.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from bench.door import run
from bench.paired import Figure, Sample, figure_of, in_turns, new_parser, publish, ratio
from bench.weights_ends import CASES, CPU, config_of
from impala_async.learner.loop.publisher import Publisher
from impala_async.policy import Policy
from impala_async.weights import Version, Weights
from impala_async.wire.messages import Get

NUM_CLIENTS = (0, 1, 8)
NAMES = {
    "mlp": "CartPole, MLP",
    "nature_cnn": "Pong, Nature CNN",
    "nature_cnn_coarse": "Pong, Nature CNN, torso sent in bfloat16",
}
NUM_REPLIES = 100
WARM_SHARE = 0.2
END_WITHIN_S = 60.0
NOTES = """
"Installed" is from the moment at which the learner thread begins to copy the weights until a client
has them in its policy: the copy, the way to the event loop, the notice, the pull, the transfer, its
checksum and the load. A client that is behind skips to the newest version; the time is a median
over those that were not skipped. A notice goes out at
once, as in lockstep; otherwise an actor hears of a version with its next grant.

Weights travel in float32, but for the case that says otherwise: there those of the torso are
bfloat16, as a learner sends them that computes its torsos in it.

"Publishing" is what the learner thread does besides the update: it copies the weights and hands
them over. Updates beside one and eight clients are slower for whatever else the machine does then:
the learner's event loop, and clients that share the cores with it. "Encode" is the first pull of a
version, "each pull after that" what the event loop prepares for the others, both in processor time
and without the socket.
"""


def main() -> int:
    """Measure all cases; 1 if a limit was missed."""
    parser = new_parser("Weights", __doc__, rounds=5, has_cases=False)
    parser.add_argument("--turn-s", type=float, default=5.0, metavar="S", help="of a turn (5)")
    args = parser.parse_args()
    figures: list[Figure] = []
    for case in CASES:
        sides: dict[str, Callable[[], Sample]] = {
            f"{case}, {num}": partial(one_turn, case, num, args.turn_s) for num in NUM_CLIENTS
        }
        sides[f"{case}, encode"] = partial(encode, case)
        samples = in_turns(sides, args.rounds)
        figures += figures_of(NAMES[case], list(samples.values()))
    return publish("Weights", figures, notes=NOTES, is_json=args.json, folder=args.write)


def one_turn(case: str, num_clients: int, seconds: float) -> Sample:
    """A fresh learner, and fresh clients."""
    told = [case, str(num_clients), str(seconds)]
    with _end("learner", *told) as learner, contextlib.ExitStack() as stack:
        url = _hear(learner)["url"]
        clients = [stack.enter_context(_end("client", case, url)) for _ in range(num_clients)]
        for client in clients:
            assert _hear(client)["is_ready"]
        assert learner.stdin is not None
        # Past the buffer: what is left there when all is ended could not be flushed.
        os.write(learner.stdin.fileno(), b"go\n")
        outcome = _hear(learner)
        return sample_of(outcome, [_hear(client)["installed_at"] for client in clients])


def sample_of(outcome: dict[str, Any], installed: list[dict[str, float]]) -> Sample:
    """The figures of one turn; the first updates warm up, and are not counted."""
    num_warm = int(len(outcome["update_s"]) * WARM_SHARE)
    # Means, as a learner that is late now and then is late on the whole.
    update_s = statistics.fmean(outcome["update_s"][num_warm:])
    publish_s = statistics.fmean(outcome["publish_s"][num_warm:])
    sample = {
        "update_ms": update_s * 1000,
        "publish_share": publish_s / (update_s + publish_s),
    }
    published_at = {int(update): at for update, at in outcome["published_at"].items()}
    counted = [update for update in published_at if update > num_warm]
    delays_s = [
        client[str(update)] - published_at[update]
        for client in installed
        for update in counted
        if str(update) in client
    ]
    if delays_s:
        sample["installed_ms"] = statistics.median(delays_s) * 1000
        sample["skipped_share"] = 1 - len(delays_s) / (len(installed) * len(counted))
    return sample


def encode(case: str) -> Sample:
    """Time what the first pull of a version costs the event loop, and each of the others."""
    schema, _, _, is_coarse = CASES[case]
    policy = Policy(schema, config_of(case, 1).model, seed=0, device=CPU)
    layout = policy.coarse_layout if is_coarse else policy.layout
    publisher = Publisher()
    publisher.layout_digest = layout.digest
    first_s, later_s = 0.0, 0.0
    for update in range(NUM_REPLIES):
        weights = Weights(Version(1, update), np.full(layout.num_bytes, 7, np.uint8))
        publisher.publish(weights)
        get = Get(bytes(16), 0, 0)
        begun = time.thread_time()
        first = publisher.reply(publisher.choose(get))
        encoded = time.thread_time()
        again = publisher.reply(publisher.choose(get))
        later_s += time.thread_time() - encoded
        first_s += encoded - begun
        # The same frame, which nobody has copied.
        assert again is first
        assert np.shares_memory(np.frombuffer(first[1], np.uint8), weights.buffer)
    return {"first_us": first_s / NUM_REPLIES * 1e6, "later_us": later_s / NUM_REPLIES * 1e6}


def figures_of(name: str, sides: list[list[Sample]]) -> list[Figure]:
    alone, one, eight, encoding = sides
    size = "1 client", "8 clients"
    return [
        figure_of(f"{name}: published to installed, {size[0]}", one, "installed_ms", unit="ms"),
        figure_of(f"the same, {size[1]}", eight, "installed_ms", unit="ms"),
        figure_of("the same: share of the versions that they skipped", eight, "skipped_share"),
        *(
            figure_of(
                f"{name}: publishing, share of the learner thread, {what}", side, "publish_share"
            )
            for what, side in (("no client", alone), (size[0], one), (size[1], eight))
        ),
        *(
            ratio(f"{name}: an update with {what} over one with none", side, alone, "update_ms")
            for what, side in ((size[0], one), (size[1], eight))
        ),
        figure_of(f"{name}: encode, once per version", encoding, "first_us", unit="µs"),
        figure_of(f"{name}: each pull after that", encoding, "later_us", unit="µs"),
    ]


@contextlib.contextmanager
def _end(*told: str) -> Iterator["subprocess.Popen[str]"]:
    """One end as a process, which is gone afterwards, with its folder of sockets."""
    command = [sys.executable, "-m", "bench.weights_ends", *told]
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "XDG_RUNTIME_DIR": folder},
        ) as process,
    ):
        try:
            yield process
            process.wait(END_WITHIN_S)
        finally:
            process.kill()


def _hear(process: "subprocess.Popen[str]") -> dict[str, Any]:
    assert process.stdout is not None
    heard: dict[str, Any] = json.loads(process.stdout.readline())
    return heard


if __name__ == "__main__":
    run(main)
