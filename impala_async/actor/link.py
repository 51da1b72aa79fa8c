"""The actor's second connection: weights down, heartbeats up, in a thread of its own, so that a
lease lives however long an environment step takes.

Runs on: link thread (`_run`); the other methods on the sampler thread
"""

import os
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import KW_ONLY, dataclass

from impala_async.actor.joining import CONNECT_POLL_S, read
from impala_async.envs.faults import hang_now
from impala_async.errors import ProtocolError
from impala_async.output import SeldomLog
from impala_async.weights import NO_VERSION, Version, Weights, WeightsLayout
from impala_async.wire import messages as wire
from impala_async.wire.keys import Key
from impala_async.wire.pulls import Pulls
from impala_async.wire.sockets import Context, Dealer

# Messages between two looks at whether it is time for a heartbeat, or to end.
MAX_AT_ONCE = 100
# Beside weights: what else comes at their port is small.
SPARE_BYTES = 1 << 16


@dataclass(eq=False)
class Link:
    """Owns the weights socket of one session, and the newest weights that came over it."""

    context: Context
    url: str
    welcome: wire.Welcome
    _: KW_ONLY
    layouts: Sequence[WeightsLayout]
    """Weights come in one of these, or are those of another model."""
    have: Version
    num_kept: int
    """So many versions wait to be taken; in lockstep none may be passed over."""
    timers: Mapping[str, float]
    log: SeldomLog
    key: Key | None = None

    def __post_init__(self) -> None:
        self.weights_s = self.layouts[0].num_bytes / wire.SLOWEST_BYTES_PER_S
        """How long weights may take to come down."""
        self.pulls = Pulls(
            self.welcome.session,
            have=self.have,
            layouts=self.layouts,
            heartbeat_s=self.welcome.heartbeat_s,
            reply_timeout_s=self.welcome.lease_s + self.weights_s,
            now=time.monotonic(),
        )
        """The link thread's; others only read it."""
        # A peer that is no learner must not fill our memory with a message that never ends.
        self._max_frame_bytes = max(layout.num_bytes for layout in self.layouts) + SPARE_BYTES
        # The sampler thread's words to the link thread.
        self._wanted, self._is_beat_wanted = NO_VERSION, False
        self._newest: deque[Weights] = deque(maxlen=self.num_kept)
        self._grants: deque[wire.Grant] = deque(maxlen=16)
        self.cut = wire.NO_SEQ
        """The newest seq that others wait for, and that is to be cut."""
        self._arrived = threading.Event()
        self._failure: BaseException | None = None
        self._is_closed = False
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)
        self._thread.start()

    def want(self, version: Version) -> None:
        """The learner named a version: fetch it if it is newer."""
        if version > self._wanted:
            self._wanted = version
            os.eventfd_write(self._wake_fd, 1)

    def beat(self) -> None:
        """Tell how long things take without waiting for the next heartbeat's time."""
        self._is_beat_wanted = True
        os.eventfd_write(self._wake_fd, 1)

    def take_newest(self) -> Weights | None:
        self._arrived.clear()
        return self._newest.popleft() if self._newest else None

    def wait_for_weights(self, timeout_s: float) -> None:
        self._arrived.wait(timeout_s)

    def take_grants(self) -> list[wire.Grant]:
        """Those that came in answer to heartbeats; or raises what has ended the thread."""
        if self._failure is not None:
            raise self._failure
        return [self._grants.popleft() for _ in range(len(self._grants))]

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        os.eventfd_write(self._wake_fd, 1)
        self._thread.join()
        os.close(self._wake_fd)

    def _run(self) -> None:
        try:
            dealer = Dealer(self.context, self.url, self._max_frame_bytes, self.key)
            with closing(dealer) as socket:
                while not self._is_closed:
                    self._serve(socket)
        except BaseException as error:  # a thread has no caller: the sampler thread raises it
            self._failure = error
            self._arrived.set()

    def _serve(self, socket: Dealer) -> None:
        pulls, now = self.pulls, time.monotonic()
        if not socket.is_greeted:
            pulls.on_new_connection()
        pulls.name(self._wanted)
        if self._is_beat_wanted:
            self._is_beat_wanted, pulls.next_beat = False, now
        timers = dict(self.timers)
        if pulls.is_beat_due(now, timers):
            beat = wire.Heartbeat(self.welcome.session, {**timers, **hang_now()})
            if socket.greet([wire.pack(beat)]):
                pulls.said_beat(now, timers)
            else:
                pulls.next_beat = now + CONNECT_POLL_S
        is_ready = socket.is_greeted
        if is_ready and (get := pulls.get(now)):
            is_ready = socket.send([wire.pack(get)])
            if is_ready:
                pulls.said_get(now)
        wait_s = min(pulls.wait_s(now), max(pulls.next_beat - now, 0.0))
        if socket.wait(wait_s if is_ready else CONNECT_POLL_S, self._wake_fd):
            os.eventfd_read(self._wake_fd)
        for _ in range(MAX_AT_ONCE):
            if (frames := socket.receive(0)) is None:
                pulls.looked_at = time.monotonic()
                break
            self._take(frames)

    def _take(self, frames: Sequence[wire.Frame]) -> None:
        message = read(frames[0], self.log)
        if message is None:
            return
        try:
            weights = self.pulls.take(message, frames, time.monotonic())
        except ProtocolError as error:
            self.log.warning("%s: asking again", error)
            return
        if isinstance(message, wire.Grant):
            self._grants.append(message)
            if message.session == self.welcome.session:
                self.cut = max(self.cut, message.cut)
        if weights is not None:
            self._newest.append(weights)
        if weights is not None or isinstance(message, wire.Reject):
            self._arrived.set()
