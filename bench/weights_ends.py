"""Both ends of published weights: `python -m bench.weights_ends learner|client ...`.

The learner makes real updates in a thread of its own and publishes after each; its server serves
whoever asks. A client is an actor's: told of a version it pulls it, and loads it into its policy.
Every version is announced as soon as it is out, as in lockstep. Both ends read the same clock.

    learner CASE CLIENTS SECONDS    begins when a line comes in on stdin
    client CASE URL                 says when it has its first weights
"""

import asyncio
import json
import os
import sys
import time
from typing import Any

import numpy as np
import torch
import uvloop

from bench.one_run import CONFIGS
from impala_async.actor.client import Client, RunFinished
from impala_async.config.load import load_config
from impala_async.config.run import RunConfig
from impala_async.learner.handoff import Mailbox, on_thread
from impala_async.learner.loop.server import ActorServer
from impala_async.learner.slots import Slot, allocate_slots
from impala_async.models.flat import Snapshot
from impala_async.models.torso import pick_precision
from impala_async.policy import Policy
from impala_async.processes import keep_freed_memory
from impala_async.schema import ActionPart, ActionSpec, ArraySpec, ObsSpec, Schema
from impala_async.training.batch import Batch
from impala_async.training.step import UpdateStep
from impala_async.weights import Lineage, Version, Weights
from impala_async.wire import peer
from impala_async.wire.sockets import new_context

CPU = torch.device("cpu")
EPOCH = 1
CONNECT_S = 60.0
GOODBYE_S = 5.0


def _schema(obs: ArraySpec, num_actions: int, rows: int) -> Schema:
    return Schema(ObsSpec((obs,)), ActionSpec((ActionPart("", "discrete", (num_actions,)),)), rows)


_PONG = _schema(ArraySpec("", (4, 84, 84), "uint8", is_stack=True), 6, 20)
# Schema, config, columns of a batch, which is learned from in one update; and whether the torso's
# weights travel in bfloat16.
CASES: dict[str, tuple[Schema, str, int, bool]] = {
    "mlp": (_schema(ArraySpec("", (4,), "float32"), 2, 50), "cartpole.toml", 16, False),
    "nature_cnn": (_PONG, "atari.toml", 8, False),
    "nature_cnn_coarse": (_PONG, "atari.toml", 8, True),
}


def config_of(case: str, num_clients: int) -> RunConfig:
    schema, config, batch_columns, _ = CASES[case]
    settings = {
        "trajectory.rows": schema.rows,
        "algorithm.num_minibatches": 1,
        "actor.num_envs": batch_columns // num_clients,
        "train.num_actors": num_clients,
        "learner.batch_columns": batch_columns,
        "learner.device": "cpu",
        "learner.lease_s": 120,
        "bind.data": "tcp://127.0.0.1:*",
        "bind.weights": "tcp://127.0.0.1:*",
        "pace.mode": "lockstep",
    }
    return load_config(CONFIGS / config, [f"{key}={value}" for key, value in settings.items()])


class Publishing:
    """The learner thread: update, snapshot, post; and how long each took."""

    def __init__(self, config: RunConfig, schema: Schema, slot: Slot, is_coarse: bool) -> None:
        policy = Policy(schema, config.model, seed=0)
        policy.compute_in(pick_precision(config.model.precision, config.model.name, CPU))
        self._step = UpdateStep(policy, config.algorithm)
        self.layout = policy.coarse_layout if is_coarse else policy.layout
        self._snapshot = Snapshot(self.layout, policy.tensors)
        _fill(slot)
        self._batch = Batch.in_planes(schema, slot.obs, slot.small)
        self._alive_B = torch.ones(len(slot.filled_B), dtype=torch.bool)
        self.published_at: dict[int, float] = {}
        self.update_s: list[float] = []
        self.publish_s: list[float] = []

    def run(self, mailbox: Mailbox[Weights], seconds: float) -> None:
        ends_at = time.monotonic() + seconds
        while time.monotonic() < ends_at:
            before = time.monotonic()
            self._step.run(self._batch, self._alive_B, 0)
            updated = time.monotonic()
            mailbox.post(self.take())
            self.update_s.append(updated - before)
            self.publish_s.append(time.monotonic() - updated)

    def take(self) -> Weights:
        """The weights of now, and when they began their way."""
        update = len(self.published_at)
        self.published_at[update] = time.monotonic()
        weights = self._snapshot.take(Version(EPOCH, update))
        assert weights is not None, "the weights of an update are finite"
        return weights


