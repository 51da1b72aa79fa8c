"""One learner and its actors as processes of this machine, watched until the learner ends.

An actor that ends before the learner is started again; one that says it does not fit, or that dies
again and again, ends the run.
"""

import contextlib
import logging
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from impala_async.errors import SHELL_SIGNAL, ConfigError, Exit, how_it_ended
from impala_async.files import last_words, open_regular, writing
from impala_async.output import Wait
from impala_async.processes import GIVE_UP, Lifeline, answer_requests, signals_kept, without_echo

logger = logging.getLogger(__name__)

# No second try can mend these at a first start. Later one may: a simulator that crashed may still
# have its port. And an environment that raised in mid-run (2) may never do so again.
HOPELESS = (Exit.NOT_ALLOWED, Exit.MISMATCH)
POLL_S = 0.05
RESTART_AFTER_S = 1.0
# A learner that has told its actors that the run is over mostly needs so long to end.
GOODBYE_S = 3.0
MAX_QUICK_DEATHS = 5
QUICK_DEATH_S = 10.0
# Longer than a learner gives itself for its end, the last checkpoint included.
LEARNER_END_S = 720.0
ACTOR_END_S = 3.0
ASKED_END_S = 3.0
# A second Ctrl-C kills what has not ended by then.
QUIT_S = 3.0


class _Actor:
    """One number, its log, and the process that has it now."""

    def __init__(self, number: int, log_path: Path) -> None:
        self.number = number
        self.log_path = log_path
        self.process: subprocess.Popen[bytes] | None = None
        self.start_at = time.monotonic()
        self.spoke_at: float | None = None
        self.log_begin = 0
        self.num_quick_deaths = self.num_starts = 0
        self.is_done = False
        self.how_it_was_lost = ""
        self.start_trouble = Wait(logger.warning, after_s=0.0)

    def poll(self) -> int | None:
        """Its exit code, once. To start up may take long: its life begins with its first word."""
        code = self.process.poll() if self.process else None
        if code is None:
            with contextlib.suppress(OSError):  # somebody may remove the run folder
                if self.spoke_at is None and self.log_path.stat().st_size > self.log_begin:
                    self.spoke_at = time.monotonic()
            return None
        self.process = None
        lived_s = 0.0 if self.spoke_at is None else time.monotonic() - self.spoke_at
        if code != Exit.DONE:
            self.num_quick_deaths = self.num_quick_deaths + 1 if lived_s < QUICK_DEATH_S else 0
        return code

    def start(self, run_dir: Path, lifeline: Lifeline) -> None:
        with writing(self.log_path):
            self.log_path.parent.mkdir(exist_ok=True)
            # To read as well: to write alone to a pipe without a reader is another error.
            log = open(self.log_path, "a+b", buffering=0, opener=open_regular)  # noqa: SIM115
        with log:
            self.log_begin = log.tell()
            # It ends with us, and with the learner: until then there is one to wait for.
            flags = ["--learner", str(run_dir), "--connect-s", "inf"]
            flags += ["--start", str(self.number), str(self.num_starts)]
            self.process = spawn("actor", flags, lifeline, output=log)
        self.num_starts += 1
        self.spoke_at = None

    def how_it_ended(self, code: int) -> str:
        """How it ended, and the last words since its start that say why."""
        if code == -signal.SIGKILL:
            return how_it_ended(code)
        said = last_words(self.log_path, self.log_begin)
        return f"{how_it_ended(code)} ({said})"


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
        logs = self._run_dir / "actors"
        self._actors = [_Actor(n, logs / f"actor-{n}.log") for n in range(num_actors)]
        answer_requests(without_echo(self._pass_on))
        try:
            while self._learner.poll() is None and self.verdict is None and not self._is_hurried():
                for actor in self._actors:
                    if self.verdict is None and not self.heard:
                        self._look_after(actor)
                self._tell_wait()
                time.sleep(POLL_S)
        finally:
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

    def _serves(self) -> bool:
        """Whether the learner takes actors. The file of an earlier one was removed before."""
        return os.path.exists(self._run_dir / "service.json")  # unlike Path.exists, on a bad disk

    def _look_after(self, actor: _Actor) -> None:
        if actor.process is None:
            if time.monotonic() >= actor.start_at and (not actor.is_done or self._serves()):
                self._start(actor)
            return
        if (code := actor.poll()) is None:
            return
        how = actor.how_it_ended(code)
        is_hopeless = code in HOPELESS and actor.num_starts == 1
        if actor.num_quick_deaths > MAX_QUICK_DEATHS or is_hopeless:
            reason = f"actor {actor.number} cannot run: it {how}; its log: {actor.log_path}"
            self.verdict = exit_code(code), reason
        # The learner has said goodbye to one that is done, or somebody has ended it.
        actor.is_done = code == Exit.DONE
        goes_on = f"{how_it_ended(code)}, though the run goes on"
        actor.how_it_was_lost = goes_on if actor.is_done else how
        actor.start_at = time.monotonic() + (GOODBYE_S if actor.is_done else RESTART_AFTER_S)

    def _start(self, actor: _Actor) -> None:
        """Start it. A failure of the first start ends the run; a later one may pass."""
        if actor.how_it_was_lost:
            told = "actor %d %s: starting it again; its log: %s"
            logger.warning(told, actor.number, actor.how_it_was_lost, actor.log_path)
            actor.how_it_was_lost = ""
        try:
            actor.start(self._run_dir, self._lifeline)
        except ConfigError as error:
            if actor.num_starts == 0:
                raise
            trouble = f"actor {actor.number} cannot be started again yet: {error}; still trying"
            actor.start_trouble.look(lambda _: trouble)
            actor.start_at = time.monotonic() + RESTART_AFTER_S

    def _pass_on(self, number: int, frame: object) -> None:
        """Only the learner decides what a signal means; the actors end with it."""
        if not self.heard:
            self._wait = Wait(logger.warning)
        elif number == signal.SIGINT and self._kill_at == math.inf:
            self._kill_at = time.monotonic() + QUIT_S
        self.heard.append(number)
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
        running = [actor.process for actor in self._actors if actor.process]
        wait = Wait(logger.info)

        def is_hurried() -> bool:
            wait.look(lambda s: f"ending: waiting for the actors ({s:.0f} s)")
            return self._is_hurried()

        # A learner that reached its goal has told them so; they would look for another one again.
        end_in_time(running, ACTOR_END_S if is_finished else 0.0, is_hurried)
        self._lifeline.close()


