"""The learner's half of the protocol without sockets, clocks and threads: frames and a moment go
in, answers come out. The test is the network, the clock and the learner thread.
"""

import itertools

import numpy as np

from impala_async.errors import ProtocolError
from impala_async.learner.loop.admission import Admission
from impala_async.learner.loop.lockstep import LockstepFiller
from impala_async.learner.loop.publisher import Publisher
from impala_async.learner.loop.sessions import Sessions
from impala_async.learner.slots import Settlement, SlotFiller, allocate_slots
from impala_async.weights import Lineage, Version, Weights
from impala_async.wire.messages import Welcome, pack, unpack
from impala_async.wire.session import SessionTable
from impala_async.wire.sockets import NO_FRAME
from tests.learner.hand_actor import MODEL, Speaker

RUN_ID = b"run".ljust(16, b"-")


class Rest:
    """The further frames of a message, as a router has them."""

    def __init__(self, *frames):
        self._frames = [bytes(frame) for frame in frames]

    def receive_into(self, buffer):
        if not self._frames:
            return NO_FRAME
        frame = self._frames.pop(0)
        size = min(len(frame), len(buffer))
        buffer[:size] = frame[:size]
        return len(frame)

    @property
    def has_more_frames(self):
        return bool(self._frames)


class PureLearner:
    """Answers go to `listeners`, by route; full slots wait in `full` to be settled."""

    def __init__(
        self,
        schema,
        *,
        columns=4,
        num_slots=3,
        is_open=True,
        lineage=None,
        max_lag=50,
        num_actors=None,
        lag=0,
        on_loss=None,
        recorder=None,
    ):
        """Build a learner; with `num_actors` it is in lockstep."""
        self.schema, self.columns, self.now = schema, columns, 0.0
        self.lineage = lineage or Lineage(0).resumed(1, 0)
        self.update, self.schemas = self.lineage.forks[self.lineage.epoch], []
        self.on_schema = self.schemas.append
        self.find_layout = lambda schema: None
        self.listeners = {}
        self.episodes = []
        self.full = []
        self.publisher = Publisher(num_kept=1 + lag)
        ids = itertools.count(1)
        self.table = SessionTable(
            run_id=RUN_ID,
            lineage=self.lineage,
            lease_s=10.0,
            max_lag=max_lag if num_actors is None else lag,
            new_id=lambda: b"session" + next(ids).to_bytes(9, "big"),
            num_actors=num_actors,
        )
        self.filler = SlotFiller(self.count)
        if num_actors is not None:
            places = {"num_actors": num_actors, "width": columns // num_actors}
            first = {"lag": lag, "first_update": self.update, "on_loss": on_loss}
            self.filler = LockstepFiller(self.count, **places, **first)
        self.ledger = self.filler.ledger
        self.sessions = Sessions(
            table=self.table,
            publisher=self.publisher,
            filler=self.filler,
            welcome=self._welcome(),
            settings_frame=b"settings",
            rows=schema.rows,
            on_schema=lambda schema: self.on_schema(schema),
            find_layout=lambda schema: self.find_layout(schema),
        )
        self.admission = Admission(self.sessions, recorder)
        self.slots = allocate_slots(schema, columns, num_slots)
        if is_open:
            self.open()
            self.publish()

    def open(self):
        self.sessions.open(self.schema, MODEL)
        self.admission.open(self.schema, self.slots, lambda i: self.full.append(self.slots[i]))

    def count(self, episodes):
        self.episodes += episodes.tolist()

    def hear(self, route, message, *rest):
        """A message on the data port; raises ProtocolError."""
        others = Rest(*rest)
        self._say(self.admission.hear(route, message, others, self.now))

    def hear_frames(self, route, *frames):
        """The same as it comes over the network; why it is not understood, if so."""
        try:
            self.hear(route, unpack(bytes(frames[0])), *frames[1:])
        except ProtocolError as error:
            return error.reason
        return ""

    def hear_pull(self, route, message):
        """A message on the weights port; raises ProtocolError."""
        nothing = Rest()
        self._say(self.sessions.hear_pull(route, message, nothing, self.now))

    def end_burst(self):
        """Check what came, deal credit, and tell what became of the rest."""
        self._say(self.admission.deal(self.now))
        self._say(self.admission.acknowledge(self.now))

    def publish(self):
        weights = Weights(Version(self.lineage.epoch, self.update), np.zeros(64, np.uint8))
        self._say(self.sessions.publish(weights))
        self.end_burst()

    def settle(self, slot, *, is_dealing=True):
        """It was trained, and is empty."""
        trained = int(slot.filled_B.sum())
        self.ledger.settle(Settlement(slot.batch, trained=trained, passes_done=trained))
        self.filler.release(slot.index)
        if is_dealing:
            self.end_burst()

    def report(self):
        return {
            **self.ledger.report(),
            **self.admission.report(),
            **self.sessions.report(self.now),
        }

    def _say(self, answers):
        for answer in answers:
            if answer.route in self.listeners:
                self.listeners[answer.route](answer.frames)
                answer.on_sent()

    def _welcome(self):
        return Welcome(
            run_id=RUN_ID, epoch=self.lineage.epoch, session=b"", number=-1, weights_port=1,
            ipc_data="", ipc_weights="", nonce_path="", nonce=bytes(16), lease_s=10.0,
            heartbeat_s=2.0, max_columns=self.columns,
        )  # fmt: skip


class HandActor(Speaker):
    """An actor made by hand over two routes of such a learner."""

    def __init__(self, learner, columns=1, schema=None):
        super().__init__(schema or learner.schema, columns)
        self.learner = learner
        self.route, self.pull_route = b"d" + self.uuid, b"w" + self.uuid
        learner.listeners |= {self.route: self.take, self.pull_route: self.take}

    def hello(self, **fields):
        return self.say(self.hello_of(**fields))

    def spec(self, streams=1):
        return self.say(*self.spec_of(streams))

    def join(self, streams=1):
        self.hello()
        self.spec(streams)
        self.learner.end_burst()
        return self

    def say(self, message, *rest):
        """Say it on the data port; returns the reason if it is not understood."""
        first = pack(message) if isinstance(message, tuple) else message
        return self.learner.hear_frames(self.route, first, *rest)

    def pull(self, message):
        """The same on the weights port."""
        try:
            self.learner.hear_pull(self.pull_route, message)
        except ProtocolError as error:
            return error.reason
        return ""

    def send(self, planes=None, episodes=(), **fields):
        """One message, alone in its burst."""
        planes, _, frames = self.data_of(planes, episodes, **fields)
        self.say(*frames)
        self.learner.end_burst()
        return planes
