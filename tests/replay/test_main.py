"""The replay door: what it starts and plays, with what settings, and what it says at the end."""

import signal
from contextlib import contextmanager
from pathlib import Path

import pytest

from impala_async import processes
from impala_async.config.load import load_config
from impala_async.replay import __main__ as replay
from impala_async.replay import player as player_module
from impala_async.runs.folder import RunFolder
from impala_async.weights import Version
from tests.replay.recordings import end, message, start, write

SUMMARY = {"updates": 7, "env_steps_trained": 1234, "env_steps_per_s": 99.5, "bottleneck": "it"}
DIGESTS = {"model.safetensors": "abc"}
LOCKSTEP = {"pace": {"mode": "lockstep", "lag": 1}, "learner": {}, "train": {}}


class FakeLearner:
    """Stands for the process: it does what a learner would until it is to end."""

    code = 0

    def __init__(self, door, flags, lifeline):
        assert door == "learner"
        self.flags = dict(zip(flags[::2], flags[1::2], strict=True))
        folder = RunFolder(Path(self.flags["--run-dir"]))
        folder.write_json("service.json", {"data_url": "tcp://127.0.0.1:7"})
        self.grace_s = None
        FakeLearner.made.append(self)

    def poll(self):
        return None if self.grace_s is None else self.code

    def kill(self):
        raise AssertionError("it was not to be")

    wait = kill

    @staticmethod
    def end(processes, grace_s, asked_s):
        (self,) = processes
        assert asked_s == replay.LEARNER_END_S
        self.grace_s, self.returncode = grace_s, self.code
        RunFolder(Path(self.flags["--run-dir"])).write_json("summary.json", SUMMARY)


class FakePlayer:
    """Notes how it was to play."""

    is_finished = False

    def __init__(self, learner, index, *, should_stop, connect_s, **manner):
        self.learner, self.index, self.should_stop = learner, index, should_stop
        self.manner = {name for name, is_so in manner.items() if is_so}
        FakePlayer.made.append(self)

    def run(self):
        assert not self.should_stop()

    def describe(self):
        return "played it"


