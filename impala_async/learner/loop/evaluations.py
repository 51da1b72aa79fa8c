"""Evaluations while a run trains: weights go to a process of their own, and its answers come back.

The learner thread makes the copies that it makes for a checkpoint, and nobody waits for the rest.
The best weights stay as a checkpoint in a folder of their own. A process that dies is told of, and
another one is started for the next evaluation.

Runs on: event loop; weights are written into memory, and to the disk, on worker threads
"""

import asyncio
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from safetensors.torch import save

from impala_async.config.evaluate import EvaluateSection
from impala_async.errors import how_it_ended
from impala_async.files import last_words, open_regular
from impala_async.learner.handoff import Captured, on_thread
from impala_async.learner.loop.saver import Saver
from impala_async.processes import Lifeline
from impala_async.weights import NO_VERSION

logger = logging.getLogger(__name__)

EVALUATOR = (sys.executable, "-m", "impala_async.evaluation.evaluator")
LOG = "evaluator.log"
POLL_S = 0.1
# So many deaths in a row, without an answer between them, and no further process is started.
MOST_DEATHS = 3
# As long as an actor has: simulators that it does not close may outlive it.
END_S = 3.0
# One that plays says in its log every few seconds how far it is. To start takes longest.
SILENT_S = 120.0


class _DiedError(Exception):
    """The process that evaluates has died; the text says how."""


class _Evaluator:
    """The process, the memory from which it takes weights, and the one for its answers."""

    def __init__(self, run: Path) -> None:
        self._log_path = run / LOG
        # It is its own: a learner may have none, and ends without a word when it is killed.
        self._lifeline = Lifeline()
        # No pipe: what the environment forks may hold that open for ever.
        self._weights, self._answers = (
            os.memfd_create(f"impala-async-{name}") for name in ("weights", "answers")
        )
        self._num_read = 0
        try:
            # To read as well: to write alone to a pipe without a reader is another error.
            with open(self._log_path, "a+b", opener=open_regular) as log:
                self._log_begin = log.tell()
                self._process = self._start(run, log)
        except OSError as error:
            self._close_files()
            raise _DiedError(f"cannot be started: {error}") from None

    def _start(self, run: Path, log: IO[bytes]) -> "subprocess.Popen[bytes]":
        fds = self._weights, self._answers
        # In a group of its own: Ctrl-C reaches the learner, which ends it.
        how: dict[str, Any] = {"stdin": subprocess.PIPE, "bufsize": 0, "process_group": 0}
        command = [*EVALUATOR, str(run), *map(str, fds)]
        return self._lifeline.start(command, fds, stdout=log, stderr=log, **how)

    async def evaluate(self, captured: Captured) -> dict[str, Any]:
        """Let it play with these weights; raises _DiedError."""
        data = b""

        def hand_over() -> None:
            nonlocal data
            data = save(dict(captured.training.tensors["model"]))
            os.lseek(self._weights, 0, os.SEEK_SET)
            with open(self._weights, "wb", closefd=False) as memory:
                memory.write(data)

        await on_thread("evaluate", hand_over)
        assert self._process.stdin is not None
        with suppress(OSError):  # it has died, as the next look will tell
            self._process.stdin.write(b"%d\n" % len(data))
        asked_at, is_told = time.time(), False
        while True:
            line = os.pread(self._answers, 1 << 12, self._num_read)
            if line.endswith(b"\n"):
                self._num_read += len(line)
                return dict(json.loads(line))
            if (code := self._process.poll()) is not None:
                said = last_words(self._log_path, self._log_begin)
                raise _DiedError(f"{how_it_ended(code)} ({said})")
            if not is_told and (is_told := self._is_silent(asked_at)):
                logger.warning(
                    "the process that evaluates (%d) has said nothing for %.0f s: it is stopped, "
                    "or its environment hangs: training goes on; its log: %s",
                    *(self._process.pid, SILENT_S, self._log_path),
                )
            await asyncio.sleep(POLL_S)

    def _is_silent(self, since: float) -> bool:
        """Whether it has neither answered nor written into its log for too long."""
        with suppress(OSError):  # somebody may remove the run folder
            since = max(since, self._log_path.stat().st_mtime)
        return time.time() - since >= SILENT_S

    def ask_to_end(self) -> None:
        self._process.terminate()

    def close(self) -> None:
        """End it, in good order if that takes no longer than `END_S`."""
        self.ask_to_end()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._close_files()

    def _close_files(self) -> None:
        self._lifeline.close()
        os.close(self._weights)
        os.close(self._answers)


