"""A random_actor in step: it acts with the weights that lockstep wants, and takes its time."""

import random
import time

from impala_async.wire.codec import encode_data
from impala_async.wire.messages import Data, Get, Message, WeightsReply, Welcome, pack, unpack
from impala_async.wire.sockets import Context, Dealer, new_context
from tests.learner.columns import planes_of
from tests.learner.service_run import SCHEMA, RandomActor, ServiceRun

Version = tuple[int, int]
NONE: Version = (0, 0)


class LockstepActor(RandomActor):
    """What it sends is told by its rank and how many it has sent; `slack_s` is its longest pause.

    Returns grow by one with each of its trajectories.
    """

    poll_s = 0.001

    def __init__(self, data_url: str, weights_url: str, layout: bytes, lag: int, slack_s: float):
        super().__init__(data_url, layout)
        self.rank = -1
        self.acted: list[Version] = []
        self._weights_url = weights_url
        self._lag = lag
        self._slack_s = slack_s
        self._random = random.Random()
        self._context: Context | None = None
        self._weights: Dealer | None = None
        self._have = NONE
        self._queue: list[Version] = []
        self._ask_at = 0.0

    def run(self) -> None:
        self._context = new_context()
        self._weights = Dealer(self._context, self._weights_url)
        try:
            super().run()
        finally:
            self._weights.close()
            self._context.term()

    def _take(self, message: Message) -> None:
        super()._take(message)
        if isinstance(message, Welcome):
            self.rank = message.rank

    def _may_send(self) -> bool:
        self._listen()
        return super()._may_send() and self._next_version() is not None

    def _listen(self) -> None:
        assert self._weights is not None
        if self._session != bytes(16) and time.monotonic() >= self._ask_at:
            self._ask_at = time.monotonic() + 0.002
            self._weights.send([pack(Get(self._session, *self._have))])
        while (frames := self._weights.receive(0)) is not None:
            reply = unpack(frames[0])
            if isinstance(reply, WeightsReply) and (reply.epoch, reply.update) > self._have:
                self._have = (reply.epoch, reply.update)
                self._queue.append(self._have)

    def _next_version(self) -> Version | None:
        """Of its next trajectory, once it is there: the first of a session serves `lag` more."""
        if len(self.acted) <= self._lag:
            return self._queue[0] if self._queue else None
        return self._queue[1] if len(self._queue) > 1 else None

    def _send(self) -> None:
        version = self._next_version()
        assert version is not None
        if len(self.acted) > self._lag:
            self._queue.pop(0)
        time.sleep(self._random.uniform(0, self._slack_s))
        number = len(self.acted)
        self.acted.append(version)
        planes = planes_of(SCHEMA, self._columns, seed=1000 * self.rank + number)
        header = Data(self._session, self._seq, *version, SCHEMA.rows, 2, 0, 0, None)
        episodes = [(float(number), 3), (float(number) + self.rank / 8, 2)]
        frames = encode_data(header, planes.obs, planes.small, episodes)
        while not self._socket.send(frames) and not self._is_over.is_set():
            time.sleep(0.001)
        self._seq += 1
        self.num_sent += 1


async def start_lockstep_actors(
    run: ServiceRun, num_actors: int = 2, *, slack_s: float = 0.0
) -> list[LockstepActor]:
    """Some more of them, at work."""
    place = await run.place()
    urls = place["data_url"], place["weights_url"]
    new = [
        LockstepActor(*urls, run.layout, run.config.pace.lag, slack_s) for _ in range(num_actors)
    ]
    for lockstep_actor in new:
        lockstep_actor.start()
    run.random_actors += new
    return new
