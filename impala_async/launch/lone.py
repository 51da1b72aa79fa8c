"""A learner as a child of this process, without actors: whoever started it feeds it."""

import subprocess
import time
from collections.abc import Mapping, Sequence

from impala_async.launch.local import LEARNER_END_S, end_in_time, exit_code, spawn
from impala_async.lifeline import Lifeline

POLL_S = 0.05


class LoneLearner:
    """Owns the process. It ends with this one, however this one ends."""

    def __init__(self, flags: Sequence[str], environment: Mapping[str, str]) -> None:
        self._lifeline = Lifeline()
        self._process: subprocess.Popen[bytes] = spawn(
            "learner", flags, self._lifeline, environment=environment
        )

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """It has not begun yet, so it has nothing to say."""
        self._process.kill()
        self._process.wait()

    def end(self, grace_s: float) -> int:
        """Let it end by itself for so long, then ask it to; its exit code."""
        until = time.monotonic() + grace_s
        while self.is_running and time.monotonic() < until:
            time.sleep(POLL_S)
        if self.is_running:
            self._process.terminate()
        end_in_time([self._process], LEARNER_END_S)
        self._lifeline.close()
        return exit_code(self._process.returncode)
