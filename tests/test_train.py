import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from impala_async import train
from impala_async.config.load import load_config
from impala_async.doors import BIND_VARIABLE, default_config_path
from impala_async.errors import how_it_ended
from impala_async.runs import plot
from impala_async.runs.folder import HOLD_VARIABLE, RunFolder

ROOT = Path(__file__).resolve().parents[1]
FREE = "tcp://127.0.0.1:"
ANY = "tcp://127.0.0.1:*"
SUMMARY = {
    "exit_reason": "mean_return",
    "env_id": "CartPole-v1",
    "env_steps_trained": 123456,
    "updates": 1234,
    "wall_s": 12.34,
    "run_s": 12.34,
    "rejected": 0,
    "env_steps_per_s": 10004.5,
    "frames_per_s": 10004.5,
    "mean_return": 475.25,
    "mean_return_100": 475.25,
    "lr_is_0_since": None,
    "episodes": 210,
    "lag_quantiles": [0, 1, 2, 3, 9],
    "dropped": {"stale": 3, "shutdown": 4},
    "bottleneck": "the learner",
    "advice": "a faster device",
}


LOST = "; what it trained since its last checkpoint is lost"


class FakeRun:
    """In place of the processes: notes what it was given, and does what a run would."""

    made: list["FakeRun"]
    code = 0
    has_given_up = False
    how_it_was_quit = ""

    def __init__(self, learner_flags, data_url, run_dir, environment, name_actor, fds):
        # The learner holds the folder by the descriptor that it is told of.
        assert [environment[HOLD_VARIABLE]] == [str(fd) for fd in fds]
        self.flags = list(learner_flags)
        self.data_url = data_url
        self.run_dir = run_dir
        self.ports = json.loads(environment[BIND_VARIABLE])
        self.num_actors = 0
        self.has_removed_logs = False
        FakeRun.made.append(self)

    def run(self, num_actors):
        self.num_actors = num_actors
        self.during(RunFolder(self.run_dir))
        return self.code

    def remove_logs(self):
        self.has_removed_logs = True

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
    assert run.ports["data"] == run.data_url
    urls = set(run.ports.values())
    assert len(urls) == 2
    assert all(url.startswith(FREE) and url[len(FREE) :].isdigit() for url in urls)


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


def test_ports_that_are_named_are_kept_and_stars_are_chosen_here():
    run = started("--set", "bind.data=tcp://0.0.0.0:7001", "--set", "bind.weights=tcp://0.0.0.0:*")
    assert run.settings == {"bind.data": "tcp://0.0.0.0:7001", "bind.weights": "tcp://0.0.0.0:*"}
    assert run.ports["data"] == "tcp://0.0.0.0:7001"
    host, _, port = run.ports["weights"].rpartition(":")
    assert host == "tcp://0.0.0.0"
    # The actors are told a port before the learner has one.
    assert port.isdigit()
    # The default one, too, is one that is named.
    run = started("--set", "bind.data=tcp://127.0.0.1:5555")
    assert run.data_url == run.ports["data"] == "tcp://127.0.0.1:5555"
    assert run.settings["bind.weights"] == ANY


@pytest.mark.parametrize(
    ("bind", "dialled"),
    [
        ("tcp://*:7001", "tcp://127.0.0.1:7001"),
        ("tcp://0.0.0.0:7001", "tcp://127.0.0.1:7001"),
        ("tcp://[::]:7001", "tcp://[::1]:7001"),
        ("tcp://[::1]:7001", "tcp://[::1]:7001"),
        ("tcp://10.0.0.1:7001", "tcp://10.0.0.1:7001"),
    ],
)
def test_actors_dial_an_address_that_can_be_dialled(bind, dialled):
    run = started("--set", f"bind.data={bind}")
    assert run.ports["data"] == bind
    assert run.data_url == dialled


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
    assert run.settings == {}
    assert run.ports["data"].startswith(FREE)
    assert run.ports["data"] not in (ANY, first.ports["data"])
    assert run.ports["weights"] == "tcp://127.0.0.1:7002"


@pytest.mark.parametrize("flags", [["--set", "seed=-1"], ["--resume"]])
def test_wrong_settings_start_nothing(flags, capsys):
    assert train.main(flags) == 2
    assert FakeRun.made == []
    assert "error: " in capsys.readouterr().err