async def learn(case: str, num_clients: int, seconds: float) -> dict[str, Any]:
    """Publish for so many seconds to whoever is there, and say goodbye."""
    keep_freed_memory()
    # Clients here send nothing, for which actors get a version in ten seconds.
    peer.FREE_PULLS = sys.maxsize
    # Before the step is built: with one thread a small network's is written out.
    torch.set_num_threads(1)
    schema, _, batch_columns, is_coarse = CASES[case]
    config = config_of(case, max(1, num_clients))
    loop = asyncio.get_running_loop()
    server = ActorServer(
        config,
        run_id=bytes(16),
        lineage=Lineage(0).resumed(EPOCH, 0),
        schema=schema,
        on_schema=lambda schema: None,
        on_episodes=lambda episodes: None,
        on_loss=lambda: None,
    )
    slots = allocate_slots(schema, batch_columns, 2)
    learner = Publishing(config, schema, slots[1], is_coarse)
    server.open(schema, slots[:1], lambda index: None, learner.layout)
    server.publish(learner.take())
    _say({"url": server.data_url})
    await loop.run_in_executor(None, sys.stdin.readline)
    mailbox = Mailbox(loop, server.publish)
    await on_thread("learner", lambda: learner.run(mailbox, seconds))
    await server.say_bye("finished", GOODBYE_S)
    server.close()
    return {
        "published_at": learner.published_at,
        "update_s": learner.update_s,
        "publish_s": learner.publish_s,
    }


def subscribe(case: str, url: str) -> dict[str, Any]:
    """An actor that does nothing but take over every version that it can get."""
    torch.set_num_threads(1)
    schema = CASES[case][0]
    client = Client(new_context(), url, should_stop=lambda: False, connect_s=CONNECT_S)
    settings = client.connect()
    policy = Policy(schema, settings.model, seed=1)
    policy.act_in(pick_precision(settings.model.precision, settings.model.name, CPU))
    layouts = [layout for layout in (policy.layout, policy.coarse_layout) if layout is not None]
    client.join(schema, layouts, settings.actor.least_envs, 1)
    installed_at: dict[int, float] = {}
    try:
        while True:
            weights = client.newest()
            if weights is not None:
                policy.load(weights)
                installed_at[weights.version.update] = time.monotonic()
                if len(installed_at) == 1:
                    _say({"is_ready": True})
    except RunFinished:
        client.leave()
    return {"installed_at": installed_at}


def _fill(slot: Slot) -> None:
    """Columns of noise that an update can be made of."""
    rng = np.random.default_rng(0)
    for leaf in slot.columns.obs.values():
        is_image = leaf.dtype == np.uint8
        leaf[...] = rng.integers(0, 256, leaf.shape) if is_image else rng.normal(size=leaf.shape)
    for window in slot.columns.windows.values():
        rows, frames = (np.arange(size) for size in window.shape[1:])
        window[...] = 1 + rows[:, None] + frames
    slot.columns.rewards_CT[...] = rng.normal(size=slot.columns.rewards_CT.shape)
    slot.columns.log_probs_CT.fill(-0.7)
    slot.columns.mask_CT.fill(True)


def _say(content: dict[str, Any]) -> None:
    line = f"{json.dumps(content)}\n".encode()
    # A pipe takes less at once, and what `print` had left was lost at times.
    while line:
        line = line[os.write(sys.stdout.fileno(), line) :]


def main() -> None:
    role, case, *more = sys.argv[1:]
    if role == "learner":
        _say(uvloop.run(learn(case, int(more[0]), float(more[1]))))
    else:
        _say(subscribe(case, *more))


if __name__ == "__main__":
    main()
