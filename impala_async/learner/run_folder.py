"""The run folder: what a run leaves on disk, and the epoch that makes its versions unique.

Whatever others may read while it is written is written beside and renamed.

Runs on: event loop (small files), before it at the start
"""

import contextlib
import fcntl
import json
import os
import time
import uuid
from pathlib import Path
from typing import Any

from impala_async.config import RunConfig
from impala_async.config_load import validate_config
from impala_async.errors import CheckpointError, ConfigError

DEFAULT_ROOT = Path("runs")


def default_run_path(config: RunConfig) -> Path:
    """A folder named after environment and time."""
    name = config.env.id.replace("/", "_").replace(":", "_")
    return DEFAULT_ROOT / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


class RunFolder:
    """Paths and durable small files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics.jsonl"
        self._config = path / "config.json"
        self._epoch = path / "epoch"
        self._hold: int | None = None
        self._unwritten: RunConfig | None = None

    def begin(self, config: RunConfig) -> None:
        """Take the folder for this process, and write down the settings and the id of a new run.

        A resumed run keeps its former settings until `confirm`: it may not fit the new ones.
        """
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self._take_hold()
        except OSError as error:
            raise self._unwritable(error) from None
        self._unwritten = config
        if not self.exists():
            self._write_settings(config, uuid.uuid4().hex)

    def confirm(self) -> None:
        """The learner is built: a resumed run goes on, so its settings are now the new ones."""
        if self._unwritten is not None:
            self._write_settings(self._unwritten, self.run_id.hex())

    def _write_settings(self, config: RunConfig, run_id: str) -> None:
        content = {"run_id": run_id, "config": config.model_dump(mode="json", by_alias=True)}
        try:
            self.write_json("config.json", content)
        except OSError as error:
            raise self._unwritable(error) from None
        self._unwritten = None

    def _unwritable(self, error: OSError) -> ConfigError:
        return ConfigError(f"--run-dir: cannot write to {self.path}: {error.strerror}")

    def _take_hold(self) -> None:
        """One learner per folder, as long as this process lives; however it ends, it lets go."""
        hold = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(hold, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(hold)
            service = self.read_json("service.json") or {}
            raise ConfigError(
                f"--run-dir: {self.path} is in use by another learner (process "
                f"{service.get('pid', 'unknown')}): end it first, or name another folder"
            ) from None
        self._hold = hold

    def let_go(self) -> None:
        """The folder is free for another learner."""
        if self._hold is not None:
            os.close(self._hold)
            self._hold = None

    def withdraw(self) -> None:
        """The run never began: leave nothing that would stand in the way of the next try."""
        self.let_go()
        for name in ("config.json", "epoch"):
            self.remove(name)
        for folder in (self.checkpoints, self.path):
            with contextlib.suppress(OSError):  # somebody else has left something in it
                folder.rmdir()

    @staticmethod
    def open(path: Path | None) -> "RunFolder":
        """The folder of a run that exists already."""
        if path is None:
            raise ConfigError("--resume needs --run-dir, the folder of the run to continue")
        folder = RunFolder(path)
        if not folder.exists():
            raise CheckpointError(f"--run-dir: {path} holds no run (there is no config.json in it)")
        return folder

    def exists(self) -> bool:
        return self._config.exists()

    def load_settings(self) -> dict[str, Any]:
        """The settings of the run as nested keys, to be changed and validated again."""
        settings: dict[str, Any] = self._read_config()["config"]
        return settings

    def load_config(self) -> RunConfig:
        return validate_config(self.load_settings(), {})

    @property
    def run_id(self) -> bytes:
        return bytes.fromhex(self._read_config()["run_id"])

    def next_epoch(self) -> int:
        """Count this start, durably: no two starts of a run ever share an epoch."""
        try:
            last = int(self._epoch.read_text())
        except FileNotFoundError:
            last = 0
        except ValueError:
            raise CheckpointError(f"{self._epoch}: not a number; restore it by hand") from None
        self._write(self._epoch, str(last + 1))
        return last + 1

    def announce(self, data_url: str, weights_url: str, epoch: int) -> None:
        """Say where actors find the learner of this start, which is this process."""
        where = {"data_url": data_url, "weights_url": weights_url, "http_url": None}
        self.write_json("service.json", {**where, "pid": os.getpid(), "epoch": epoch})

    def write_json(self, name: str, content: dict[str, Any]) -> Path:
        """A small file that readers see whole or not at all."""
        path = self.path / name
        self._write(path, json.dumps(content, indent=2) + "\n")
        return path

    def read_json(self, name: str) -> dict[str, Any] | None:
        try:
            content: dict[str, Any] = json.loads((self.path / name).read_text())
        except FileNotFoundError:
            return None
        return content

    def remove(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)

    def _read_config(self) -> dict[str, Any]:
        try:
            content: dict[str, Any] = json.loads(self._config.read_text())
            return {"run_id": str(content["run_id"]), "config": dict(content["config"])}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{self._config}: cannot be read: {error}") from None

    def _write(self, path: Path, text: str) -> None:
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        with beside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.rename(path)
        folder = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
