"""A random_actor in step: it acts with the weights that lockstep wants, and takes its time."""

import random
import time
from collections import deque

from impala_async.weights import NO_VERSION, Version, WeightsLayout
from impala_async.wire.codec import Frame, encode_data
from impala_async.wire.messages import Data, Grant, Heartbeat, pack, unpack
from impala_async.wire.pulls import Pulls
from impala_async.wire.sockets import Dealer, new_context
from tests.learner.columns import planes_of
from tests.learner.service_run import COLUMNS, SCHEMA, RandomActor, ServiceRun, Trajectory


class LockstepActor(RandomActor):
    """What it sends is told by its rank and how many it has sent; `slack_s` is its longest pause.

    Returns grow by one with each of its trajectories.
    """

    poll_s = 0.001

    def __init__(
        self, data_url: str, weights_url: str, layout: WeightsLayout, lag: int, slack_s: float
    ):
        super().__init__(data_url, layout, lockstep_lag=lag)
        self.acted: list[Version] = []
        self._weights_url = weights_url
        self._layout = layout
        self._slack_s = slack_s
        self._random = random.Random()
        self._session = b""
        self._pulls: Pulls
        self._queue: deque[Version] = deque()

    @property
    def rank(self) -> int:
        return self._actor.side.welcome.rank if self._actor.side.has_session else -1

    def run(self) -> None:
        context = new_context()
        self._weights = Dealer(context, self._weights_url)
        try:
            super().run()
        finally:
            self._weights.close()
            context.term()

    def _go_on(self) -> None:
        if self._actor.side.is_joined:
            self._pull(time.monotonic())
        super()._go_on()

    def _pull(self, now: float) -> None:
        session = self._actor.side.session
        if session != self._session:
            self._session = session
            self._queue.clear()
            self._pulls = Pulls(
                session,
                have=NO_VERSION,
                layouts=(self._layout,),
                heartbeat_s=1.0,
                reply_timeout_s=0.05,
                now=now,
            )
        self._pulls.name(self._actor.side.named)
        if self._pulls.is_beat_due(now, {}) and self._weights.send([pack(Heartbeat(session, {}))]):
            self._pulls.said_beat(now, {})
        if (get := self._pulls.get(now)) and self._weights.send([pack(get)]):
            self._pulls.said_get(now)
        while (frames := self._weights.receive(0)) is not None:
            message = unpack(frames[0])
            if weights := self._pulls.take(message, frames, now):
                self._queue.append(weights.version)
            if isinstance(message, Grant):
                self._actor.side.take_grant(message)

    def _unroll(self) -> bool:
        side = self._actor.side
        if not side.is_joined:
            return False
        if not side.keeps_weights():
            if not self._queue:
                return False
            side.act_with(self._queue.popleft())
        time.sleep(self._random.uniform(0, self._slack_s))
        self.acted.append(side.version)
        return side.put((side.version, len(self.acted) - 1))

    def _encode(self, seq: int, trajectory: Trajectory) -> list[Frame]:
        assert trajectory is not None
        version, number = trajectory
        planes = planes_of(SCHEMA, COLUMNS, seed=1000 * self.rank + number)
        header = Data(self._actor.side.session, seq, *version, SCHEMA.rows, COLUMNS, 0, 0, None)
        self.num_sent += 1
        episodes = [(float(number), 3), (float(number) + self.rank / 8, 2)]
        return encode_data(header, planes.obs, planes.small, episodes)


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
