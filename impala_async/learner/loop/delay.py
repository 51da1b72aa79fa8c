"""How long an empty slot waits before there is credit for it.

Where actors are faster than the learner, full batches wait in all slots, and each of them makes the
next one older. With later credit actors begin later, with newer weights; the learner hardly ever
waits for that, as a batch is still to wait a little for the learner.

Runs on: event loop
"""

import math
from collections import deque

# The delay is decided anew after so many batches for each slot: a new one shows after one for each.
ROUNDS = 2
# The least wait of a batch that is wanted, as a share of the time that the learner takes for one.
SPARE_SHARE = 0.25
# How much of the wait beyond that goes into the delay, and how much of the delay stays once the
# learner had to wait.
STEP, STAYS = 0.5, 0.75
# Below it a timer is no use.
LEAST_S = 0.001


class SlotDelay:
    def __init__(self, num_slots: int, ring_size: int) -> None:
        self._window, self._ring_size = ROUNDS * num_slots, ring_size
        # When each batch was full that is not done, in their order: those of the ring come first.
        self._full_at: deque[float] = deque()
        self._least_s, self._num_done, self._began_at = math.inf, 0, -math.inf
        self.seconds = 0.0

    def note_full(self, now: float) -> None:
        self._full_at.append(now)

    def note_done(self, now: float) -> None:
        """The learner is done with a batch, and takes the next if one is full."""
        self._full_at.popleft()
        is_fed = len(self._full_at) >= self._ring_size
        if not is_fed:
            self._decide(STAYS * self.seconds, now)
            return
        self._least_s = min(self._least_s, now - self._full_at[self._ring_size - 1])
        self._num_done += 1
        if self._num_done == self._window:
            spare_s = SPARE_SHARE * (now - self._began_at) / self._window
            self._decide(self.seconds + STEP * (self._least_s - spare_s), now)

    def _decide(self, seconds: float, now: float) -> None:
        self.seconds = seconds if LEAST_S <= seconds < math.inf else 0.0
        self._least_s, self._num_done, self._began_at = math.inf, 0, now
