import os
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


def started(*flags, code=0, main=train.main):
    FakeRun.made.clear()
    assert main(flags) == code
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


def begin(*overrides):
    """What a learner writes down at its start, before it has a port."""
    folder = RunFolder(Path("here"))
    folder.begin(load_config(default_config_path(), overrides))
    folder.let_go()


def write_down(folder):
    """As `begin`, in a folder that `train` holds."""
    config = load_config(default_config_path()).model_dump(mode="json", by_alias=True)
    folder.write_json("config.json", {"run_id": "0" * 32, "config": config})


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


@pytest.mark.parametrize("flags", [["--set", "seed=-1"], ["--resume"]])
def test_wrong_settings_start_nothing(flags, capsys):
    assert train.main(flags) == 2
    assert FakeRun.made == []
    assert "error: " in capsys.readouterr().err


def write_summary(folder):
    folder.write_json("summary.json", SUMMARY)


# -------------------- ends without a summary


@pytest.mark.parametrize("is_given_up", [False, True])
def test_an_end_that_was_told_is_told_once(monkeypatch, caplog, is_given_up):
    """By the learner that has a summary, or by who gave the run up."""
    monkeypatch.setattr(FakeRun, "code", 78)
    monkeypatch.setattr(FakeRun, "verdict", (78, "why") if is_given_up else None)
    during = write_down if is_given_up else write_summary
    monkeypatch.setattr(FakeRun, "during", staticmethod(during))
    started("--run-dir", "here", code=78)
    assert caplog.messages == []


def test_a_folder_that_a_learner_has_is_refused_before_anything_is_started(capsys):
    """Not even a log is opened there."""
    folder = RunFolder(Path("here"))
    folder.begin(load_config(default_config_path()))
    before = sorted(Path("here").iterdir())
    assert train.main(["--resume", "--run-dir", "here"]) == 2
    assert "here is in use by another learner" in capsys.readouterr().err
    assert FakeRun.made == []
    assert sorted(Path("here").iterdir()) == before
    folder.let_go()
    started("--resume", "--run-dir", "here")


def test_the_summary_of_an_earlier_start_is_none(monkeypatch, caplog):
    begin()
    write_summary(RunFolder(Path("here")))
    monkeypatch.setattr(FakeRun, "code", 70)
    started("--resume", "--run-dir", "here", "--set", "stop.mean_return=none", code=70)
    assert "the learner ended with exit code 70" in caplog.text


@pytest.mark.parametrize(
    ("code", "is_told"), [(70, True), (75, True), (130, True), (2, False), (0, False)]
)
@pytest.mark.parametrize("has_begun", [False, True])
def test_an_end_without_a_summary_is_told(monkeypatch, caplog, code, is_told, has_begun):
    """A wrong setting has been told by then, and a start that is ended has nothing to sum up."""
    monkeypatch.setattr(FakeRun, "code", code)
    if has_begun:
        monkeypatch.setattr(FakeRun, "during", staticmethod(write_down))
    started("--run-dir", "here", code=code)
    assert ("the learner " in caplog.text) == (is_told and (has_begun or code != 130))
    assert ("to go on: " in caplog.text) == (is_told and has_begun)


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (130, "the learner was interrupted (SIGINT)"),
        (137, f"the learner {how_it_ended(-signal.SIGKILL)}"),
        (139, "the learner died of SIGSEGV"),
        (152, "the learner reached a limit of processor time (SIGXCPU)"),
    ],
)
@pytest.mark.parametrize("has_begun", [False, True])
def test_a_learner_that_was_killed_is_told_with_the_command_that_resumes(
    monkeypatch, caplog, code, told, has_begun
):
    monkeypatch.setattr("sys.argv", ["/bin/impala-async", "train"])
    monkeypatch.setattr(FakeRun, "code", code)
    if has_begun:
        monkeypatch.setattr(FakeRun, "during", staticmethod(write_down))
    started("--run-dir", "my run", code=code)
    resume = f"{LOST}; to go on: impala-async train --resume --run-dir 'my run'"
    is_silent = code == 130 and not has_begun
    assert caplog.messages == ([] if is_silent else [told + resume if has_begun else told])
    if has_begun:
        Path("my run/checkpoints").mkdir()
        started(*shlex.split(resume)[-3:], code=code)


PICKY = """
import sys
from pathlib import Path
import gymnasium

class Picky(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,))
    action_space = gymnasium.spaces.Discrete(2)
    def __init__(self):
        if "actor" in Path(sys.argv[0]).parts:
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
    with Forked(
        [sys.executable, "-m", "impala_async.train", *flags],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as door:
        out, said = door.communicate(timeout=60)
    assert door.returncode == 78, said
    (reason,) = [line for line in said.splitlines() if "cannot run" in line]
    assert "actor 0 cannot run: " in reason or "actor 1 cannot run: " in reason
    assert "exit code 78 (picky:Picky failed to be made: RuntimeError: there is no disp" in reason
    log = Path(reason.partition("its log: ")[2])
    assert log.parent == tmp_path / "run" / "actors"
    assert "there is no display here" in log.read_text()
    assert said.splitlines()[-1] == reason
    assert out == ""
    assert "Traceback" not in said
