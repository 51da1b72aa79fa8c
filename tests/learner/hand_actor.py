"""Actors made by hand: they speak the protocol and may say anything."""

import asyncio
import itertools
import time

from impala_async import __version__
from impala_async.schema import ArraySpec
from impala_async.weights import Version, WeightsLayout
from impala_async.wire import messages as wire
from impala_async.wire.sockets import Dealer, new_context
from tests.learner.columns import planes_of

MODEL = WeightsLayout((ArraySpec("w", (16,), "float32"),))
LAYOUT = MODEL.digest
DEADLINE_S = 10.0
_numbers = itertools.count()


async def until(look, what=""):
    """Look until there is something, and return it; fail at the deadline."""
    give_up_at = time.monotonic() + DEADLINE_S
    while not (found := look()):
        assert time.monotonic() < give_up_at, f"never came true: {what or look}"
        await asyncio.sleep(0.001)
    return found


class Speaker:
    """Says all that an actor may, right or wrong, and notes what it hears; others carry it."""

    def __init__(self, schema, columns=1):
        self.schema, self.columns, self.layout = schema, columns, LAYOUT
        self.uuid, self.session, self.seq = next(_numbers).to_bytes(16, "big"), bytes(16), 0
        self.welcome = None
        self.settings = b""
        self.grants, self.after_grant = [], []
        self.rejects, self.byes, self.others = [], [], []

    @property
    def granted(self):
        return max((grant.granted for grant in self.grants), default=0)

    @property
    def settled(self):
        return max((grant.settled for grant in self.grants), default=0)

    @property
    def verdicts(self):
        return [verdict for grant in self.grants for verdict in grant.verdicts]

    @property
    def version(self):
        """The newest that a grant named."""
        return max((Version(g.epoch, g.update) for g in self.grants), default=Version(0, 0))

    def hello_of(self, **fields):
        return wire.Hello(wire.PROTOCOL, self.uuid, __version__, bytes(16), 0, self.seq)._replace(
            **fields
        )

    def spec_of(self, streams=1):
        spec = wire.Spec(self.session, self.schema.digest, self.layout, self.columns, streams)
        return [wire.pack(spec), self.schema.to_json()]

    def header(self, **fields):
        """A Data header that would do, with some fields changed."""
        sizes = self.schema.rows, self.columns, 0, 0
        return wire.Data(self.session, self.seq, *self.version, *sizes, None)._replace(**fields)

    def data_of(self, planes, episodes, **fields):
        """One message with a good body, its header perhaps changed; the next has the next seq."""
        planes = planes or planes_of(self.schema, self.columns, seed=self.seq)
        header = self.header(columns=len(planes.obs), **fields)
        if header.seq == self.seq:
            self.seq += 1
        return planes, header, wire.encode_data(header, planes.obs, planes.small, episodes)

    def take(self, frames):
        """Hear a message of the learner."""
        message = wire.unpack(bytes(frames[0]))
        if isinstance(message, wire.Welcome):
            self.welcome, self.settings = message, bytes(frames[1])
            self.session = message.session
        elif isinstance(message, wire.Grant):
            self.grants.append(message)
            self.after_grant += map(bytes, frames[1:])
        elif isinstance(message, wire.Reject):
            self.rejects.append(message)
        elif isinstance(message, wire.Bye):
            self.byes.append(message)
        else:
            self.others.append([bytes(frame) for frame in frames])


class Actor(Speaker):
    """An actor made by hand, over the learner's two ports."""

    def __init__(self, data_url, weights_url, schema, columns=1):
        super().__init__(schema, columns)
        self._context = new_context()
        self.data = Dealer(self._context, data_url)
        self.weights = Dealer(self._context, weights_url)

    async def hello(self, **fields):
        """Ask for a session and wait for an answer, good or bad."""
        num_rejects = len(self.rejects)
        self.welcome = None
        await self.say(self.hello_of(**fields))
        await self.hear(lambda: self.welcome is not None or len(self.rejects) > num_rejects)

    async def join(self):
        """Hello, Spec, and the first grant, if there is anything to grant."""
        await self.hello()
        await self.spec()
        num_grants = len(self.grants)
        await self.hear(lambda: len(self.grants) > num_grants or bool(self.rejects))
        return self

    async def spec(self):
        spec, schema = self.spec_of()
        await self.say(bytes(spec), schema)

    async def say(self, message, *frames, to=None):
        """Any frames at all; a message or the bytes of a first frame."""
        first = message if isinstance(message, bytes) else wire.pack(message)
        socket = to or self.data
        await until(lambda: socket.send([first, *frames]), "a connection")

    async def beat(self, message, *frames):
        """The same over the weights socket."""
        await self.say(message, *frames, to=self.weights)

    async def hear(self, is_so):
        """Take in what comes until it is so."""
        await until(lambda: self.listen() or is_so())

    async def refused(self, code):
        """The text of the refusal that comes."""
        await self.hear(lambda: bool(self.rejects))
        assert self.rejects[0].code == wire.REJECT_CODES.index(code)
        return self.rejects[0].text

    def listen(self):
        """Take in all that has come."""
        for socket in (self.data, self.weights):
            while (frames := socket.receive(0)) is not None:
                self.take(frames)

    async def send(self, planes=None, *, episodes=(), is_waiting=True, **fields):
        """One message. Waits for credit and until it is settled, or for neither."""
        if is_waiting and "seq" not in fields:
            await self.credit()
        planes, header, (first, *others) = self.data_of(planes, episodes, **fields)
        await self.say(bytes(first), *others)
        if is_waiting:
            await self.hear(lambda: self.settled > header.seq)
        return planes

    async def credit(self):
        """Wait until the next message may go."""
        await self.hear(lambda: self.granted > self.seq)

    def close(self):
        self.data.close()
        self.weights.close()
        self._context.term()
