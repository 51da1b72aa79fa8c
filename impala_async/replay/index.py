"""A recording, as it is replayed: its messages, the settings for its learner, what that comes to.
Nothing of it is held in memory but where each message begins."""

import logging
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path

from impala_async.config.load import merge_overrides, validate_config
from impala_async.config.run import RunConfig
from impala_async.errors import ConfigError, RecordingError
from impala_async.runs.folder import RunFolder
from impala_async.weights import Version
from impala_async.wire.messages import body_sizes
from impala_async.wire.recording import End, Reader, Recorded, Start

logger = logging.getLogger(__name__)

ANY_PORT = "tcp://127.0.0.1:*"


class RecordingIndex:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.end: End | None = None
        """The record of the end; None if the learner did not end in good order."""
        self.most_columns = 0
        self._offsets: list[int] = []
        self._reader = Reader(path)
        records = self._reader.records()
        _, first, whole = next(records, (0, None, 0))
        if not isinstance(first, Start):
            begins = "does not begin with what is said of its run"
            raise RecordingError(f"{path}: {begins if first else 'holds no message'}")
        for name in ("env", "pace", "algorithm", "stop"):
            if not isinstance(first.settings.get(name, {}), dict):
                raise RecordingError(f"{path}: its settings are odd: {name} is no table")
        self.start, self.schema = first, first.schema
        for begin, record, end in records:
            whole = end
            if isinstance(record, End):
                self.end = record
                continue
            if isinstance(record, Start) or not self._is_of_run(record):
                raise RecordingError(f"{path}: the record at byte {begin} is not of its run")
            self._offsets.append(begin)
            self.most_columns = max(self.most_columns, record.data.columns)
        if not self._offsets:
            raise RecordingError(f"{path}: holds no message")
        if whole < self._reader.num_bytes:
            logger.warning("%s: its last record is cut off, and left out", path)

    def __len__(self) -> int:
        return len(self._offsets)

    def message(self, number: int) -> Recorded:
        record, _ = self._reader.read(self._offsets[number], is_checked=False) or (None, 0)
        assert isinstance(record, Recorded)
        return record

    def _is_of_run(self, record: Recorded) -> bool:
        data, layout = record.data, self.schema.layout
        num_bytes = sum(body_sizes(layout, data.columns, data.num_episodes))
        return data.rows == self.schema.rows and len(record.body) == num_bytes


def settings_for(index: RecordingIndex, overrides: Sequence[str], *, is_exact: bool) -> RunConfig:
    """The recorded settings, for a learner that knows no environment or goal."""
    settings = index.start.settings
    recorded = {
        **settings,
        "env": {**settings.get("env", {}), "probe": "actor"},
        "bind": {"data": ANY_PORT, "weights": ANY_PORT},
        "evaluate": {},
        # Others saw it when it was recorded, and packages for that may not be installed here.
        "report": {**settings.get("report", {}), "sinks": []},
        # Schedules end with it.
        "stop": {"env_steps": settings.get("stop", {}).get("env_steps")},
    }
    as_recorded = validate_config(recorded)
    # Rates fall as they did, though the run has no end now, or another one.
    horizon = {"schedule_env_steps": as_recorded.schedule_env_steps}
    recorded["algorithm"] = settings.get("algorithm", {}) | horizon
    recorded["stop"] = {"updates": index.end.update} if is_exact and index.end else {}
    config = validate_config(*merge_overrides(recorded, overrides))
    for key in ("env", "trajectory", "policies.names", "model.core", "model.core_size"):
        if attrgetter(key)(config) != attrgetter(key)(as_recorded):
            raise ConfigError(f"--set: {key}: a recording is what it is: drop it")
    if config.pace.is_lockstep:
        raise ConfigError(
            "pace.mode: a learner in lockstep waits for actors of its own: add "
            "--set pace.mode=async --set pace.lag=0 --set pace.on_loss=go_on"
        )
    return config


def check_exact(index: RecordingIndex) -> None:
    """RecordingError for a run that cannot be made again: only one that began with a seed can."""
    start = index.start
    if start.settings.get("pace", {}).get("mode") == "lockstep":
        fix = "train again with its settings"
        raise RecordingError(f"--exact: {index.path} was recorded in lockstep: {fix}")
    if start.settings.get("learner", {}).get("num_passes") == "auto":
        why = "with learner.num_passes auto, which goes by the time"
        raise RecordingError(
            f"--exact: {index.path} was recorded {why}: set a number, and train again"
        )
    if start.update != 0:
        begins = f"begins at update {start.update}: record a run from its start"
        raise RecordingError(f"--exact: {index.path} {begins}")
    if index.end is not None and index.end.update == 0:
        raise RecordingError(f"--exact: {index.path} ended before the first update")


def compare(folder: RunFolder, index: RecordingIndex, *, is_finished: bool) -> str:
    """One line: whether the weights of a run are those of the recording, to the last bit.

    RecordingError if they are not, or if its learner did not get as far as the recorded one.
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
    same = "the same weights and optimizer state as recorded, to the last bit"
    return f"{same} ({end.update} updates)"
