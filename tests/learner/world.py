"""What surrounds a front: settings, columns that can be told apart, and actors made by hand.

An `Actor` speaks the protocol over real sockets, one message at a time, and may say anything. A
`Harbour` is a front with open slots whose learner is the test: it sees full slots, and settles
and releases them.
"""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from impala_async import __version__
from impala_async.config import RunConfig
from impala_async.learner.front import Events, Front
from impala_async.learner.ledger import Settlement
from impala_async.learner.slots import Slot, allocate_slots
from impala_async.spec import ActionPart, ActionSpec, ArraySpec, Bytes2D, ObsSpec, Schema
from impala_async.trajectory import Columns, columns_over
from impala_async.weights import Lineage, Version, Weights
from impala_async.wire.codec import Frame, encode_data
from impala_async.wire.messages import (
    PROTOCOL,
    Bye,
    Data,
    Grant,
    Hello,
    Message,
    Reject,
    Spec,
    Welcome,
    pack,
    unpack,
)
from impala_async.wire.sockets import Dealer, new_context

RUN_ID = b"run".ljust(16, b"-")
LAYOUT = b"layout".ljust(16, b"-")
DEADLINE_S = 10.0
NUM_CHOICES = 3
_numbers = itertools.count()


async def until(is_so: Callable[[], bool], what: str = "") -> None:
    """Poll until it is so; fail at the deadline."""
    give_up_at = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < give_up_at, f"never came true: {what or is_so}"
        await asyncio.sleep(0.001)


def small_schema(rows: int = 3, num_obs: int = 2) -> Schema:
    """A column of it goes inline."""
    obs = ObsSpec((ArraySpec("", (num_obs,), "float32"),))
    return Schema(obs, ActionSpec((ActionPart("", "discrete", NUM_CHOICES),)), rows)


def big_schema(rows: int = 3) -> Schema:
    """A column of it fills a frame; it has several leaves of several dtypes, and two actions."""
    leaves = (
        ArraySpec("depth", (5,), "float64"),
        ArraySpec("pixels", (32, 32, 3), "uint8"),
        ArraySpec("speed", (), "float32"),
    )
    parts = (ActionPart("arm", "discrete", NUM_CHOICES), ActionPart("leg", "discrete", 4))
    return Schema(ObsSpec(leaves), ActionSpec(parts), rows)


