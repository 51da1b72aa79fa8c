"""What TensorBoard finds in the run folder, and a run of Weights & Biases that goes on with ours.

The package of the latter is played by a module with the part of its API that is used; where the
real one is installed, it takes the same calls, offline.
"""

import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from impala_async.metrics.names import ALIASES
from impala_async.metrics.sinks import Run
from impala_async.metrics.trackers import TensorBoardSink, WandbSink

REPORT: dict[str, Any] = {
    "env_steps_trained": 640,
    "mean_return": 21.5,
    "loss/total": None,
    "bottleneck": "actors: there is none",
    "lag/quantiles": [0.0, 1.0],
    "user/surprise": 0.25,
}
NUMBERS = {"env_steps_trained": 640, "global_step": 640, "time/total_timesteps": 640}
NUMBERS |= {"mean_return": 21.5, "rollout/ep_rew_mean": 21.5, "user/surprise": 0.25}


def test_these_are_the_numbers_and_their_other_names():
    assert NUMBERS.keys() - REPORT.keys() <= ALIASES.keys()


# -------------------- TensorBoard


def events(folder):
    """Step, name and value of each number in the event files of a folder."""
    from tensorboardX.proto.event_pb2 import Event

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


def test_numbers_are_written_by_env_steps_beside_those_of_earlier_starts(tmp_path):
    pytest.importorskip("tensorboardX")
    for env_steps in (0, 640):
        run = Run(tmp_path, "ab", {}, env_steps)
        sink = TensorBoardSink(run, filename_suffix=f".{env_steps}")
        sink.write(REPORT | {"env_steps_trained": 640 + env_steps})
        sink.close()
    written = events(tmp_path / "tensorboard")
    assert {name: value for step, name, value in written if step == 640} == NUMBERS
    assert sorted(step for step, name, _ in written if name == "mean_return") == [640, 1280]


def test_its_folder_is_a_setting(tmp_path):
    pytest.importorskip("tensorboardX")
    run = Run(tmp_path, "ab", {}, 0)
    TensorBoardSink(run, logdir=str(tmp_path / "elsewhere")).close()
    assert not (tmp_path / "tensorboard").exists()
    with pytest.raises(TypeError):
        TensorBoardSink(run, log_folder="x")


# -------------------- Weights & Biases


class PlayedRun:
    """The calls of one run, in their order."""

    def __init__(self):
        self.calls: list[Any] = []

    def define_metric(self, name, step_metric=None):
        self.calls.append(("define_metric", name, step_metric))

    def log(self, data):
        self.calls.append(("log", data))

    def finish(self):
        self.calls.append("finish")


class Played(ModuleType):
    """The module `wandb`, as far as the sink needs it."""

    def __init__(self):
        super().__init__("wandb")
        self.run = PlayedRun()
        self.settings: dict[str, Any] = {}

    def init(self, *, project, name, id, resume, dir, config, settings, mode=None, tags=None):
        assert not self.settings, "one run"
        self.settings = {"project": project, "name": name, "id": id, "resume": resume}
        self.settings |= {"dir": dir, "config": config, "settings": settings, "tags": tags}
        return self.run


RUN = Run(Path("runs/first"), "ab" * 16, {"seed": 3}, 0)


def test_a_run_begins_with_the_first_report_and_is_finished(monkeypatch):
    played = Played()
    monkeypatch.setitem(sys.modules, "wandb", played)
    with pytest.raises(TypeError, match="projct"):
        WandbSink(RUN, projct="mine")
    sink = WandbSink(RUN, tags=["small"], project="mine")
    sink.close()
    assert not played.settings
    for _ in range(2):
        sink.write(REPORT)
    sink.close()
    assert played.settings == {
        "project": "mine",
        "name": "first",
        "id": "ab" * 16,
        "resume": "allow",
        "dir": "runs/first",
        "config": {"seed": 3},
        "settings": {"console": "off"},
        "tags": ["small"],
    }
    first, *others = played.run.calls
    assert first == ("define_metric", "*", "env_steps_trained")
    assert others == [("log", NUMBERS), ("log", NUMBERS), "finish"]


def test_the_real_one_takes_the_same_calls():
    wandb = pytest.importorskip("wandb")
    for real, ours in (
        (wandb.init, Played.init),
        (wandb.Run.define_metric, PlayedRun.define_metric),
        (wandb.Run.log, PlayedRun.log),
        (wandb.Run.finish, PlayedRun.finish),
    ):
        wanted = inspect.signature(ours).parameters.keys() - {"self"}
        assert wanted <= inspect.signature(real).parameters.keys()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_real_one_keeps_a_run_offline(tmp_path):
    pytest.importorskip("wandb")
    sink = WandbSink(RUN._replace(folder=tmp_path), mode="offline")
    sink.write(REPORT)
    sink.close()
    assert list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
