"""The processes of a turn: what they hold together, and the end of every one of them.

Children of some peers outlive their parent, or leave its session and group. So meanwhile this
process is the one that inherits orphans, and whatever descends from it belongs to the turn.
"""

import contextlib
import ctypes
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

PR_SET_CHILD_SUBREAPER = 36
ASKED_S, KILLED_S = 3.0, 2.0
MAX_TRIES = 10
SHARED_MEMORY = Path("/dev/shm")


class Family:
    """All that descends from this process, but for what did so before; ended at the exit."""

    def __enter__(self) -> Self:
        _inherit_orphans(True)
        self._others = set(psutil.Process().children(recursive=True))
        self._pids: set[int] = set()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._end()
        finally:
            _inherit_orphans(False)
            _remove_shared_memory(self._pids)

    def members(self) -> list[psutil.Process]:
        found = psutil.Process().children(recursive=True)
        members = [each for each in found if each not in self._others]
        self._pids |= {each.pid for each in members}
        return members

    def rss_bytes(self) -> int:
        """The sum; memory that several of them share is in it several times."""
        total = 0
        for each in self.members():
            with contextlib.suppress(psutil.Error):
                total += each.memory_info().rss
        return total

    def _end(self) -> None:
        """Ask all of them, then kill, again and again: they may make new ones meanwhile."""
        _send(self.members(), "terminate", ASKED_S)
        for _ in range(MAX_TRIES):
            if not (members := self.members()):
                return
            _send(members, "kill", KILLED_S)
        raise RuntimeError(f"these do not end: {self.members()}")


def _send(members: list[psutil.Process], what: str, wait_s: float) -> None:
    for each in members:
        with contextlib.suppress(psutil.Error):
            getattr(each, what)()
    # Also takes those that were inherited off the table of processes.
    psutil.wait_procs(members, timeout=wait_s)


def _remove_shared_memory(pids: set[int]) -> None:
    """Remove what torch would have removed if they had ended by themselves."""
    for path in SHARED_MEMORY.glob("torch_*"):
        if path.name.split("_")[1] in map(str, pids):
            path.unlink(missing_ok=True)


def _inherit_orphans(is_heir: bool) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, is_heir, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "cannot inherit orphans")
