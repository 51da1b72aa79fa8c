"""Actors on the nodes of a Ray cluster, and their learner here.

Ray places actors, and places them again when it loses a node or a process of its own. Nothing of a
run passes through Ray but its address and key: the processes that it has placed dial the learner,
as all actors do.
"""

import errno
import itertools
import logging
import math
import os
import socket
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from impala_async.config.learner import KEY_FILE, KEY_VARIABLE
from impala_async.errors import (
    CheckpointError,
    ConfigError,
    Exit,
    StartError,
    UnreachableError,
    how_it_ended,
)
from impala_async.files import find_bytes, find_object
from impala_async.launch.actors import GOODBYE_S, Actors, Supervision
from impala_async.launch.children import POLL_S, spawn
from impala_async.launch.local import LocalRun
from impala_async.launch.logs import EchoedLog
from impala_async.output import Wait
from impala_async.processes import Lifeline

logger = logging.getLogger(__name__)

ANSWER_S = 5.0
LEARNER_RESTART_S = 5.0
# One that dies more often in a row, and trains nothing that is saved, would do so for ever.
MAX_RESTARTS_IN_VAIN = 5
IN_VAIN = (
    f"the {MAX_RESTARTS_IN_VAIN + 1}th time since it has saved anything new: it is given up; "
    "what it died of is above"
)


def connect() -> None:
    """Join the cluster that RAY_ADDRESS names, or else that of this host. Raise ConfigError where
    there is none, and UnreachableError where it does not answer: Ray would wait for minutes."""
    try:
        import ray
    except ImportError:
        raise ConfigError("ray is not installed here: pip install 'impala-async[ray]'") from None
    named = os.environ.get("RAY_ADDRESS", "")
    host, _, port = named.rpartition(":")
    if port.isdecimal() and "://" not in named:
        try:
            socket.create_connection((host.strip("[]"), int(port)), ANSWER_S).close()
        except OSError as error:
            raise UnreachableError(f"no Ray cluster at RAY_ADDRESS ({named}): {error}") from None
    try:
        ray.init(address="auto", logging_level=logging.WARNING)
    except ConnectionError:
        wants = "start one by `ray start --head`, or name one by RAY_ADDRESS"
        raise ConfigError(f"there is no Ray cluster on this host: {wants}") from None


@contextmanager
def number_here(learner: str) -> Iterator[int]:
    """The least number that no other process of this host has for this learner: GPUs go by it."""
    # Such a name has no file, and is free again when the process ends, in whatever way.
    name = f"\0impala-async-{os.getuid()}-{zlib.crc32(learner.encode())}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as own:
        for number in itertools.count():
            try:
                own.bind(f"{name}-{number}")
                break
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
        yield number


class Holder:
    """An actor of Ray's, somewhere. It holds one process of ours, which ends with it."""

    def __init__(self, number: int, folder: str) -> None:
        self._number = number
        # Environments of one's own often lie there, on a disk that the nodes share.
        with suppress(OSError):
            os.chdir(folder)

    def place(self) -> str:
        import ray

        return str(ray.util.get_node_ip_address())

    def hold(self, learner: str, key: str) -> tuple[int, str]:
        """Look after the process until its run is over; exit code and reason if it cannot run."""
        os.environ[KEY_VARIABLE] = key  # nothing where none is wanted
        log, lifeline = EchoedLog(f"actor {self._number}"), Lifeline()
        with number_here(learner) as here:
            actors = Actors(
                learner, [log], lifeline, first=self._number, here=here, has_numbers=False
            )
            while not (actors.verdict or actors.is_over):
                actors.look()
                time.sleep(POLL_S)
            actors.end(GOODBYE_S if actors.is_over else 0.0, lambda: False)
        lifeline.close()
        return actors.verdict or (int(Exit.DONE), "")


