"""The replay door: what it starts and plays, with what settings, and what it says at the end."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from impala_async import processes
from impala_async.config.load import load_config
from impala_async.doors import BIND_VARIABLE
from impala_async.replay import __main__ as replay
from impala_async.replay import player as player_module
from impala_async.replay.__main__ import end_learner
from impala_async.replay.index import RecordingIndex
from impala_async.runs.folder import RunFolder
from impala_async.weights import Version
from impala_async.wire.recording import Record
from tests.replay.recordings import end, message, start, write

SUMMARY = {"updates": 7, "env_steps_trained": 1234, "env_steps_per_s": 99.5, "bottleneck": "it"}


class FakeLearner:
    """In place of the process: does what a learner would until it is to end."""

    made: list["FakeLearner"]
    code = 0

    def __init__(
        self, door: str, flags: Sequence[str], lifeline: Any, environment: Mapping[str, str]
    ) -> None:
        assert door == "learner"
        self.flags = dict(zip(flags[::2], flags[1::2], strict=True))
        self.ports: dict[str, str] = json.loads(environment[BIND_VARIABLE])
        self.grace_s: float | None = None
        FakeLearner.made.append(self)

    def poll(self) -> int | None:
        return None if self.grace_s is None else self.code

    def kill(self) -> None:
        raise AssertionError("it was not to be")

    wait = kill

    def end(self, grace_s: float) -> int:
        self.grace_s = grace_s
        RunFolder(Path(self.flags["--run-dir"])).write_json("summary.json", SUMMARY)
        return self.code


class FakePlayer:
    """Notes how it was to play."""

    made: list["FakePlayer"]
    is_finished = False

    def __init__(
        self,
        url: str,
        index: RecordingIndex,
        *,
        should_stop: Callable[[], bool],
        connect_s: float,
        **manner: bool,
    ) -> None:
        self.url, self.index, self.should_stop = url, index, should_stop
        self.manner = {name for name, is_so in manner.items() if is_so}
        FakePlayer.made.append(self)

    def run(self) -> None:
        assert not self.should_stop()

    def describe(self) -> str:
        return "played it"


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for fake in (FakeLearner, FakePlayer):
        monkeypatch.setattr(fake, "made", [], raising=False)
    monkeypatch.setattr(replay, "spawn", FakeLearner)
    monkeypatch.setattr(replay, "end_learner", FakeLearner.end)
    monkeypatch.setattr(player_module, "Player", FakePlayer)
    monkeypatch.setattr(replay.signal, "signal", lambda *_: None)


def recording(*records: Record) -> str:
    return str(write(Path("recording"), *(records or (start(), message(0), message(1), end(7)))))


def settings_of(learner: FakeLearner) -> Any:
    return load_config(Path(learner.flags["--config"]))


def test_it_starts_a_learner_with_the_recorded_settings_and_no_goal_and_says_how_it_went(
    capsys: pytest.CaptureFixture[str],
) -> None:
    recorded = start(
        stop={"mean_return": 3.0, "env_steps": 5},
        bind={"data": "tcp://0.0.0.0:7"},
        algorithm={"lr": 0.5},
    )
    assert replay.main([recording(recorded, message(0)), "--run-dir", "here"]) == 0
    (learner,), (player,) = FakeLearner.made, FakePlayer.made
    config = settings_of(learner)
    assert learner.flags["--run-dir"] == "here"
    assert config.algorithm.lr == 0.5
    assert config.env.id == recorded.settings["env"]["id"]
    # No environment is there to be asked.
    assert config.env.probe == "actor"
    assert set(config.stop.model_dump().values()) == {None}
    assert config.bind.data == config.bind.weights == "tcp://127.0.0.1:*"
    assert player.url == learner.ports["data"]
    assert player.manner == set()
    assert learner.grace_s == 0.0
    assert capsys.readouterr().out.splitlines() == [
        "played it",
        "learner: 7 updates of 1,234 env steps, 100 per second",
        "what limits it: it",
        "run folder: here",
    ]


def test_settings_of_a_benchmark_may_be_changed() -> None:
    flags = ["--set", "stop.wall_s=60", "--set", "learner.num_passes=2", "--loop"]
    assert replay.main([recording(), *flags]) == 0
    config = settings_of(FakeLearner.made[0])
    assert (config.stop.wall_s, config.learner.num_passes) == (60, 2)
    assert FakePlayer.made[0].manner == {"is_looped"}
    assert Path(FakeLearner.made[0].flags["--run-dir"]).parent == Path("runs")


@pytest.mark.parametrize("override", ["env.id=Acrobot-v1", "trajectory.rows=7", "model.core=gru"])
def test_what_was_recorded_cannot_be_changed(
    override: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert replay.main([recording(), "--set", override]) == 2
    assert re.search(
        r"--set: (env|trajectory|model\.core): a recording is what it is", capsys.readouterr().err
    )
    assert FakeLearner.made == []


def test_a_learner_that_fails_gives_its_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(FakeLearner, "code", 2)
    assert replay.main([recording()]) == 2
    assert capsys.readouterr().out == ""
    # The player is told when it dies.
    assert FakePlayer.made[0].should_stop()


def test_a_learner_that_is_killed_is_told_of_with_the_way_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sys.argv", ["/bin/impala-async", "replay"])
    monkeypatch.setattr(FakeLearner, "code", 137)
    monkeypatch.setattr(RunFolder, "exists", lambda self: bool(FakeLearner.made))
    assert replay.main([recording(), "--run-dir", "here"]) == 137
    (told,) = [text for text in caplog.messages if "the learner" in text]
    assert told.startswith("the learner was killed (SIGKILL)")
    assert told.endswith("to go on: impala-async learner --resume --run-dir here")


def test_a_start_that_is_interrupted_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its own file, nor what the learner has begun, nor the learner."""
    seen: list[str] = []

    def begin(self: FakeLearner, door: str, flags: Sequence[str], *_: Any, **__: Any) -> None:
        folder = RunFolder(Path(flags[3]))
        seen.extend(path.name for path in folder.path.iterdir())
        folder.begin(load_config(Path(flags[1])))
        folder.let_go()

    def interrupted(self: FakePlayer) -> None:
        for undo in reversed(processes._undoings):
            undo()

    monkeypatch.setattr(FakeLearner, "__init__", begin)
    monkeypatch.setattr(FakeLearner, "kill", lambda self: seen.append("killed"))
    monkeypatch.setattr(FakeLearner, "wait", lambda self: seen.append("awaited"))
    monkeypatch.setattr(replay, "end_learner", lambda learner, grace_s: 130)
    monkeypatch.setattr(FakePlayer, "__init__", lambda *args, **named: None)
    monkeypatch.setattr(FakePlayer, "run", interrupted)
    assert replay.main([recording(), "--run-dir", "here"]) == 130
    assert seen == ["replay.json", "killed", "awaited"]
    assert not Path("here").exists()


