import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from impala_async import train
from impala_async.config.load import load_config
from impala_async.doors import default_config_path
from impala_async.errors import how_it_ended
from impala_async.runs.folder import RunFolder
from tests.e2e.zygote import Forked

ROOT = Path(__file__).resolve().parents[1]
ANY = "tcp://127.0.0.1:*"
SUMMARY = {"exit_reason": "mean_return", "env_steps_trained": 123456}
LOST = "; what it trained since its last checkpoint is lost"


class FakeRun:
    """In place of the processes: notes what it was given, and does what a run would."""

    made: list["FakeRun"]
    code = 0
    verdict = None
    has_begun = False

    def __init__(self, learner_flags, run_dir):
        self.flags = list(learner_flags)
        self.run_dir = run_dir
        self.num_actors = 0
        FakeRun.made.append(self)

    def run(self, num_actors):
        self.num_actors = num_actors
        self.during(RunFolder(self.run_dir))
        return self.code

    @staticmethod
    def during(folder): ...

    def values(self, flag):
        return [v for f, v in zip(self.flags, self.flags[1:], strict=False) if f == flag]

    @property
    def settings(self):
        return dict(value.split("=", 1) for value in self.values("--set"))


@pytest.fixture(autouse=True)
def fake_run(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(FakeRun, "made", [], raising=False)
    monkeypatch.setattr(train, "LocalRun", FakeRun)


def started(*flags, code=0):
    FakeRun.made.clear()
    assert train.main(flags) == code
    (run,) = FakeRun.made
    return run


def test_without_arguments_it_trains_cartpole_at_free_ports():
    run = started()
    config = load_config(default_config_path())
    assert run.num_actors == config.train.num_actors
    assert run.values("--config") == [str(default_config_path())]
    (run_dir,) = run.values("--run-dir")
    assert Path(run_dir).parent == Path("runs")
    assert run.run_dir == Path(run_dir)
    assert run.settings == {"bind.data": ANY, "bind.weights": ANY}


def test_settings_go_on_to_the_learner():
    overrides = ("--set", "train.num_actors=5", "--set", 'env.kwargs={a="b=c"}')
    run = started(*overrides, "--run-dir", "here")
    assert run.num_actors == 5
    assert run.values("--set")[:2] == ["train.num_actors=5", 'env.kwargs={a="b=c"}']
    assert run.values("--run-dir") == ["here"]
    assert started("--record", "a file").values("--record") == ["a file"]
    assert "--record" not in run.flags
    # What the learner makes of it is what was checked here.
    (path,) = run.values("--config")
    assert load_config(Path(path), run.values("--set")).env.kwargs == {"a": "b=c"}


def test_what_is_trained_is_named_by_a_setting_or_a_file(tmp_path):
    run = started("--set", "env.id=Acrobot-v1")
    assert run.values("--config") == []
    assert run.settings["env.id"] == "Acrobot-v1"
    (tmp_path / "my.toml").write_text('env.id = "Acrobot-v1"\ntrain.num_actors = 3\n')
    run = started("--config", "my.toml")
    assert run.values("--config") == ["my.toml"]
    assert run.num_actors == 3


@pytest.mark.parametrize(
    ("setting", "is_named"),
    [
        ("env.kwargs={a=1}", False),
        (" env.id = Acrobot-v1", True),
        ('env={id="Acrobot-v1"}', True),
    ],
)
def test_the_default_config_is_for_who_names_no_env(setting, is_named):
    assert (started("--set", setting).values("--config") == []) == is_named


def test_ports_that_are_named_are_kept():
    run = started("--set", "bind.data=tcp://0.0.0.0:7001", "--set", "bind.weights=tcp://0.0.0.0:*")
    assert run.settings == {"bind.data": "tcp://0.0.0.0:7001", "bind.weights": "tcp://0.0.0.0:*"}
    # The default one, too, is one that is named.
    run = started("--set", "bind.data=tcp://127.0.0.1:5555")
    assert run.settings == {"bind.data": "tcp://127.0.0.1:5555", "bind.weights": ANY}


def test_the_learner_alone_is_told_where_to_record():
    assert started("--record", "some file").values("--record") == ["some file"]
    assert "--record" not in started().flags


def test_a_resumed_run_takes_new_ports_but_keeps_those_of_the_user():
    first = started("--run-dir", "here", "--set", "bind.weights=tcp://127.0.0.1:7002")
    begin(*first.values("--set"), "train.num_actors=4")
    run = started("--resume", "--run-dir", "here")
    assert run.num_actors == 4
    assert "--resume" in run.flags
    assert run.values("--config") == []
    # What is written down says so.
    assert run.settings == {}
    assert first.settings == {"bind.data": ANY, "bind.weights": "tcp://127.0.0.1:7002"}


def test_wrong_settings_start_nothing(capsys):
    for flags in (["--set", "seed=-1"], ["--resume"]):
        assert train.main(flags) == 2
        assert "error: " in capsys.readouterr().err
    assert FakeRun.made == []


# -------------------- the end


def begin(*overrides):
    """What a learner writes down at its start, before it has a port."""
    folder = RunFolder(Path("here"))
    folder.begin(load_config(default_config_path(), overrides))
    folder.let_go()


def write_down(folder):
    folder.begin(load_config(default_config_path()))
    folder.let_go()


def write_summary(folder):
    folder.write_json("summary.json", SUMMARY)


@pytest.fixture
def ends(monkeypatch):
    def ends(code, during=lambda folder: None, verdict=None):
        monkeypatch.setattr(FakeRun, "code", code)
        monkeypatch.setattr(FakeRun, "verdict", verdict)
        monkeypatch.setattr(FakeRun, "during", staticmethod(during))

    return ends


def test_an_end_that_was_told_is_not_told_again(ends, caplog):
    """By the learner that has a summary, or by who gave the run up."""
    ends(78, write_summary)
    started(code=78)
    ends(78, write_down, verdict=(78, "why"))
    started("--run-dir", "here", code=78)
    assert caplog.messages == []


def test_a_run_that_never_began_leaves_nothing_unless_an_actor_says_why(ends, monkeypatch):
    log = Path("here/actors/actor-0.log")

    def say(folder):
        log.parent.mkdir(exist_ok=True)
        log.write_text("terminated\n")

    ends(130, say)
    started("--run-dir", "here", code=130)
    assert not Path("here").exists()
    ends(130, say, verdict=(2, "why"))
    started("--run-dir", "here", code=130)
    assert log.exists()
    # What lies there now is somebody else's.
    monkeypatch.setattr(FakeRun, "has_begun", True)
    ends(75, say)
    started("--run-dir", "here", code=75)
    assert log.exists()


def test_a_folder_that_a_learner_has_is_refused_before_anything_is_started(capsys):
    """Not even a log is opened there."""
    folder = RunFolder(Path("here"))
    folder.begin(load_config(default_config_path()))
    before = sorted(Path("here").iterdir())
    assert train.main(["--resume", "--run-dir", "here"]) == 2
    assert "here is in use by another learner" in capsys.readouterr().err
    assert FakeRun.made == []
    assert sorted(Path("here").iterdir()) == before


def test_the_summary_of_an_earlier_start_is_none(ends, caplog):
    begin()
    write_summary(RunFolder(Path("here")))
    ends(70)
    started("--resume", "--run-dir", "here", "--set", "stop.mean_return=none", code=70)
    assert "the learner ended with exit code 70" in caplog.text


@pytest.mark.parametrize(
    ("code", "how"),
    [
        (0, None),
        # Code of one's own may fail in mid-run; a wrong setting has been told by then.
        (2, "ended with exit code 2"),
        (70, "ended with exit code 70"),
        (75, "ended with exit code 75"),
        (130, "was interrupted (SIGINT)"),
        (137, how_it_ended(-signal.SIGKILL)),
        (139, "died of SIGSEGV"),
    ],
)
@pytest.mark.parametrize("has_begun", [False, True])
def test_an_end_without_a_summary_is_told_with_the_command_that_resumes(
    ends, monkeypatch, caplog, code, how, has_begun
):
    monkeypatch.setattr("sys.argv", ["/bin/impala-async", "train"])
    ends(code, write_down if has_begun else lambda folder: None)
    monkeypatch.setattr(FakeRun, "has_begun", has_begun)
    started("--run-dir", "my run", code=code)
    resume = f"{LOST}; to go on: impala-async train --resume --run-dir 'my run'" * has_begun
    is_silent = how is None or (code in (2, 130) and not has_begun)
    assert caplog.messages == ([] if is_silent else [f"the learner {how}{resume}"])
    if resume:
        ends(0)
        started(*shlex.split(resume)[-3:])


PICKY = """
import sys
from pathlib import Path
import gymnasium

class Picky(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,))
    action_space = gymnasium.spaces.Discrete(2)
    def __init__(self):
        if "impala_async.actor" in sys.argv[0].replace("/", "."):
            raise RuntimeError("there is no display here")
    def reset(self, *, seed=None, options=None):
        return self.observation_space.sample(), {}
    def step(self, action):
        return self.observation_space.sample(), 0.0, False, False, {}
"""


@pytest.mark.e2e
def test_an_actor_that_cannot_run_ends_the_run_with_its_reason(tmp_path):
    (tmp_path / "picky.py").write_text(PICKY)
    flags = ["--set", "env.id=picky:Picky", "--run-dir", str(tmp_path / "run")]
    out, error = tmp_path / "out", tmp_path / "error"
    with out.open("w") as stdout, error.open("w") as stderr:
        door = Forked(
            [sys.executable, "-m", "impala_async.train", *flags],
            env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
        )
    assert door.wait(60) == 78
    error = error.read_text()
    reason = error.splitlines()[-1]
    assert re.search("actor [01] cannot run: it ended with exit code 78 ", reason)
    assert "(picky:Picky failed to be made: RuntimeError: there is no display" in reason
    log = Path(reason.partition("its log: ")[2])
    assert log.parent == tmp_path / "run" / "actors"
    assert "there is no display here" in log.read_text()
    # No table of what was never trained.
    assert out.read_text() == ""
    assert "Traceback" not in error