def config_of(schema: Schema, **sections: dict[str, Any]) -> RunConfig:
    """Settings for a loopback learner; sections are laid over them."""
    settings: dict[str, dict[str, Any]] = {
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


class Planes:
    """Some columns in memory of their own, as an actor holds them."""

    def __init__(self, schema: Schema, num_columns: int) -> None:
        self.obs: Bytes2D = np.zeros((num_columns, schema.layout.obs_bytes), np.uint8)
        self.small: Bytes2D = np.zeros((num_columns, schema.layout.small_bytes), np.uint8)
        self.columns: Columns = columns_over(schema, self.obs, self.small)


def planes_of(schema: Schema, num_columns: int, seed: int = 0) -> Planes:
    """Valid random columns; every row counts and the rewards of a seed are its own."""
    rng = np.random.default_rng(seed)
    planes = Planes(schema, num_columns)
    columns = planes.columns
    for leaf in columns.obs.values():
        leaf[...] = rng.integers(0, 200, leaf.shape)
    for part in schema.action.parts:
        array = columns.actions[part.name]
        array[...] = rng.integers(0, part.num_choices, array.shape)
    columns.rewards_CT[...] = rng.normal(size=columns.rewards_CT.shape)
    columns.log_probs_CT[...] = -rng.uniform(0.1, 2.0, columns.log_probs_CT.shape)
    columns.mask_CT[...] = True
    return planes


class Actor:
    """An actor made by hand, over the learner's two ports."""

    def __init__(self, data_url: str, weights_url: str, schema: Schema, columns: int = 1) -> None:
        self.schema = schema
        self.columns = columns
        self.uuid = next(_numbers).to_bytes(16, "big")
        self.session = bytes(16)
        self.seq = 0
        self.welcome: Welcome | None = None
        self.settings: bytes = b""
        self.grants: list[Grant] = []
        self.rejects: list[Reject] = []
        self.byes: list[Bye] = []
        self.others: list[list[bytes]] = []
        self._context = new_context()
        self.data = Dealer(self._context, data_url)
        self.weights = Dealer(self._context, weights_url)

    @property
    def granted(self) -> int:
        return max((grant.granted for grant in self.grants), default=0)

    @property
    def settled(self) -> int:
        return max((grant.settled for grant in self.grants), default=0)

    @property
    def verdicts(self) -> list[list[int]]:
        return [verdict for grant in self.grants for verdict in grant.verdicts]

    @property
    def version(self) -> Version:
        """The newest that a grant named."""
        return max((Version(g.epoch, g.update) for g in self.grants), default=Version(0, 0))

    async def hello(self, **fields: Any) -> None:
        """Ask for a session and wait for an answer, good or bad."""
        said: dict[str, Any] = {
            "protocol": PROTOCOL,
            "actor": self.uuid,
            "build": __version__,
            "run_id": bytes(16),
            "epoch": 0,
            "lowest_unsettled": self.seq,
        }
        num_rejects = len(self.rejects)
        self.welcome = None
        await self.say(Hello(**{**said, **fields}))
        await self.hear(lambda: self.welcome is not None or len(self.rejects) > num_rejects)

    async def join(self, *, streams: int = 1) -> "Actor":
        """Hello, Spec, and the first grant, if there is anything to grant."""
        await self.hello()
        await self.spec(streams=streams)
        num_grants = len(self.grants)
        await self.hear(lambda: len(self.grants) > num_grants or bool(self.rejects))
        return self

    async def spec(self, *, streams: int = 1, layout: bytes = LAYOUT) -> None:
        spec = Spec(self.session, self.schema.digest, layout, self.columns, streams)
        await self.say(spec, self.schema.to_json())

    async def say(
        self, message: Message | bytes, *frames: Frame, to: Dealer | None = None
    ) -> None:
        """Any frames at all; a message or the bytes of a first frame."""
        first = message if isinstance(message, bytes) else pack(message)
        socket = to or self.data
        await until(lambda: socket.send([first, *frames]), "a connection")

    async def beat(self, message: Message | bytes, *frames: Frame) -> None:
        """The same over the weights socket."""
        await self.say(message, *frames, to=self.weights)

    async def hear(self, is_so: Callable[[], bool]) -> None:
        """Take in what comes until it is so."""

        def listen() -> bool:
            self.listen()
            return is_so()

        await until(listen)

    def listen(self) -> None:
        """Take in all that has come."""
        for socket in (self.data, self.weights):
            while (frames := socket.receive(0)) is not None:
                self._take(frames)

    def header(self, **fields: Any) -> Data:
        """A Data header that would do, with some fields changed."""
        data = Data(
            session=self.session,
            seq=self.seq,
            epoch=self.version.epoch,
            update=self.version.update,
            rows=self.schema.rows,
            columns=self.columns,
            codec=0,
            num_episodes=0,
            body=None,
        )
        return data._replace(**fields)

    async def send(
        self,
        planes: Planes | None = None,
        *,
        episodes: Sequence[tuple[float, int]] = (),
        is_waiting: bool = True,
        **fields: Any,
    ) -> Planes:
        """One message with a good body, its header perhaps changed.

        Waits for credit and until it is settled, or for neither.
        """
        if is_waiting and "seq" not in fields:
            await self.credit()
        planes = planes or planes_of(self.schema, self.columns, seed=self.seq)
        header = self.header(columns=len(planes.obs), **fields)
        await self.say(*encode_data(header, planes.obs, planes.small, episodes))
        if header.seq == self.seq:
            self.seq += 1
        if is_waiting:
            await self.hear(lambda: self.settled > header.seq)
        return planes

    async def credit(self) -> None:
        """Wait until the next message may go."""
        await self.hear(lambda: self.granted > self.seq)

    def close(self) -> None:
        self.data.close()
        self.weights.close()
        self._context.term()

    def _take(self, frames: list[bytes]) -> None:
        message = unpack(frames[0])
        if isinstance(message, Welcome):
            self.welcome, self.settings = message, frames[1]
            self.session = message.session
        elif isinstance(message, Grant):
            self.grants.append(message)
        elif isinstance(message, Reject):
            self.rejects.append(message)
        elif isinstance(message, Bye):
            self.byes.append(message)
        else:
            self.others.append(frames)


class Harbour:
    """A front with open slots. Full slots wait in `full` until the test is done with them."""

    def __init__(
        self,
        schema: Schema | None = None,
        *,
        num_slots: int = 3,
        is_open: bool = True,
        lineage: Lineage | None = None,
        **sections: dict[str, Any],
    ) -> None:
        self.schema = schema or small_schema()
        self.config = config_of(self.schema, **sections)
        self.full: list[int] = []
        self.schemas: list[Schema] = []
        self.episodes: list[tuple[float, int]] = []
        self.actors: list[Actor] = []
        self.front = Front(
            self.config,
            run_id=RUN_ID,
            lineage=lineage or Lineage(0).resumed(1, 0),
            schema=self.schema if is_open else None,
            events=Events(self.schemas.append, self._take_episodes),
        )
        self.slots: list[Slot] = []
        self._num_slots = num_slots
        if is_open:
            self.open()
            self.publish(0)

    def open(self) -> None:
        columns = self.config.learner.batch_columns
        self.slots = allocate_slots(self.schema, columns, self._num_slots)
        self.front.open(self.schema, self.slots, self.full.append, LAYOUT)

    def publish(self, update: int, epoch: int = 1) -> Weights:
        weights = Weights(Version(epoch, update), np.full(64, update % 251, np.uint8))
        self.front.publish(weights)
        return weights

    def actor(self, columns: int = 1, schema: Schema | None = None) -> Actor:
        """One that has not said anything yet."""
        front = self.front
        made = Actor(front.data_url, front.weights_url, schema or self.schema, columns)
        self.actors.append(made)
        return made

    def join(self, columns: int = 1, *, streams: int = 1) -> Awaitable[Actor]:
        return self.actor(columns).join(streams=streams)

    def train(self) -> Columns:
        """Be done with the oldest full slot; what it held."""
        slot = self.slots[self.full.pop(0)]
        taken = columns_over(self.schema, slot.obs.copy(), slot.small.copy())
        self.front.settle(Settlement(slot.batch, trained=len(slot.obs), passes_done=len(slot.obs)))
        self.front.release(slot.index)
        return taken

    def count(self, name: str) -> Any:
        """One number of the front's report, whose identities are checked on the way."""
        report: dict[str, Any] = self.front.report()
        check_identities(report)
        return report[name]

    def counts(self) -> dict[str, Any]:
        """Every number that is not zero."""
        report: dict[str, Any] = self.front.report()
        check_identities(report)
        return {name: value for name, value in report.items() if value}

    def close(self) -> None:
        for actor in self.actors:
            actor.close()
        self.front.close()

    def _take_episodes(self, episodes: NDArray[np.void]) -> None:
        self.episodes += [(float(total), int(length)) for total, length in episodes.tolist()]


def check_identities(report: dict[str, Any]) -> None:
    """What must hold in every report, at every moment."""
    columns = {
        name.removeprefix("trajectories/"): value
        for name, value in report.items()
        if name.startswith("trajectories/")
    }
    assert columns["received"] == columns["admitted"] + columns["rejected"]
    assert columns["admitted"] == columns["trained"] + columns["dropped"] + columns["in_slots"]
    for group in ("rejected", "dropped"):
        parts = [value for name, value in report.items() if name.startswith(f"{group}/")]
        assert columns[group] == sum(parts)
    bad = [value for name, value in report.items() if name.startswith("bad/")]
    assert report["wire/bad"] == sum(bad)


def same(taken: Columns, column: int, sent: Columns, sent_column: int = 0) -> bool:
    """Whether a column of a slot is a column that was sent, leaf by leaf."""
    pairs = [
        *((taken.obs[name], sent.obs[name]) for name in sent.obs),
        *((taken.actions[name], sent.actions[name]) for name in sent.actions),
        (taken.rewards_CT, sent.rewards_CT),
        (taken.log_probs_CT, sent.log_probs_CT),
        (taken.terminated_CT, sent.terminated_CT),
        (taken.truncated_CT, sent.truncated_CT),
        (taken.mask_CT, sent.mask_CT),
    ]
    return all(np.array_equal(a[column], b[sent_column], equal_nan=False) for a, b in pairs)