def test_whatever_happens_the_learner_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakePlayer, "run", lambda self: 1 / 0)
    assert replay.main([recording()]) == 70
    assert FakeLearner.made[0].grace_s == 0.0


# -------------------- exactly


@pytest.fixture
def finished(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What a learner that reached its goal left."""
    digests = {"model.safetensors": "abc"}
    monkeypatch.setattr(FakePlayer, "is_finished", True)

    def read(directory: Path, version: Version) -> dict[str, str]:
        assert (directory.name, version) == ("checkpoints", Version(1, 7))
        return digests

    monkeypatch.setattr("impala_async.training.checkpoint.read_digests", read)
    return digests


def test_an_exact_replay_stops_where_the_recording_did(
    finished: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = recording(start(), message(0), end(7, **{"model.safetensors": "abc"}))
    assert replay.main([path, "--exact"]) == 0
    config = settings_of(FakeLearner.made[0])
    assert {k: v for k, v in config.stop if v is not None} == {"updates": 7}
    assert FakeLearner.made[0].grace_s == replay.GRACE_S
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "the same weights and optimizer state as recorded, to the last bit (7 updates)"


@pytest.mark.parametrize("stop", [{"env_steps": 1000}, {"mean_return": 9.0}])
def test_an_exact_replay_is_not_warned_of_the_schedule_that_it_repeats(
    finished: dict[str, str], stop: dict[str, Any]
) -> None:
    schedule = {"lr_end": 0, "schedule_env_steps": 1000}
    records = start(algorithm=schedule, stop=stop), message(0), end(7)
    assert replay.main([recording(*records), "--exact"]) == 0
    config = settings_of(FakeLearner.made[0])
    assert config.stop.updates == 7
    assert config.warnings() == []
    # Nor at its end, where the rate came to 0.
    assert (config.idle_from is None) == ("env_steps" in stop)


@pytest.mark.parametrize(
    ("records", "code", "says"),
    [
        ([end(7, **{"model.safetensors": "abd"})], 2, "weights are not those of the recording"),
        ([end(7)], 0, "nothing to compare\n"),
        # It was killed.
        ([], 0, "nothing to compare\n"),
    ],
)
def test_weights_are_compared_where_the_recording_has_some(
    finished: dict[str, str],
    capsys: pytest.CaptureFixture[str],
    records: list[Record],
    code: int,
    says: str,
) -> None:
    path = recording(start(), message(0), message(1), *records)
    assert replay.main([path, "--exact"]) == code
    assert settings_of(FakeLearner.made[0]).stop.updates == (7 if records else None)
    told = capsys.readouterr()
    assert says in told.out + told.err


def test_a_recording_that_lacks_messages_of_its_run_is_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert replay.main([recording(), "--exact"]) == 2
    says = "its messages make 7 updates, and the learner that was recorded made 7"
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("records", "says"),
    [
        ([start(2, 5), message(0), end(7)], "begins at update 5: record a run from its start"),
        ([start(), message(0), end(0)], "ended before the first update"),
        ([start(pace={"mode": "lockstep"}), message(0), end(7)], "recorded in lockstep"),
    ],
)
def test_what_cannot_be_replayed_exactly(
    capsys: pytest.CaptureFixture[str], records: list[Record], says: str
) -> None:
    assert replay.main([recording(*records), "--exact"]) == 2
    assert says in capsys.readouterr().err
    assert FakeLearner.made == []


def test_a_lockstep_recording_is_played_into_another_learner(
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = recording(start(pace={"mode": "lockstep", "lag": 1}, learner={}, train={}), message(0))
    assert replay.main([path]) == 2
    flags = "--set pace.mode=async --set pace.lag=0 --set pace.on_loss=go_on"
    assert flags in capsys.readouterr().err
    assert replay.main([path, *flags.split()]) == 0


def test_a_run_is_not_overwritten(capsys: pytest.CaptureFixture[str]) -> None:
    Path("here").mkdir()
    Path("here/config.json").touch()
    assert replay.main([recording(), "--run-dir", "here"]) == 2
    assert "already holds a run: name another folder" in capsys.readouterr().err
    assert replay.main([recording(), "--run-dir", "/proc/nowhere"]) == 2
    assert "--run-dir: cannot write to /proc/nowhere" in capsys.readouterr().err


# -------------------- a learner that is a child, behind a fake door

LEARNER = """
import signal, sys, time
from pathlib import Path

told = []
signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
Path("ready").touch()
give_up_at = time.monotonic() + 20
while not told and not Path("end").exists() and time.monotonic() < give_up_at:
    time.sleep(0.005)
sys.exit(3 if told else 5)
"""


@pytest.fixture
def learner(tmp_path: Path) -> Any:
    made = subprocess.Popen([sys.executable, "-c", LEARNER], cwd=tmp_path)
    give_up_at = time.monotonic() + 20
    while not Path("ready").exists():
        assert time.monotonic() < give_up_at
        time.sleep(0.005)
    return made


def test_a_learner_ends_when_it_is_asked_to(learner: Any) -> None:
    assert end_learner(learner, 0.0) == 3


def test_one_that_ends_by_itself_is_let_to(learner: Any) -> None:
    Path("end").touch()
    assert end_learner(learner, 20.0) == 5


def test_one_that_died_has_the_code_of_a_shell(learner: Any) -> None:
    learner.kill()
    assert end_learner(learner, 20.0) == 137
