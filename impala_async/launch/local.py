"""One learner and its actors as processes of this machine, watched until the learner ends.

An actor that cannot run ends the run.
"""

import logging
import math
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from impala_async.errors import Exit
from impala_async.launch.actors import GOODBYE_S, Actors, Supervision
from impala_async.launch.children import POLL_S, end_in_time, exit_code, spawn
from impala_async.launch.logs import LogFile
from impala_async.output import Wait
from impala_async.processes import GIVE_UP, Lifeline, answer_requests, signals_kept, without_echo

logger = logging.getLogger(__name__)

# Longer than a learner gives itself for its end, the last checkpoint included.
LEARNER_END_S = 720.0
# A second Ctrl-C kills what has not ended by then.
QUIT_S = 3.0


class LocalRun:
    """Owns the processes of one run. Actors load while the learner does, and find its folder."""

    def __init__(self, learner_flags: Sequence[str], run_dir: Path) -> None:
        self._run_dir = run_dir
        self._lifeline = Lifeline()
        self.verdict: tuple[int, str] | None = None
        """Exit code and reason, where an actor cannot run and the run is given up."""
        self.heard: list[int] = []
        """The signals that asked for an end."""
        self._kill_at = math.inf
        self.has_begun = False
        """Whether the learner has taken actors."""
        self._wait = Wait(logger.info)
        self._learner = spawn("learner", learner_flags, self._lifeline)

    @signals_kept()
    def run(self, num_actors: int) -> int:
        """Start the actors and watch everybody; the learner's exit code, or an actor's verdict."""
        actors = self._actors = self._make_actors(num_actors)
        answer_requests(without_echo(self._pass_on))
        try:
            while self._has_learner() and not (actors.verdict or self._is_hurried()):
                actors.look()
                self._tell_wait()
                time.sleep(POLL_S)
        finally:
            self.verdict = actors.verdict
            self._end()
        if self.verdict is not None:
            code, reason = self.verdict
            # Only now, so that it comes after what the learner had to say at its end.
            logger.error("%s", reason)
            return code
        code = self._learner.returncode
        if code < 0 and self._is_hurried():
            return Exit.INTERRUPTED
        # A learner that was met in its first second had not learned yet what a signal means.
        is_untaught = -code in (signal.SIGTERM, signal.SIGHUP) and bool(self.heard)
        return Exit.DONE if is_untaught else exit_code(code)

    def _make_actors(self, num_actors: int) -> Supervision:
        folder = self._run_dir / "actors"
        logs = [LogFile(folder / f"actor-{n}.log", "--run-dir") for n in range(num_actors)]
        return Actors(str(self._run_dir), logs, self._lifeline)

    def _has_learner(self) -> bool:
        """Whether there is one, or is to be one again."""
        return self._learner.poll() is None

    def _serves(self) -> bool:
        """Whether the learner takes actors. The file of an earlier one was removed before."""
        return os.path.exists(self._run_dir / "service.json")  # unlike Path.exists, on a bad disk

    def _pass_on(self, number: int, frame: object) -> None:
        """Only the learner decides what a signal means; the actors end with it."""
        if not self.heard:
            self._wait = Wait(logger.warning)
        elif number == signal.SIGINT and self._kill_at == math.inf:
            self._kill_at = time.monotonic() + QUIT_S
        self.heard.append(number)
        self._actors.is_ending = True
        if self._learner.poll() is None:
            self._learner.send_signal(number)

    def _is_hurried(self) -> bool:
        return time.monotonic() >= self._kill_at

    def _tell_wait(self) -> None:
        """A learner that serves tells of its work, and one that has stopped serving of its end."""
        serves = self._serves()
        self.has_begun = self.has_begun or serves
        waits = "waiting for the learner, which"
        if not self.heard and not self.has_begun:
            does = "loads torch, tries the environment and builds what it trains"
            self._wait.look(lambda s: f"starting: {waits} {does} ({s:.0f} s)")
        elif self.heard and self._kill_at == math.inf and (serves or not self.has_begun):
            does, quit_now = "has not answered yet", "press Ctrl-C again to quit at once"
            self._wait.look(lambda s: f"ending: {waits} {does} ({s:.0f} s); {quit_now}")

    def _end(self) -> None:
        is_finished = self._learner.poll() == Exit.DONE and not self.heard
        if self._learner.poll() is None:
            # One that does not serve yet knows no other signal.
            is_given_up = self.verdict is not None and self._serves()
            self._learner.send_signal(GIVE_UP if is_given_up else signal.SIGTERM)
        end_in_time([self._learner], LEARNER_END_S, self._is_hurried)
        # A learner that reached its goal has told them so; they would look for another one again.
        self._actors.end(GOODBYE_S if is_finished else 0.0, self._is_hurried)
        self._lifeline.close()
