"""Settings for a server, and a `ServerHarness`, which is a server with open slots whose learner is
the test: it sees full slots, and settles and releases them.
"""

import numpy as np

from impala_async.config.run import RunConfig
from impala_async.learner.loop.server import ActorServer
from impala_async.learner.slots import Settlement, allocate_slots
from impala_async.trajectory import columns_over
from impala_async.weights import Lineage, Version, Weights
from tests.learner.columns import small_schema
from tests.learner.hand_actor import MODEL, Actor

RUN_ID = b"run".ljust(16, b"-")


def config_of(schema, **sections):
    """Settings for a loopback learner; sections are laid over them."""
    settings = {
        "env": {"id": "tests:None"},
        "model": {"hidden_sizes": [8]},
        "trajectory": {"rows": schema.rows},
        "actor": {"num_envs": 1},
        "learner": {"device": "cpu", "batch_columns": 4, "queue_size": 1, "report_every_s": 0.1},
        "bind": {"data": "tcp://127.0.0.1:*", "weights": "tcp://127.0.0.1:*"},
    }
    for name, section in sections.items():
        settings[name] = {**settings.get(name, {}), **section}
    return RunConfig.model_validate(settings)


class ServerHarness:
    """A server with open slots. Full slots wait in `full` until the test is done with them."""

    def __init__(self, *, schema=None, num_slots=3, is_open=True, **sections):
        self.schema = schema or small_schema()
        self.config = config_of(self.schema, **sections)
        self.full, self.slots, self.actors = [], [], []
        self.schemas, self.losses, self.episodes = [], [], []
        self.server = ActorServer(
            self.config,
            run_id=RUN_ID,
            lineage=Lineage(0).resumed(1, 0),
            schema=self.schema if is_open else None,
            on_schema=self.schemas.append,
            on_episodes=lambda episodes: self.episodes.extend(episodes.tolist()),
            on_loss=lambda: self.losses.append(True),
        )
        self._num_slots = num_slots
        if is_open:
            self.open()
            self.publish(0)

    def open(self):
        columns = self.config.learner.batch_columns
        self.slots = allocate_slots(self.schema, columns, self._num_slots)
        self.server.open(self.schema, self.slots, self.full.append, MODEL)

    def publish(self, update):
        buffer = np.full(64, update % 251, np.uint8)
        self.server.publish(Weights(Version(1, update), buffer))

    def actor(self, columns=1):
        """One that has not said anything yet."""
        made = Actor(self.server.data_url, self.server.weights_url, self.schema, columns)
        self.actors.append(made)
        return made

    def join(self, columns=1):
        return self.actor(columns).join()

    def train(self):
        """Be done with the oldest full slot; what it held."""
        slot = self.slots[self.full.pop(0)]
        taken = columns_over(self.schema, slot.obs.copy(), slot.small.copy())
        trained = int(slot.filled_B.sum())
        self.server.settle(
            Settlement(slot.batch, trained=trained, passes_done=trained, slot=slot.index)
        )
        return taken

    def count(self, name):
        """One number of the server's report, whose identities are checked on the way."""
        report = self.server.report()
        check_identities(report)
        return report[name]

    def close(self):
        for actor in self.actors:
            actor.close()
        self.server.close()


def check_identities(report):
    """Check what must hold in every report, at every moment."""
    at = {name.removeprefix("trajectories/"): report[name] for name in report}
    assert at["received"] == at["admitted"] + at["rejected"]
    assert at["admitted"] == at["trained"] + at["dropped"] + at["in_slots"]
    totals = {"rejected": "rejected", "dropped": "dropped", "partial": "passes/partial"}
    if "wire/bad" in report:
        totals["bad"] = "wire/bad"
    for group, total in totals.items():
        assert at[total] == sum(at[name] for name in report if name.startswith(f"{group}/"))