def write_summary(monkeypatch, **changes):
    def during(folder):
        folder.path.mkdir(parents=True, exist_ok=True)
        folder.write_json("summary.json", SUMMARY | changes)
        reports = {"env_steps_trained": 1, "episodes/return_mean": 2.0, "mean_return_100": None}
        folder.metrics.write_text(json.dumps(reports) + "\n")

    monkeypatch.setattr(FakeRun, "during", staticmethod(during))


Said = Callable[[], str]


@pytest.fixture
def said(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    return lambda: capsys.readouterr().out


# -------------------- the summary and the picture


def test_the_summary_is_shown_with_a_picture(monkeypatch, said):
    write_summary(monkeypatch)
    path = "/".join(["a-folder-of-some-length"] * 6)
    started("--run-dir", path)
    shown = said()
    assert "CartPole-v1: ended (mean_return)" in shown
    for value in ("475", "123,456", "1,234", "12.3 (", "10,004", "2 (9) updates", "the learner"):
        assert value in shown
    assert any("dropped" in line and " 7 " in line for line in shown.splitlines())
    assert not any(each in shown for each in ("this start", "learning rate", "frames"))
    # Paths are shown whole, however long.
    pictured = [f"run folder: {path}", f"learning curve: {path}/learning_curve.png"]
    assert shown.splitlines()[-2:] == pictured
    assert Path(path, "learning_curve.png").exists()


SHOWN = [
    ({"lr_is_0_since": 400_000}, "0 since env step 400,000"),
    ({"frames_per_s": 40018.0}, "10,004 (40,018 frames)"),
    # Words of others are shown as they are.
    ({"env_id": "kenvs:Printer"}, "kenvs:Printer"),
    ({"advice": "no device [/dev/cam0] [red]"}, "no device [/dev/cam0] [red]"),
    # A run without updates.
    ({"mean_return": None, "episodes": 0, "lag_quantiles": [], "bottleneck": None}, "ended (mean_"),
]


@pytest.mark.parametrize(("changes", "text"), SHOWN)
def test_more_is_shown_where_there_is_more_to_say(monkeypatch, said, changes, text):
    write_summary(monkeypatch, **changes)
    started("--run-dir", "here")
    assert text in said()


def test_figures_of_a_resumed_run_that_are_of_this_start_alone_say_so(monkeypatch, said):
    begin()
    # However short it was before, and however long the launch took.
    write_summary(monkeypatch, run_s=0.1)
    started("--resume", "--run-dir", "here")
    marked = {line.split("│")[1].strip() for line in said().splitlines() if "this start" in line}
    assert marked == {
        "seconds of training, this start",
        "env steps per second, this start",
        "lag, median (largest), this start",
        "what limits it, this start",
    }


def test_a_summary_that_nobody_reads_does_not_change_the_end(monkeypatch):
    def show(*args, **more):
        raise BrokenPipeError

    write_summary(monkeypatch)
    monkeypatch.setattr(FakeRun, "code", 75)
    monkeypatch.setattr(train, "_show", show)
    started("--run-dir", "here", code=75)
    assert Path("here/learning_curve.png").exists()


@pytest.mark.parametrize(
    ("changes", "title"),
    [
        ({"mean_return": 475.25}, "CartPole-v1: mean return 475"),
        ({"mean_return": None}, "CartPole-v1"),
        # A mean of few episodes says so.
        (
            {"mean_return": 399.996, "episodes": 12},
            "CartPole-v1: mean return 400 (12 episodes)",
        ),
    ],
)
def test_the_picture_has_a_title_and_the_goal(monkeypatch, said, changes, title):
    write_summary(monkeypatch, **changes)
    drawn = []
    monkeypatch.setattr(plot, "draw_learning_curve", lambda *paths, **how: drawn.append(how))
    started("--set", "stop.mean_return=400")
    assert drawn == [{"title": title, "goal": 400.0}]
    # In the table it is never rounded up to the goal.
    assert not re.search(r"episodes\W+400\b", said())


def test_a_picture_that_cannot_be_written_is_no_matter(monkeypatch, said):
    write_summary(monkeypatch)
    write = FakeRun.during

    def during(folder):
        write(folder)
        (folder.path / "learning_curve.png").mkdir()

    monkeypatch.setattr(FakeRun, "during", staticmethod(during))
    started("--run-dir", "here")
    assert "cannot be written: Is a directory" in said()


# -------------------- ends without a summary


def test_a_run_that_was_given_up_has_no_table(monkeypatch, said, caplog):
    write_summary(monkeypatch, exit_reason="terminated", env_steps_trained=0)
    monkeypatch.setattr(FakeRun, "code", 78)
    monkeypatch.setattr(FakeRun, "has_given_up", True)
    run = started("--run-dir", "here", code=78)
    assert said() == ""
    # The reason is told by who gave up, and it names a log.
    assert caplog.messages == []
    assert not run.has_removed_logs


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_run_that_never_began_keeps_no_logs(monkeypatch, has_begun):
    monkeypatch.setattr(FakeRun, "code", 2)
    if has_begun:
        monkeypatch.setattr(FakeRun, "during", staticmethod(write_down))
    run = started("--run-dir", "here", code=2)
    assert run.has_removed_logs == (not has_begun)
    assert Path("here").exists() == has_begun


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


def test_the_summary_of_an_earlier_start_is_not_shown(monkeypatch, said):
    folder = RunFolder(Path("here"))
    folder.begin(load_config(default_config_path()))
    folder.write_json("summary.json", SUMMARY)
    folder.let_go()
    monkeypatch.setattr(FakeRun, "code", 2)
    started("--resume", "--run-dir", "here", "--set", "stop.mean_return=none", code=2)
    assert said() == ""


def test_what_lies_in_the_place_of_a_folder_that_is_gone_is_left_alone(monkeypatch, said, caplog):
    def during(folder):
        folder.path.rename("moved")
        folder.path.mkdir()
        (folder.path / "summary.json").write_text(json.dumps(SUMMARY))
        (folder.path / "epoch").write_text("3")

    monkeypatch.setattr(FakeRun, "during", staticmethod(during))
    monkeypatch.setattr(FakeRun, "code", 75)
    started("--run-dir", "here", code=75)
    assert said() == ""
    assert "without a summary, with exit code 75" in caplog.text
    assert sorted(os.listdir("here")) == ["epoch", "summary.json"]


@pytest.mark.parametrize(
    ("code", "is_told"), [(70, True), (75, True), (2, False), (0, False), (130, False)]
)
def test_an_end_without_a_summary_is_told(monkeypatch, caplog, code, is_told):
    """A wrong setting has been told by then, and a start that is ended has nothing to sum up."""
    monkeypatch.setattr(FakeRun, "code", code)
    monkeypatch.setattr(FakeRun, "during", staticmethod(write_down))
    started("--run-dir", "here", code=code)
    assert (f"without a summary, with exit code {code}" in caplog.text) == is_told
    assert ("to go on: " in caplog.text) == is_told


def test_a_learner_that_a_second_ctrl_c_ended_is_told_of_too(monkeypatch, caplog):
    monkeypatch.setattr(FakeRun, "code", 130)
    monkeypatch.setattr(FakeRun, "how_it_was_quit", "was told to quit at once")
    monkeypatch.setattr(FakeRun, "during", staticmethod(write_down))
    started("--run-dir", "here", code=130)
    (told,) = caplog.messages
    assert told.startswith(f"the learner was told to quit at once{LOST}; to go on: ")


@pytest.mark.parametrize(
    ("code", "told"),
    [
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
    assert caplog.messages == [told + resume if has_begun else told]
    if has_begun:
        Path("my run/checkpoints").mkdir()
        started(*shlex.split(resume)[-3:], code=code)


PICKY = """
import sys
import gymnasium

class Picky(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,))
    action_space = gymnasium.spaces.Discrete(2)
    def __init__(self):
        if "impala_async.actor.service" in sys.modules:
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
    answer = subprocess.run(
        [sys.executable, "-m", "impala_async.train", *flags],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert answer.returncode == 78, answer.stderr
    (reason,) = [line for line in answer.stderr.splitlines() if "cannot run" in line]
    assert "actor 0 cannot run: " in reason or "actor 1 cannot run: " in reason
    assert "exit code 78 (picky:Picky failed to be made: RuntimeError: there is no disp" in reason
    log = Path(reason.partition("its log: ")[2])
    assert log.parent == tmp_path / "run" / "actors"
    assert "there is no display here" in log.read_text()
    assert answer.stderr.splitlines()[-1] == reason
    assert answer.stdout == ""
    assert "Traceback" not in answer.stderr