class PlacedActors:
    """Supervises the holders, as soon as a learner says in its run folder where it listens."""

    def __init__(self, num_actors: int, run_dir: Path) -> None:
        self._num_actors, self._service = num_actors, run_dir / "service.json"
        self._key = run_dir / KEY_FILE
        self._holders: list[Any] = []
        self._placing: list[Any] = []
        self._holding: list[Any] = []
        self.verdict: tuple[int, str] | None = None
        self.is_ending = False

    def look(self) -> None:
        import ray

        if self.is_ending or not (self._holders or self._place()):
            return
        placed, self._placing = ray.wait(self._placing, num_returns=len(self._placing), timeout=0)
        if self._placing:
            told = f"waiting for Ray to place {len(self._placing)} of {self._num_actors} actors"
            self._wait.look(lambda s: f"{told}, each of which wants a CPU ({s:.0f} s)")
        ended, self._holding = ray.wait(self._holding, num_returns=len(self._holding), timeout=0)
        try:
            for place in ray.get(placed):
                logger.info("Ray has placed an actor on %s", place)
            for code, reason in ray.get(ended):
                if code != Exit.DONE:
                    self.verdict = code, reason
        except ray.exceptions.RayError as error:
            # Its last line says why: the package is missing there, or the cluster has ended.
            why = str(error).strip().rpartition("\n")[2]
            self.verdict = Exit.TRY_AGAIN, f"Ray cannot run an actor: {why}"

    def end(self, grace_s: float, is_hurried: Callable[[], bool]) -> None:
        import ray

        until = time.monotonic() + grace_s
        while self._holding and time.monotonic() < until and not is_hurried():
            _, self._holding = ray.wait(self._holding, timeout=POLL_S)
        ray.shutdown()  # all that are left end with it

    def _place(self) -> bool:
        import ray

        if (service := find_object(self._service)) is None:
            return False
        key = find_bytes(self._key) if service.get("is_encrypted") else None
        learner = service["data_url"], (key or b"").decode().strip()
        self._wait = Wait(logger.warning)
        again = {"max_restarts": -1, "max_task_retries": -1}
        make = ray.remote(num_cpus=1, scheduling_strategy="SPREAD", **again)(Holder).remote
        self._holders = [make(number, os.getcwd()) for number in range(self._num_actors)]
        self._placing = [holder.place.remote() for holder in self._holders]
        self._holding = [holder.hold.remote(*learner) for holder in self._holders]
        return True


class RayRun(LocalRun):
    """A learner here, started again when it dies, and actors anywhere in the cluster."""

    def __init__(self, flags: Sequence[str], binds: Mapping[str, str], run_dir: Path) -> None:
        """`flags` of the learner; `binds` are the settings of its two ports."""
        super().__init__([*flags, *_at_ports(binds, {})], run_dir)
        self._flags, self._binds = flags, binds
        self._start_at = math.inf
        self._trained, self._num_in_vain = b"", 0
        self._trained = self._find_trained()
        # Actors were told an address, and nobody could tell them another one.
        self._service: dict[str, Any] = {}

    def _make_actors(self, num_actors: int) -> Supervision:
        return PlacedActors(num_actors, self._run_dir)

    def _has_learner(self) -> bool:
        self._service = self._service or find_object(self._run_dir / "service.json") or {}
        code = self._learner.poll()
        if code is None:
            return True
        if code in (Exit.DONE, Exit.CONFIG) or self.heard:
            return False
        if self._start_at == math.inf:
            if self._count_in_vain(code) > MAX_RESTARTS_IN_VAIN:
                logger.error("the learner %s, %s", how_it_ended(code), IN_VAIN)
                return False
            self._start_at = time.monotonic() + LEARNER_RESTART_S
            told = "the learner %s: starting it again in %.0f s"
            logger.warning(told, how_it_ended(code), LEARNER_RESTART_S)
        elif time.monotonic() >= self._start_at:
            flags = [*self._flags, *_at_ports(self._binds, self._service)]
            try:
                self._learner = spawn("learner", flags, self._lifeline)
                self._start_at = math.inf
            except StartError as error:
                self._start_at = time.monotonic() + LEARNER_RESTART_S
                logger.warning("%s: trying again in %.0f s", error, LEARNER_RESTART_S)
        return True

    def _find_trained(self) -> bytes:
        """The number of updates in the last checkpoint, as it is in the name of that. A disk that
        fails now may have killed the learner too: it is as it was."""
        with suppress(CheckpointError):
            return (find_bytes(self._run_dir / "last_checkpoint") or b"").rpartition(b"-")[2]
        return self._trained

    def _count_in_vain(self, code: int) -> int:
        """Its ends since it has trained anything that is saved, with this one; 75 may pass."""
        before, self._trained = self._trained, self._find_trained()
        if before != self._trained:
            self._num_in_vain = 0
        self._num_in_vain += code != Exit.TRY_AGAIN
        return self._num_in_vain


def _at_ports(binds: Mapping[str, str], service: Mapping[str, Any]) -> list[str]:
    """The flags by which a learner listens where the one before did, if that has."""
    flags = []
    for key, url in binds.items():
        port = str(service.get(f"{key}_url", url)).rpartition(":")[2]
        flags += ["--set", f"bind.{key}={url.rpartition(':')[0]}:{port}"]
    return flags
