"""The place where a learner listens: an address, or a run folder, which names one for as long as
its learner is there, and another one when that is started again elsewhere; and the key that is
wanted there.

Runs on: sampler thread
"""

import logging
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from impala_async.config.learner import KEY_FILE, like_url
from impala_async.errors import CheckpointError, ConfigError, UnreachableError
from impala_async.files import find_bytes, find_object
from impala_async.output import Wait
from impala_async.runs.folder import RunFolder
from impala_async.wire.actor_side import NO_RUN
from impala_async.wire.keys import Key, key_in_environment

logger = logging.getLogger(__name__)

POLL_S = 0.02
# A folder may be written to by others.
MOST_SERVICE_BYTES = 1 << 16
# Where something else is waited for, too.
LOOK_EVERY_S = 0.5
OTHER_RUN = (
    "another run is at the address in this run folder, whose own learner is gone: start that again"
)


class Address:
    def __init__(self, where: str) -> None:
        self._folder = None
        self.url = where
        """The address; nothing until a folder has named one."""
        self.key: Key | None = None
        """That of the folder, where it names the address, or else that of the environment."""
        if is_folder(where):
            # Code of the user's own, imported later, may change the current folder.
            self._folder, self.url = RunFolder(Path(os.path.abspath(where))), ""
        else:
            self.key = key_in_environment()
        self._silent = f"{where}: no learner has said there where it listens"
        self._look_at = 0.0
        self._said: dict[str, Any] | None = None
        """All that the folder said last of a learner."""

    @property
    def is_folder(self) -> bool:
        return self._folder is not None

    @property
    def run_id(self) -> bytes:
        """The run of the folder now. The folder of somebody else may be read but for that."""
        with suppress(CheckpointError):
            return self._folder.run_id if self._folder else NO_RUN
        return NO_RUN

    def find(self, give_up_at: float, check_stop: Callable[[], None]) -> None:
        """Read it anew, and wait until there is one; UnreachableError if there is none in time."""
        if not (self._look() or self.url):
            self._wait(give_up_at, check_stop, self._say_silent, self._look)

    def leave_other(self, give_up_at: float, check_stop: Callable[[], None]) -> None:
        """Another run is here: wait until the folder names another learner; or the same error."""
        said = self._said

        def has_changed() -> bool:
            return self._look() or self._said != said

        self._wait(give_up_at, check_stop, lambda: OTHER_RUN, has_changed)

    def has_moved(self) -> bool:
        """Whether the folder names another address or key than before, which hold from now on."""
        if (now := time.monotonic()) < self._look_at:
            return False
        self._look_at = now + LOOK_EVERY_S
        return self._look()

    def _wait(
        self,
        give_up_at: float,
        check_stop: Callable[[], None],
        why: Callable[[], str],
        is_over: Callable[[], bool],
    ) -> None:
        wait = Wait(logger.info)
        while not is_over():
            check_stop()
            wait.look(lambda s: f"{why()} ({s:.0f} s)")
            if time.monotonic() >= give_up_at:
                raise UnreachableError(why())
            time.sleep(POLL_S)

    def _look(self) -> bool:
        if self._folder is None:
            return False
        path, url, key = self._folder.path / "service.json", "", None
        try:
            if (service := find_object(path, most=MOST_SERVICE_BYTES)) is not None:
                self._said = service
                url = str(service.get("data_url"))
                check_address(url, f"{path}: data_url: wants tcp://HOST:PORT")
                if service.get("is_encrypted") and (key := self._read_key()) is None:
                    url = ""  # it may be of a learner that was killed
                    self._silent = f"{self._folder.path / KEY_FILE}: the key of the run is missing"
        except (CheckpointError, ConfigError):
            if not self.url:
                raise
            url = ""  # a disk may fail for a moment, and later it is looked for again
        if not url or (url, key) == (self.url, self.key):
            return False
        self.url, self.key = url, key
        return True

    def _say_silent(self) -> str:
        summary = (self._folder.peek_json("summary.json") if self._folder else None) or {}
        ended = f"; its run has ended ({summary.get('exit_reason')})" if summary else ""
        return self._silent + ended

    def _read_key(self) -> Key | None:
        """The key in the folder. Where it is another user's, who alone may read it, or is not there
        now, it is that of the environment."""
        assert self._folder is not None
        path, given = self._folder.absolute / KEY_FILE, key_in_environment()
        try:
            text = find_bytes(path)
        except CheckpointError:
            if given is None:
                raise
            text = None
        return given if text is None else Key(text.decode(errors="replace"), str(path))


def is_folder(where: str) -> bool:
    """Whether this is no address. A path may be that of a folder that a learner is yet to make."""
    is_like_url = re.search(r"^\w+:/|^[^/]+:\d+/*$", where) is not None
    return os.path.isdir(where) or ("/" in where and not is_like_url)


def check_address(url: str, wants: str, error: type[Exception] = ConfigError) -> None:
    """Raise an error, with what is wanted, for an address that nobody can dial."""
    like = like_url(url)
    # A learner may listen everywhere, and nobody can dial that.
    if like != url or "*" in url:
        hint = f"; did you mean {like}?" if like and "*" not in like else ""
        raise error(f"{wants}, got {url[:200]!r}{hint}")
