"""Both ends of a measured line.

    python -m bench.ingest_ends receive raw|ours|crowd CASE NUM
    python -m bench.ingest_ends send raw|tcp|keyed|narrow|ipc CASE 0 URL

The receiving end prints where it listens, and at the end its figures, each as a line of JSON. It is
a process of its own, so that its CPU time is that of receiving and of nothing else.
"""

import asyncio
import json
import socket
import sys
import time
from typing import Any

import numpy as np
import uvloop

from impala_async.actor import joining
from impala_async.actor.client import Client, RunFinished
from impala_async.actor.unroll import Finished
from impala_async.config.run import RunConfig
from impala_async.learner.loop.server import ActorServer
from impala_async.learner.slots import Settlement, allocate_slots
from impala_async.processes import keep_freed_memory
from impala_async.schema import ActionPart, ActionSpec, ArraySpec, ObsSpec, Schema
from impala_async.weights import Lineage, Version, Weights, WeightsLayout
from impala_async.wire.keys import key_in_environment
from impala_async.wire.messages import Welcome
from impala_async.wire.peer import WINDOW
from impala_async.wire.sockets import new_context

BATCH_COLUMNS, NUM_SLOTS = 16, 4
# Credit is at most a batch: that takes all that one actor may send, and one message from each of a
# crowd.
CROWD = 16
# An actor has so many, with a window of messages under way of each. Narrow has one.
STREAMS = 4
# The first share warms caches, windows and pages, and is not counted.
WARM_SHARE = 0.2
LAYOUT = WeightsLayout((ArraySpec("w", (64,), "uint8"),))
VERSION = Version(1, 0)


def _atari(is_stack: bool) -> Schema:
    frames = ArraySpec("", (4, 84, 84), "uint8", is_stack=is_stack)
    return Schema(ObsSpec((frames,)), ActionSpec((ActionPart("", "discrete", (6,)),)), rows=20)


def _cartpole() -> Schema:
    numbers = ArraySpec("", (4,), "float32")
    return Schema(ObsSpec((numbers,)), ActionSpec((ActionPart("", "discrete", (2,)),)), rows=22)


# Schema, and columns of a message.
CASES: dict[str, tuple[Schema, int]] = {
    "stacked": (_atari(is_stack=False), 1),
    "frames": (_atari(is_stack=True), 1),
    "cartpole": (_cartpole(), 8),
}


def message_bytes(case: str) -> int:
    schema, columns = CASES[case]
    return columns * schema.layout.column_bytes


class Stopwatch:
    """Wall and CPU time between the warm messages and the last one."""

    def __init__(self, num_messages: int) -> None:
        self._num_messages = num_messages
        self._num_warm = int(num_messages * WARM_SHARE)
        self._num_seen = self._started_at = 0
        self.figures: dict[str, float] = {}

    def count(self, num: int) -> bool:
        """Whether that was the end."""
        self._num_seen += num
        if not self._started_at and self._num_seen >= self._num_warm:
            self._started_at = self._num_seen
            self._wall, self._cpu = time.perf_counter(), time.process_time()
        if self._num_seen < self._num_messages:
            return False
        measured = self._num_seen - self._started_at
        wall_s, cpu_s = time.perf_counter() - self._wall, time.process_time() - self._cpu
        self.figures = {"per_s": measured / wall_s, "cpu_us": cpu_s / measured * 1e6}
        return True


def receive_raw(case: str, num_messages: int) -> dict[str, float]:
    """Into one buffer, again and again, as fast as the kernel gives it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        _say({"url": f"{server.getsockname()[1]}"})
        line, _ = server.accept()
        with line:
            buffer = memoryview(bytearray(message_bytes(case)))
            watch = Stopwatch(num_messages)
            while True:
                received = 0
                while received < len(buffer):
                    received += line.recv_into(buffer[received:])
                if watch.count(1):
                    return watch.figures


def send_raw(case: str, url: str) -> None:
    payload = np.random.default_rng(0).integers(0, 2, message_bytes(case), np.uint8).tobytes()
    with socket.create_connection(("127.0.0.1", int(url))) as line:
        try:
            while True:
                line.sendall(payload)
        except ConnectionError:
            return


async def receive_ours(case: str, num_messages: int, num_actors: int) -> dict[str, float]:
    """The learner's whole receiving side; a full slot is trained on in no time at all."""
    keep_freed_memory()
    schema, columns = CASES[case]
    batch_columns = max(BATCH_COLUMNS, num_actors * columns, WINDOW * STREAMS * columns)
    done = asyncio.get_running_loop().create_future()
    watch = Stopwatch(num_messages)
    server = ActorServer(
        _config(schema, columns, batch_columns),
        run_id=bytes(16),
        lineage=Lineage(0).resumed(1, 0),
        schema=schema,
        on_schema=lambda schema: None,
        on_episodes=lambda episodes: None,
        on_loss=lambda: None,
        key=key_in_environment(),
    )
    slots = allocate_slots(schema, batch_columns, NUM_SLOTS)

    def train(index: int) -> None:
        slot = slots[index]
        server.settle(
            Settlement(slot.batch, trained=batch_columns, passes_done=batch_columns, slot=index)
        )
        if watch.count(batch_columns // columns) and not done.done():
            done.set_result(None)

    def submit(index: int) -> None:
        asyncio.get_running_loop().call_soon(train, index)

    server.open(schema, slots, submit, LAYOUT)
    server.publish(Weights(VERSION, np.zeros(64, np.uint8)))
    _say({"url": server.data_url})
    await done
    await server.say_bye("finished", 0.5)
    server.close()
    return watch.figures


def send_ours(case: str, url: str, *, is_tcp: bool, num_streams: int) -> None:
    """A real actor's connection with buffers that are always full."""
    schema, columns = CASES[case]
    if is_tcp:
        # Otherwise it would find that the learner is on this host, and move to ipc.
        joining.best_urls = _dialled_urls
    client = Client(new_context(), url, should_stop=lambda: False, connect_s=10)
    client.connect()
    client.join(schema, [LAYOUT], columns, num_streams)
    try:
        while True:
            buffer = client.take_buffer()
            if not buffer.mask_TC[0][0]:
                buffer.mask_TC.fill(True)
                buffer.log_probs_TC.fill(-0.7)
            client.send(Finished(buffer, VERSION, []))
    except RunFinished:
        client.leave()


def _dialled_urls(welcome: Welcome, dialled_url: str) -> tuple[str, str]:
    return dialled_url, f"{dialled_url.rpartition(':')[0]}:{welcome.weights_port}"


def _config(schema: Schema, columns: int, batch_columns: int) -> RunConfig:
    return RunConfig.model_validate(
        {
            "env": {"id": "none:Needed"},
            "trajectory": {"rows": schema.rows},
            "actor": {"num_envs": columns},
            "learner": {"device": "cpu", "batch_columns": batch_columns},
            "bind": {"data": "tcp://127.0.0.1:*", "weights": "tcp://127.0.0.1:*"},
        }
    )


def _say(content: dict[str, Any]) -> None:
    print(json.dumps(content), flush=True)


def main() -> None:
    role, side, case, num, *url = sys.argv[1:]
    if role == "receive":
        if side == "raw":
            _say(receive_raw(case, int(num)))
        else:
            num_actors = CROWD if side == "crowd" else 1
            _say(uvloop.run(receive_ours(case, int(num), num_actors)))
    elif side == "raw":
        send_raw(case, *url)
    else:
        num_streams = 1 if side == "narrow" else STREAMS
        send_ours(case, *url, is_tcp=side != "ipc", num_streams=num_streams)


if __name__ == "__main__":
    main()