def spawn(
    door: str, flags: Sequence[str], lifeline: Lifeline, output: IO[bytes] | None = None
) -> subprocess.Popen[bytes]:
    """A process behind a door, which ends with this one at the latest."""
    command = [sys.executable, "-m", f"impala_async.{door}", *flags]
    # In a group of its own: Ctrl-C reaches this process alone, which passes it on once.
    how: dict[str, Any] = {"stdin": subprocess.DEVNULL, "process_group": 0}
    try:
        return lifeline.start(command, stdout=output, stderr=output, **how)
    except OSError as error:
        raise ConfigError(f"cannot start a process of the {door}: {error.strerror}") from None


def exit_code(code: int) -> int:
    """The exit code that a shell gives: 128 + n for a process that signal n ended."""
    return code if code >= 0 else SHELL_SIGNAL - code


def end_in_time(
    processes: Sequence[subprocess.Popen[bytes]],
    grace_s: float,
    is_hurried: Callable[[], bool] = lambda: False,
    asked_s: float | None = None,
) -> None:
    """Let processes end by themselves, then ask, then insist; all at once as soon as we hurry."""
    asked_s = ASKED_END_S if asked_s is None else asked_s
    for step, patience_s in (("wait", grace_s), ("terminate", asked_s), ("kill", ASKED_END_S)):
        for process in processes:
            if process.poll() is None and step != "wait":
                getattr(process, step)()
        until = time.monotonic() + patience_s
        while any(process.poll() is None for process in processes):
            if time.monotonic() >= until or is_hurried():
                break
            time.sleep(POLL_S)
    for process in processes:
        process.wait()
