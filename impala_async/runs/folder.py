"""The run folder: what a run leaves on disk, and the epoch that makes its versions unique.

Runs on: event loop (small files), before it at the start
"""

import contextlib
import errno
import fcntl
import itertools
import json
import logging
import os
import re
import shlex
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from impala_async.config.learner import KEY_FILE, KEY_VARIABLE
from impala_async.config.load import merge_overrides, sets, validate_config, without_decided
from impala_async.config.ranks import FOLDER as RANKS
from impala_async.config.run import ADDRESSES, DECIDED, RunConfig
from impala_async.errors import CheckpointError, ConfigError, ImpalaAsyncError
from impala_async.files import (
    PRIVATE,
    PUBLIC,
    beside,
    find_bytes,
    find_object,
    left_beside,
    write_whole,
    writing,
)

logger = logging.getLogger(__name__)

# These may lie in the folder of a new run: `train`, `replay` and `launch` put some there for their
# learner, a start that was killed may have left another, and a file system of its own has the last.
PREPARED = ("actors", "replay.json", "slurm", "checkpoints", "lost+found", RANKS)
SPACES = "spaces.json"
# A learner that was killed may have left one of these half written, under the name of `beside`.
WHOLE = ("config.json", "epoch", "last_checkpoint", "service.json", "summary.json", KEY_FILE)
UNSAVED = "checkpoint_not_written"
"""The reason of an end whose summary is ahead of the checkpoints."""
# Eight digits, as `last_epoch` reads them.
MOST_STARTS = 10**8 - 1
# Threads of one program may begin several in a second.
_numbers = itertools.count()


def default_run_path(config: RunConfig) -> Path:
    name = config.env.id.replace("/", "_").replace(":", "_")
    again = f"-{number}" if (number := next(_numbers)) else ""
    return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}{again}"


class RunFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        # Code of the user's own, imported later, may change the current folder.
        self.absolute = path = path.absolute()
        self.checkpoints = path / "checkpoints"
        self.best = path / "best"
        self.metrics = path / "metrics.jsonl"
        self.updates = path / "updates.jsonl"
        self.checkpoint_bytes = 0
        """How much a checkpoint takes; 0 while that is unknown."""
        self._config = path / "config.json"
        self._epoch = path / "epoch"
        self._saved = path / "last_checkpoint"
        self.in_use_error: type[ImpalaAsyncError] = ConfigError
        """The error where another learner has it."""
        self._hold: int | None = None
        self._is_new = self._has_begun = self._is_gone = False

    def check_new(self, advice: str = "continue it with --resume, or name another folder") -> None:
        """Raise ConfigError where no new run may begin."""
        if self.exists():
            self.hold()  # where another learner has it, that is the reason
            self.let_go()
            raise ConfigError(f"--run-dir: {self.path} already holds a run: {advice}")
        with writing(self.path):  # where it may not be looked into
            found = [*self.path.glob("[!.]*"), *self.checkpoints.glob("[!.]*")]
        if others := sorted(path.name for path in found if path.name not in PREPARED):
            raise ConfigError(
                f"--run-dir: {self.path} holds other files ({others[0]}) and no run: name a new or "
                "an empty folder"
            )

    def check_free(self) -> None:
        """Raise ConfigError where another learner has the folder; it is made if there is none."""
        self.hold()
        service = self.absolute / "service.json"
        try:
            with writing(self.path):
                service.unlink(missing_ok=True)  # of a learner that was killed
        finally:
            self.let_go()

    def hold(self) -> None:
        """Take the folder for this process, until it lets go, however it ends."""
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self._hold = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            # A process that foreign code forks may outlive this one.
            os.register_at_fork(after_in_child=self.let_go)
            try:
                fcntl.flock(self._hold, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                whose = _holder(self._hold)
                self.let_go()
                raise self.in_use_error(
                    f"--run-dir: {self.path} is in use by a run of another learner{whose}: let it "
                    "end first, or name another folder"
                ) from None
        self._is_new, self._has_begun = not self.exists(), False

    def is_taken(self) -> bool:
        """Whether another learner has the folder."""
        try:
            self.hold()
        except self.in_use_error:
            return True
        self.let_go()
        return False

    def begin(self, config: RunConfig) -> None:
        """Take the folder, and write down the settings and the id of a new run.

        A resumed run keeps its former settings until `confirm`: it may not fit the new ones.
        """
        self.hold()
        with writing(self.checkpoints):
            self.checkpoints.mkdir(exist_ok=True)
            # Whether checkpoints can be written is known now. `prune` would clear this one away.
            TemporaryDirectory(prefix=".partial-", dir=self.checkpoints).cleanup()
            for name in WHOLE:
                for left in left_beside(self.path / name):
                    left.unlink(missing_ok=True)
        if self._is_new:
            self.write_settings(config, run_id=uuid.uuid4().hex)
        self._has_begun = True

    def confirm(self, config: RunConfig) -> None:
        """The learner is built: a resumed run goes on, so its settings are now the new ones, and
        its end is to come."""
        if not self._is_new:
            # A resumed run was given its addresses, which are as they were decided.
            before = self._read_config().get("decided", {})
            addresses = {key: before[key] for key in ADDRESSES if key in before}
            decided = {**addresses, **config.decided}
            self.write_settings(config, run_id=self.run_id.hex(), decided=decided)
            self.remove("summary.json")

    def write_settings(self, config: RunConfig, name: str = "config.json", **more: Any) -> Path:
        settings = config.model_dump(mode="json", by_alias=True)
        content = {"decided": config.decided, **more, "config": settings}
        with writing(self.path):
            return self.write_json(name, content, mode=PRIVATE)

    def let_go(self) -> None:
        if self._hold is not None:
            os.close(self._hold)
            self._hold = None

    def is_gone(self) -> bool:
        """Whether the run that began here has lost its folder; it does not come back."""
        if self._hold is None or self._is_gone:
            return self._is_gone
        try:
            if self._has_begun:
                self._config.stat()
            self._is_gone = not os.path.samestat(os.fstat(self._hold), self.absolute.stat())
        except (FileNotFoundError, NotADirectoryError):
            self._is_gone = True
        except OSError:  # a disk that fails, or may not be read, is there
            return False
        if self._is_gone:
            told = "run folder %s: it is gone, or another one lies there: nothing can be saved now"
            if self.absolute.is_dir() and not os.path.lexists(self._config):
                told = "run folder %s: its config.json is gone: nothing can be saved now"
            logger.error(told, self.path)
        return self._is_gone

    def has_checkpoint(self) -> bool:
        """Whether there is one, damaged or whole."""
        return any(self.checkpoints.glob("ckpt-*"))

    def withdraw(self, *, with_logs: bool = False) -> None:
        """The run never began: leave nothing that would stand in the way of the next try. A run of
        an earlier start stays, one with a result, and, but `with_logs`, logs that say something."""
        is_summed_up = (self.absolute / "summary.json").exists()
        has_result = is_summed_up or self.has_checkpoint()
        if self._is_new and not has_result and not self.is_gone():
            names = ["config.json", "epoch", "metrics.jsonl", "updates.jsonl", "service.json"]
            for name in (*names, SPACES, KEY_FILE):
                self.remove(name)
                self.remove(beside(self.absolute / name).name)
            for log in self.absolute.glob("actors/*.log"):
                if with_logs or log.stat().st_size == 0:
                    self.remove(f"actors/{log.name}")
            for folder in (self.checkpoints, self.absolute / "actors", self.absolute):
                with contextlib.suppress(OSError):  # something is left in it
                    folder.rmdir()
        self._is_new = False  # once: somebody else may take the place
        self.let_go()

    def exists(self) -> bool:
        return os.path.exists(self._config)  # unlike Path.exists, where it may not be looked for

    def load_settings(self) -> dict[str, Any]:
        """The settings as nested keys, to be changed and validated again."""
        return dict(self._read_config()["config"])

    def load_config(self) -> RunConfig:
        return validate_config(self.load_settings(), {"": str(self._config)})

    def change(self, overrides: Sequence[str]) -> RunConfig:
        """The settings for a resume with overrides. Those that were decided stay; they are decided
        anew where they do not go with the overrides, and in lockstep, where the number of actors
        decides them."""
        decided = self._read_config().get("decided", {})
        given = without_decided(self.load_settings(), decided)
        with contextlib.suppress(ConfigError):
            config = validate_config(*merge_overrides(self.load_settings(), overrides))
            unset = [key for key in DECIDED if key in decided and not _has(given, key)]
            config.take_for_decided(key for key in unset if not sets(overrides, key))
            if not config.pace.is_lockstep:
                return config
        return validate_config(*merge_overrides(given, overrides))

    @property
    def run_id(self) -> bytes:
        return bytes.fromhex(self._read_config()["run_id"])

    def join_run(self, run_id: bytes, last_epoch: int) -> None:
        """This is the folder of one rank of a run: it has the id of that, and its starts."""
        content = self._read_config()
        if content["run_id"] != run_id.hex():
            with writing(self.path):
                self.write_json("config.json", {**content, "run_id": run_id.hex()}, mode=PRIVATE)
        if last_epoch > self.last_epoch:
            self._write_epoch(last_epoch)

    def next_epoch(self, saved: int = 0) -> int:
        """Count this start, durably: no two share an epoch. `saved` is that of its checkpoints."""
        last = self.last_epoch
        if last < saved:
            logger.warning("%s: %d, but there are checkpoints of %d", self._epoch, last, saved)
        epoch = max(last, saved) + 1
        self._write_epoch(epoch)
        return epoch

    def _write_epoch(self, epoch: int) -> None:
        if epoch > MOST_STARTS:
            raise CheckpointError(
                f"{self.path}: no run has more than {MOST_STARTS:,} starts: write their number "
                "into epoch, and move checkpoints of a greater one away"
            )
        with writing(self.path):
            write_whole(self._epoch, str(epoch).encode())

    @property
    def last_epoch(self) -> int:
        """How often the run was started; CheckpointError where that cannot be read."""
        written = find_bytes(self._epoch)
        if written is None:
            return 0
        if re.fullmatch(rb"\s*\d{1,8}\s*", written):
            return int(written)
        raise CheckpointError(
            f"{self._epoch}: wants a whole number of at most 8 digits, got "
            f"{written[:64].decode(errors='replace')!r}: write the number of starts so far there, "
            "or a greater one"
        )

    def note_saved(self, name: str) -> None:
        """There is a checkpoint: a start that finds none is to know."""
        with contextlib.suppress(OSError):  # after the next one it is tried again
            write_whole(self._saved, name.encode())

    def last_saved(self) -> str | None:
        saved = find_bytes(self._saved, most=64)
        return None if saved is None else saved.decode(errors="replace")

    def check_resumable(self) -> None:
        """Raise ConfigError or CheckpointError for what no learner could go on with."""
        if find_bytes(self._config) is None:
            why = f"{self.path} holds no run (there is no config.json in it)"
            raise CheckpointError(f"--run-dir: {why}")
        _ = self.last_epoch
        had_some = self.last_saved() is not None or not self.checkpoints.is_dir()
        if had_some and not self.has_checkpoint():
            raise CheckpointError(
                f"{self.checkpoints}: the checkpoints of this run are gone, or cannot be read: put "
                "them back, or start a new run in another folder, without --resume"
            )

    def keep_spaces(self, spaces: dict[str, Any]) -> None:
        """The spaces of the environment, for those who use the policy without it."""
        with writing(self.path):
            self.write_json(SPACES, spaces)

    def keep_key(self, text: str) -> bool:
        """Whether it is new, and others have had none or another one."""
        path, kept = self.absolute / KEY_FILE, f"{text}\n".encode()
        # A file that has it stays as it is: its owner may have let a group read it.
        if find_bytes(path) == kept:
            return False
        with writing(self.path):
            write_whole(path, kept, PRIVATE)
        return True

    def announce(
        self, data_url: str, weights_url: str, epoch: int, *, is_encrypted: bool = False
    ) -> str:
        """Say where actors find the learner of this start, which is this process. Return the
        command that starts one."""
        where = {"data_url": data_url, "weights_url": weights_url, "is_encrypted": is_encrypted}
        more = {"http_url": None, "pid": os.getpid(), "epoch": epoch}
        with writing(self.path):
            self.write_json("service.json", {**where, **more})
        key = f"{KEY_VARIABLE}=$(cat {shlex.quote(str(self.path / KEY_FILE))}) "
        return f"{key * is_encrypted}impala-async actor --learner {data_url}"

    def write_json(self, name: str, content: dict[str, Any], *, mode: int = PUBLIC) -> Path:
        """A small file that readers see whole or not at all."""
        path = self.absolute / name
        if self.is_gone():
            raise FileNotFoundError(errno.ENOENT, "its folder is gone", str(path))
        write_whole(path, f"{json.dumps(content, indent=2)}\n".encode(), mode)
        return path

    def read_json(self, name: str) -> dict[str, Any] | None:
        return find_object(self.absolute / name)

    def peek_json(self, name: str) -> dict[str, Any] | None:
        """The same when a run is over, which has its exit code: None if it cannot be read."""
        with contextlib.suppress(CheckpointError):
            return self.read_json(name)
        return None

    def remove(self, name: str) -> None:
        if self._is_gone:
            return
        try:
            (self.absolute / name).unlink(missing_ok=True)
        except OSError as error:
            logger.warning("%s cannot be removed: %s", self.path / name, error.strerror)

    def _read_config(self) -> dict[str, Any]:
        content = find_object(self._config) or {}
        is_id = re.fullmatch("[0-9a-f]{32}", str(content.get("run_id")))
        if not isinstance(content.get("config"), dict) or not is_id:
            raise CheckpointError(f"{self._config}: cannot be read: it has no run_id and config")
        return content


def _has(settings: dict[str, Any], key: str) -> bool:
    section, _, name = key.partition(".")
    return name in settings.get(section, {})


def find_run(path: Path) -> tuple[RunFolder, Path, Path | None]:
    """The run that a user has named, where the newest of its checkpoints is looked for, and the one
    instead that is named."""
    if not os.path.exists(path):  # unlike Path.exists, where it may not be looked for
        raise CheckpointError(f"{path}: there is no such folder, or it may not be entered")
    # A link may lead to a run, and one within a run to another disk.
    for whole in (path.resolve(), Path(os.path.abspath(path))):
        for folder in map(RunFolder, (whole, whole.parent, whole.parent.parent)):
            kept = (folder.checkpoints, folder.best)
            if folder.exists() and whole in (folder.path, *kept):
                return folder, kept[whole == folder.best], None
            if folder.exists() and whole.parent in kept:
                return folder, whole.parent, whole
    runs = dict[str, float]()
    for each in path.glob("*/config.json"):
        with contextlib.suppress(CheckpointError, OSError):  # it may be somebody else's
            RunFolder(each.parent).load_settings()
            runs[str(each.parent)] = each.stat().st_mtime
    newest = " or ".join(sorted(runs, key=lambda run: runs[run], reverse=True)[:3])
    told = f"; did you mean {newest}?" if runs else ""
    raise CheckpointError(
        f"{path}: wants the folder of a run, its checkpoints or its best, or one of them "
        f"(RUN/checkpoints/ckpt-EPOCH-UPDATE){told}"
    )


def _holder(fd: int) -> str:
    """The process that holds the lock of a folder, as a clause, where the system tells it."""
    inode = str(os.fstat(fd).st_ino)
    with contextlib.suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            _, kind, _, _, pid, place, *_ = line.split()
            if kind == "FLOCK" and place.rpartition(":")[2] == inode:
                return f" (process {pid})"
    return ""
