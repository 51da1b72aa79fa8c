"""Weights & Biases gets a run that goes on when ours does.

Its package is played by a module with the part of its API that is used; where the real one is
installed, it takes the same calls, offline.
"""

import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from impala_async.metrics.sinks import Run
from impala_async.metrics.trackers import WandbSink

REPORT: dict[str, Any] = {"env_steps_trained": 640, "mean_return": 21.5, "bottleneck": "learner"}


class PlayedRun:
    """The calls of one run, in their order."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.calls.append(("define_metric", name, step_metric))

    def log(self, data: dict[str, Any]) -> None:
        self.calls.append(("log", data))

    def finish(self) -> None:
        self.calls.append("finish")


class Played(ModuleType):
    """The module `wandb`, as far as the sink needs it."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.run = PlayedRun()
        self.settings: dict[str, Any] = {}

    def init(
        self,
        *,
        project: str | None = None,
        name: str | None = None,
        id: str | None = None,
        resume: str | None = None,
        dir: str | None = None,
        config: dict[str, Any] | None = None,
        settings: dict[str, Any] | None = None,
        mode: str | None = None,
        tags: list[str] | None = None,
    ) -> PlayedRun:
        assert not self.settings, "one run"
        self.settings = {"project": project, "name": name, "id": id, "resume": resume}
        self.settings |= {"dir": dir, "config": config, "settings": settings, "tags": tags}
        return self.run


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    played = Played()
    monkeypatch.setitem(sys.modules, "wandb", played)
    return played


def make(folder: Path, **settings: Any) -> Any:
    run = Run(folder, "ab" * 16, {"seed": 3}, 0)
    return WandbSink(run, **settings)


def test_a_run_begins_with_the_first_report_and_is_finished(played: Played) -> None:
    sink = make(Path("runs/first"), tags=["small"])
    assert not played.settings
    for _ in range(2):
        sink.write(REPORT)
    sink.close()
    assert played.settings == {
        "project": "impala-async",
        "name": "first",
        "id": "ab" * 16,
        "resume": "allow",
        "dir": "runs/first",
        "config": {"seed": 3},
        "settings": {"console": "off"},
        "tags": ["small"],
    }
    numbers = {"env_steps_trained": 640, "global_step": 640, "time/total_timesteps": 640}
    numbers |= {"mean_return": 21.5, "rollout/ep_rew_mean": 21.5}
    first, *others = played.run.calls
    assert first == ("define_metric", "*", "env_steps_trained")
    assert others == [("log", numbers), ("log", numbers), "finish"]


def test_settings_win_and_one_that_does_not_exist_is_told_at_once(played: Played) -> None:
    sink = make(Path("run"), project="mine")
    sink.close()
    assert played.run.calls == []
    sink.write(REPORT)
    assert played.settings["project"] == "mine"
    with pytest.raises(TypeError, match="projct"):
        make(Path("run"), projct="mine")


def test_the_real_one_takes_the_same_calls() -> None:
    wandb = pytest.importorskip("wandb")
    for real, ours in (
        (wandb.init, Played.init),
        (wandb.Run.define_metric, PlayedRun.define_metric),
        (wandb.Run.log, PlayedRun.log),
        (wandb.Run.finish, PlayedRun.finish),
    ):
        assert inspect.signature(ours).parameters.keys() - {"self"} <= (
            inspect.signature(real).parameters.keys()
        )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_real_one_keeps_a_run_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    sink = make(tmp_path, mode="offline")
    sink.write(REPORT)
    sink.close()
    assert list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
