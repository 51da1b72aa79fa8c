"""Whether observations are compressed on their way: where the line is long and it pays.

Runs on: sampler thread
"""

from typing import Literal

from impala_async.config.bind import is_loopback
from impala_async.layout import Bytes2D
from impala_async.wire.codec import compress

# What is compressed must become this much smaller, or its time is better spent on acting.
WORTH = 0.8
# So many messages go plain before it is tried again.
RETRY_AFTER = 100


class Squeezer:
    """Compresses while that pays, and tries again from time to time where it did not."""

    def __init__(self, choice: Literal["auto", "on", "off"], data_url: str) -> None:
        is_remote = data_url.startswith("tcp://") and not is_loopback(data_url)
        self._is_off = choice == "off" or (choice == "auto" and not is_remote)
        self._num_to_skip = 0

    def squeeze(self, obs: Bytes2D) -> bytes | None:
        """The planes in one compressed frame; None if they should go as they are."""
        if self._is_off:
            return None
        if self._num_to_skip:
            self._num_to_skip -= 1
            return None
        frame = compress(obs.data.cast("B"))
        if len(frame) <= WORTH * obs.nbytes:
            return frame
        self._num_to_skip = RETRY_AFTER
        return None
