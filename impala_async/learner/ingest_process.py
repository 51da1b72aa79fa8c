"""The process of an ingest that is apart: when there is one, how it starts and how it ends.

Runs on: main thread, before the event loop; `end` on the event loop
"""

import logging
import os
import socket
import subprocess
import sys

from impala_async.config import RunConfig
from impala_async.errors import ConfigError
from impala_async.interrupts import deaf_children
from impala_async.learner.shared_memory import SharedMemory

logger = logging.getLogger(__name__)

PROGRAM = (sys.executable, "-m", "impala_async.learner.front_process")
# What it gets to close its sockets.
CLOSE_S = 2.0


class IngestProcess:
    """The process, started: it loads what it needs while the learner does, and then listens."""

    def __init__(self) -> None:
        self.memory = SharedMemory.new()
        self.end_of_channel, theirs = socket.socketpair()
        given = (theirs.fileno(), self.memory.fd)
        with theirs, deaf_children():
            self._process = subprocess.Popen(
                [*PROGRAM, *map(str, given)], stdin=subprocess.DEVNULL, pass_fds=given
            )

    def end(self) -> int:
        """Hang up, and wait for its end; its exit code. Twice does no harm."""
        if self._process.returncode is None:
            self.end_of_channel.close()
            try:
                self._process.wait(CLOSE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self.memory.close()
        return int(self._process.returncode)


def start_ingest(config: RunConfig, *, is_recording: bool) -> IngestProcess | None:
    """The process that `ingest.process` asks for; None: the learner's own loop does it."""
    wanted = config.ingest.process
    if wanted == "child" and is_recording:
        raise ConfigError("ingest.process: a child cannot record: set it to inline, or drop it")
    if wanted == "auto":
        # Measured with two cores: bench.learner.
        has_cores = len(os.sched_getaffinity(0)) >= 2
        is_apart = has_cores and not is_recording and not config.pace.is_lockstep
        wanted = "child" if is_apart else "inline"
    logger.debug("ingest: %s", wanted)
    return IngestProcess() if wanted == "child" else None