class Evaluations:
    """`ask` lets the learner thread make copies, which then come to `take`; `on_return` takes the
    return of each that was evaluated."""

    def __init__(
        self,
        section: EvaluateSection,
        saver: Saver,
        *,
        ask: Callable[[], None],
        on_return: Callable[[float], None],
    ) -> None:
        self._section, self._saver = section, saver
        self._ask, self._on_return = ask, on_return
        self._wanted: asyncio.Future[tuple[Captured, dict[str, Any]]] | None = None
        self._evaluator: _Evaluator | None = None
        self._newest: dict[str, Any] = {}
        self._env_steps: int | None = None
        self._num_done = self._num_deaths = 0
        self.saving: asyncio.Task[None] | None = None
        """The best weights are written while it runs."""

    def take(self, captured: Captured) -> None:
        """Evaluate these, if some are wanted. Accounts are those of now, when they were copied."""
        if self._wanted is not None and not self._wanted.done():
            self._wanted.set_result((captured, self._saver.state_of(captured)))

    async def run(self) -> None:
        """Evaluate regularly, but never weights that have been evaluated."""
        if (every_s := self._section.every_s) is None:
            return
        due, version = time.monotonic(), NO_VERSION
        try:
            while self._num_deaths < MOST_DEATHS:
                due = max(due + every_s, time.monotonic())
                await asyncio.sleep(due - time.monotonic())
                self._wanted = asyncio.get_running_loop().create_future()
                self._ask()
                captured, state = await self._wanted
                if captured.progress.version != version:
                    version = captured.progress.version
                    await self._evaluate(captured, state)
        except asyncio.CancelledError:  # the run is over
            if not self._num_done:
                logger.warning("no evaluation was finished in this start")
            raise
        finally:
            if self._evaluator is not None:
                self._evaluator.ask_to_end()

    async def _evaluate(self, captured: Captured, state: dict[str, Any]) -> None:
        try:
            if self._evaluator is None:
                self._evaluator = _Evaluator(self._saver.folder.absolute)
            answer = await self._evaluator.evaluate(captured)
        except _DiedError as error:
            await self._tell_death(f"{error}")
            return
        except OSError as error:  # to the kernel that memory is a file, which `ulimit -f` limits
            await self._tell_death(f"cannot be given weights: {error}")
            return
        self._num_deaths = 0
        self._num_done += 1
        self._newest, self._env_steps = answer, captured.progress.env_steps_trained
        score = answer[self._section.kinds[0]]
        if score is None:
            return
        best = self._saver.best_evaluated
        if best is None or score > best[0]:
            save_best = self._saver.save_best(captured, state, score)
            self.saving = asyncio.get_running_loop().create_task(save_best)
            # The end of a run waits for it.
            await asyncio.wait([self.saving])
            self.saving.result()
        self._on_return(score)

    async def _tell_death(self, how: str) -> None:
        self._num_deaths += 1
        try:  # it may live, and take its time
            await on_thread("evaluate", self.close)
        except OSError:  # the system has no thread left
            self.close()
        then = "another one is started for the next evaluation"
        if self._num_deaths >= MOST_DEATHS:
            then = f"after {MOST_DEATHS} in a row there are no further evaluations"
        logger.error("the process that evaluates %s: training goes on, and %s", how, then)

    def close(self) -> None:
        evaluator, self._evaluator = self._evaluator, None
        if evaluator is not None:
            evaluator.close()

    def report(self) -> dict[str, object]:
        best = self._saver.best_evaluated
        return {
            "evaluate/greedy_return": self._newest.get("greedy"),
            "evaluate/sampled_return": self._newest.get("sampled"),
            "evaluate/env_steps": self._env_steps,
            "evaluate/best_return": best and best[0],
            "evaluate/took_s": self._newest.get("took_s"),
            "evaluate/count": self._num_done,
        }