@pytest.fixture(autouse=True)
def fakes(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for fake in (FakeLearner, FakePlayer):
        monkeypatch.setattr(fake, "made", [], raising=False)
    monkeypatch.setattr(replay, "spawn", FakeLearner)
    monkeypatch.setattr(replay, "end_in_time", FakeLearner.end)
    monkeypatch.setattr(player_module, "Player", FakePlayer)
    monkeypatch.setattr(signal, "signal", lambda *_: None)


def recording(*records):
    return str(write(Path("recording"), *(records or (start(), message(0), message(1), end(7)))))


def settings_of(learner):
    return load_config(Path(learner.flags["--config"]))


def test_it_starts_a_learner_with_the_recorded_settings_and_no_goal_and_says_how_it_went(capsys):
    recorded = start(
        stop={"mean_return": 3.0, "env_steps": 5},
        bind={"data": "tcp://0.0.0.0:7"},
        algorithm={"lr": 0.5},
        report={"sinks": ["wandb"]},
    )
    assert replay.main([recording(recorded, message(0)), "--run-dir", "here"]) == 0
    (learner,), (player,) = FakeLearner.made, FakePlayer.made
    config = settings_of(learner)
    assert learner.flags["--run-dir"] == "here"
    assert config.algorithm.lr == 0.5
    assert config.env.id == recorded.settings["env"]["id"]
    assert config.env.probe == "actor"
    assert config.report.sinks == ()
    assert set(config.stop.model_dump().values()) == {None}
    assert config.bind.data == config.bind.weights == "tcp://127.0.0.1:*"
    assert player.learner == "here"
    assert player.manner == set()
    assert learner.grace_s == 0.0
    # The learner has said by then how it went.
    assert capsys.readouterr().out.splitlines() == ["played it"]


def test_what_cannot_be_replayed_so_is_told_before_anything_starts(capsys):
    Path("held").mkdir()
    Path("held/config.json").touch()
    for first, last, flags, says in (
        (start(), end(7), ["--set", "env.id=X"], "--set: env: a recording is what it is"),
        (start(), end(7), ["--set", "trajectory.rows=7"], "--set: trajectory: a recording is"),
        (start(), end(7), ["--set", "model.core=gru"], "--set: model.core: a recording is"),
        (start(), end(7), ["--set", "policies.names=['a','b']"], "names: a recording is"),
        (start(**LOCKSTEP), end(7), [], "add --set pace.mode=async --set pace.lag=0 --set"),
        (start(), end(7), ["--exact", "--loop"], "--exact: it ends, with the recorded settings"),
        (start(), end(7), ["--exact", "--set", "seed=1"], "--exact: it ends, with the recorded"),
        (start(**LOCKSTEP), end(7), ["--exact"], "was recorded in lockstep"),
        (
            start(learner={"num_passes": "auto"}),
            end(7),
            ["--exact"],
            "auto, which goes by the time",
        ),
        (start(2, 5), end(7), ["--exact"], "begins at update 5: record a run from its start"),
        (start(), end(0), ["--exact"], "ended before the first update"),
        (start(), end(7), ["--run-dir", "held"], "already holds a run: name another folder"),
        (start(), end(7), ["--run-dir", "/proc/no"], "--run-dir: cannot write to /proc/no"),
    ):
        assert replay.main([recording(first, message(0), last), *flags]) == 2, says
        assert says in capsys.readouterr().err
        assert FakeLearner.made == [], says


def test_a_lockstep_recording_is_played_into_another_learner():
    flags = "--set pace.mode=async --set pace.lag=0 --set pace.on_loss=go_on"
    assert replay.main([recording(start(**LOCKSTEP), message(0)), *flags.split(), "--loop"]) == 0
    assert FakePlayer.made[0].manner == {"is_looped"}


def test_a_learner_that_fails_gives_its_code(monkeypatch, capsys):
    monkeypatch.setattr(FakeLearner, "code", 2)
    assert replay.main([recording()]) == 2
    assert capsys.readouterr().out == ""
    # The player is told when it dies.
    assert FakePlayer.made[0].should_stop()


def test_a_learner_that_is_killed_is_told_of_with_the_way_on(monkeypatch, caplog):
    monkeypatch.setattr("sys.argv", ["/bin/impala-async", "replay"])
    monkeypatch.setattr(FakeLearner, "code", 137)
    monkeypatch.setattr(RunFolder, "exists", lambda self: bool(FakeLearner.made))
    assert replay.main([recording(), "--run-dir", "here"]) == 137
    (told,) = [text for text in caplog.messages if "the learner" in text]
    assert told.startswith("the learner was killed (SIGKILL)")
    assert told.endswith("to go on: impala-async learner --resume --run-dir here")


def test_it_tells_of_a_learner_that_takes_long_to_start_or_to_end(monkeypatch):
    waits, seen = [], []

    @contextmanager
    def told_of(what, tell=None):
        waits.append(what)
        yield
        waits.pop()

    def read(folder, name):
        seen.extend(waits)
        return {"data_url": "tcp://127.0.0.1:7"}

    def end(*learner, asked_s):
        seen.extend(waits)
        FakeLearner.end(*learner, asked_s)

    monkeypatch.setattr("impala_async.doors.start_told_of", told_of)
    monkeypatch.setattr(replay, "told_of", told_of)
    monkeypatch.setattr(replay, "end_in_time", end)
    monkeypatch.setattr(RunFolder, "read_json", read)
    assert replay.main([recording()]) == 0
    assert seen == ["torch is loaded, the learner built", "ending: waiting for the learner"]


def test_an_echo_of_ctrl_c_is_no_second_one(monkeypatch, capsys):
    handlers = {}

    def press(self):
        for _ in range(2):
            handlers[signal.SIGINT](signal.SIGINT, None)

    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    monkeypatch.setattr(FakePlayer, "run", press)
    assert replay.main([recording()]) == 130
    assert "interrupted" not in capsys.readouterr().err


def test_a_start_that_is_interrupted_leaves_nothing(monkeypatch):
    """Its own file is gone, and so are the learner and what that had begun."""
    seen = []

    def begin(self, door, flags, lifeline):
        self.grace_s = None
        folder = RunFolder(Path(flags[3]))
        seen.extend(path.name for path in folder.path.iterdir())
        folder.begin(load_config(Path(flags[1])))
        folder.announce("tcp://127.0.0.1:7", "", 1)
        folder.let_go()

    def interrupted(self):
        for undo in reversed(processes._undoings):
            undo()

    monkeypatch.setattr(FakeLearner, "__init__", begin)
    monkeypatch.setattr(FakeLearner, "kill", lambda self: seen.append("killed"))
    monkeypatch.setattr(FakeLearner, "wait", lambda self: seen.append("awaited"))
    monkeypatch.setattr(FakeLearner, "returncode", 130, raising=False)
    monkeypatch.setattr(replay, "end_in_time", lambda *_, **how: None)
    monkeypatch.setattr(FakePlayer, "__init__", lambda *args, **named: None)
    monkeypatch.setattr(FakePlayer, "run", interrupted)
    assert replay.main([recording(), "--run-dir", "here"]) == 130
    assert seen == ["replay.json", "killed", "awaited"]
    assert not Path("here").exists()


@pytest.fixture
def finished(monkeypatch):
    """A learner that has reached its goal."""
    monkeypatch.setattr(FakePlayer, "is_finished", True)

    def read(directory, version):
        assert (directory.name, version) == ("checkpoints", Version(1, 7))
        return DIGESTS

    monkeypatch.setattr("impala_async.training.checkpoint.read_digests", read)


@pytest.mark.usefixtures("finished")
@pytest.mark.parametrize(
    ("ends", "code", "says"),
    [
        ([end(7, **DIGESTS)], 0, "the same weights and optimizer state as recorded, to the last"),
        ([end(7, **{"model.safetensors": "abd"})], 2, "weights are not those of the recording"),
        ([end(7)], 0, "nothing to compare\n"),
        # It was killed.
        ([], 0, "nothing to compare\n"),
    ],
)
def test_an_exact_replay_stops_where_the_recording_did_and_compares(capsys, ends, code, says):
    assert replay.main([recording(start(), message(0), *ends), "--exact"]) == code
    (learner,) = FakeLearner.made
    goal = {key: value for key, value in settings_of(learner).stop if value is not None}
    assert goal == ({"updates": 7} if ends else {})
    assert learner.grace_s == replay.GRACE_S
    assert FakePlayer.made[0].manner == {"is_exact"}
    told = capsys.readouterr()
    assert says in told.out + told.err


def test_a_recording_that_lacks_messages_of_its_run_is_told(capsys):
    assert replay.main([recording(), "--exact"]) == 2
    says = "its messages make 7 updates, and the learner that was recorded made 7"
    assert says in capsys.readouterr().err
