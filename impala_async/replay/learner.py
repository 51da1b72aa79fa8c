"""The learner that a replay starts: its settings, its process, and whether it learned the same."""

import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from impala_async.config.load import merge_overrides, validate_config
from impala_async.config.run import RunConfig
from impala_async.errors import ConfigError, RecordingError
from impala_async.launch.local import LEARNER_END_S, end_in_time, exit_code, spawn
from impala_async.processes import Lifeline
from impala_async.replay.index import RecordingIndex
from impala_async.runs.folder import PRIVATE, RunFolder
from impala_async.weights import Version

POLL_S = 0.05
ANY_PORT = "tcp://127.0.0.1:*"
SETTINGS = "replay.json"
ENDLESS = dict.fromkeys(("env_steps", "updates", "mean_return", "wall_s"))


class StartedLearner:
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


def settings_for(index: RecordingIndex, overrides: Sequence[str], *, is_exact: bool) -> RunConfig:
    """The recorded settings, for a learner that knows no environment or goal."""
    goal: dict[str, Any] = dict(ENDLESS)
    if is_exact:
        # The steps come to what they were at that update, and the schedules ended with them.
        steps = index.start.settings.get("stop", {}).get("env_steps")
        goal |= {"updates": index.num_updates, "env_steps": steps}
    recorded: dict[str, Any] = {
        **index.start.settings,
        "env": {**index.start.settings.get("env", {}), "probe": "actor"},
        "bind": {"data": ANY_PORT, "weights": ANY_PORT},
        "stop": goal,
    }
    config = validate_config(*merge_overrides(recorded, overrides))
    as_recorded = validate_config(recorded)
    for section in ("env", "trajectory"):
        if getattr(config, section) != getattr(as_recorded, section):
            raise ConfigError(f"--set: {section}: a recording is what it is: drop it")
    if config.pace.is_lockstep:
        raise ConfigError(
            "pace.mode: a learner in lockstep waits for actors of its own: add "
            "--set pace.mode=async --set pace.lag=0 --set pace.on_loss=go_on"
        )
    return config


def write_settings(folder: RunFolder, config: RunConfig) -> Path:
    """The file that the learner reads them from, in its run folder."""
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        dumped = config.model_dump(mode="json", by_alias=True)
        return folder.write_json(SETTINGS, {"config": dumped}, mode=PRIVATE)
    except OSError as error:
        raise ConfigError(f"--run-dir: cannot write to {folder.path}: {error.strerror}") from None


def compare(folder: RunFolder, index: RecordingIndex, *, is_finished: bool) -> str:
    """One line: whether the weights are those of the recording, to the last bit.

    Raises:
        RecordingError: they are not, or the learner did not get as far as the recorded one.
    """
    from impala_async.training.checkpoint import read_digests

    end = index.end
    if end is not None and not is_finished:
        # A learner that is killed may have trained on what was not on the disk yet.
        summary = folder.read_json("summary.json")
        raise RecordingError(
            f"--exact: {index.path}: its messages make {summary and summary['updates']} updates, "
            f"and the learner that was recorded made {end.update}"
        )
    if end is None or not end.digests:
        return "the recording does not say what the weights were: nothing to compare"
    if read_digests(folder.checkpoints, Version(1, end.update)) != end.digests:
        raise RecordingError(
            f"--exact: after {end.update} updates the weights are not those of the recording. "
            "They are on a CPU of the same kind, with the same releases of impala-async, torch and "
            f"numpy; it was recorded with impala-async {index.start.package}"
        )
    return (
        f"the same weights and optimizer state as recorded, to the last bit ({end.update} updates)"
    )
