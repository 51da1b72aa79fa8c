"""What TensorBoard finds in the run folder. Skipped where tensorboardX is not installed."""

from pathlib import Path
from typing import Any

import pytest

from impala_async.metrics.names import ALIASES
from impala_async.metrics.sinks import Run

pytest.importorskip("tensorboardX")

REPORT: dict[str, Any] = {
    "env_steps_trained": 640,
    "mean_return": 21.5,
    "loss/total": None,
    "bottleneck": "actors: there is none",
    "lag/quantiles": [0.0, 1.0],
    "user/surprise": 0.25,
}


def events(folder: Path) -> list[tuple[int, str, float]]:
    """Step, name and value of each number in the event files of a folder."""
    from tensorboardX.event_file_writer import EventFileWriter  # noqa: F401  (it is installed)
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import RecordWriter  # noqa: F401

    found = []
    for file in sorted(folder.glob("events.*")):
        data = file.read_bytes()
        while data:
            # Its length, a checksum of that, the event, and a checksum of this.
            size = int.from_bytes(data[:8], "little")
            event = Event.FromString(data[12 : 12 + size])
            data = data[16 + size :]
            found += [(event.step, one.tag, one.simple_value) for one in event.summary.value]
    return found


def make(folder: Path, **settings: Any) -> Any:
    from impala_async.metrics.trackers import TensorBoardSink

    return TensorBoardSink(Run(folder, "ab", {}, settings.pop("env_steps", 0)), **settings)


def test_numbers_are_written_by_env_steps_under_our_names_and_known_ones(tmp_path: Path) -> None:
    sink = make(tmp_path)
    sink.write(REPORT)
    sink.close()
    written = {name: value for step, name, value in events(tmp_path / "tensorboard") if step == 640}
    assert written == {
        "env_steps_trained": 640.0,
        "global_step": 640.0,
        "time/total_timesteps": 640.0,
        "mean_return": 21.5,
        "rollout/ep_rew_mean": 21.5,
        "user/surprise": 0.25,
    }
    assert written.keys() - REPORT.keys() <= ALIASES.keys()


def test_a_resumed_run_writes_on_beside_what_was_there(tmp_path: Path) -> None:
    for env_steps in (0, 640):
        sink = make(tmp_path, env_steps=env_steps, filename_suffix=f".{env_steps}")
        sink.write(REPORT | {"env_steps_trained": env_steps + 10})
        sink.close()
    steps = [s for s, name, _ in events(tmp_path / "tensorboard") if name == "mean_return"]
    assert sorted(steps) == [10, 650]


def test_its_folder_is_a_setting(tmp_path: Path) -> None:
    sink = make(tmp_path, logdir=str(tmp_path / "elsewhere"))
    sink.close()
    assert not (tmp_path / "tensorboard").exists()
    with pytest.raises(TypeError):
        make(tmp_path, log_folder="x")
