import shlex
import signal
from pathlib import Path

import pytest

from impala_async import train
from impala_async.config.load import load_config
from impala_async.config.packaged import packaged_configs
from impala_async.errors import StartError, how_it_ended
from impala_async.runs.folder import RunFolder
from tests.fake_run import FakeRun, write_down

ANY = "tcp://127.0.0.1:*"
SUMMARY = {"exit_reason": "mean_return", "env_steps_trained": 123456}
LOST = "; there was no checkpoint yet"


pytestmark = pytest.mark.usefixtures("fake_run")


def started(*flags, code=0):
    FakeRun.made.clear()
    assert train.main(flags) == code
    (run,) = FakeRun.made
    return run


def test_without_arguments_it_trains_cartpole_at_free_ports():
    run = started()
    config = load_config(packaged_configs()["cartpole"])
    assert run.num_actors == config.train.num_actors
    assert run.values("--config") == [str(packaged_configs()["cartpole"])]
    (run_dir,) = run.values("--run-dir")
    assert Path(run_dir).parent == Path("runs")
    assert run.run_dir == Path(run_dir)
    assert run.settings == {"bind.data": ANY, "bind.weights": ANY}
    assert "--record" not in run.flags


def test_flags_go_on_to_the_learner():
    overrides = ("--set", "train.num_actors=5", "--set", 'env.kwargs={a="b=c"}')
    run = started(*overrides, "--run-dir", "here", "--record", "a file")
    assert run.num_actors == 5
    assert run.values("--set")[:2] == ["train.num_actors=5", 'env.kwargs={a="b=c"}']
    assert (run.values("--run-dir"), run.values("--record")) == (["here"], ["a file"])
    # The learner reads from it the config that was checked here.
    (path,) = run.values("--config")
    assert load_config(Path(path), run.values("--set")).env.kwargs == {"a": "b=c"}


def test_what_is_trained_is_named_by_a_setting_or_a_file(tmp_path):
    (tmp_path / "my.toml").write_text('env.id = "Acrobot-v1"\ntrain.num_actors = 3\n')
    run = started("--config", "my.toml")
    assert (run.values("--config"), run.num_actors) == (["my.toml"], 3)
    for setting, is_named in (
        *(("env.kwargs={a=1}", False), (" env.id = Acrobot-v1", True)),
        ('env={id="Acrobot-v1"}', True),
    ):
        assert (started("--set", setting).values("--config") == []) == is_named, setting


def test_ports_that_are_named_are_kept(ends):
    # The default one, too, is one that is named.
    for data in ("tcp://0.0.0.0:7001", "tcp://127.0.0.1:5555"):
        run = started("--set", f"bind.data={data}")
        assert run.settings == {"bind.data": data, "bind.weights": ANY}
    begin(*run.values("--set"), "train.num_actors=4")
    ends(0, write_summary)
    run = started("--resume", "--run-dir", "here")
    assert run.num_actors == 4
    assert "--resume" in run.flags
    # Neither is needed: the run folder holds the config.
    assert run.values("--config") == run.values("--set") == []


def test_a_command_that_is_run_again_trains_what_it_began_with(ends):
    auto = ("--resume", "auto", "--run-dir", "here")
    run = started(*auto)
    assert run.values("--config") == [str(packaged_configs()["cartpole"])]
    begin("train.num_actors=5", "env.id=Acrobot-v1")
    ends(0, write_summary)
    run = started(*auto)
    assert run.values("--config") == []
    assert (run.values("--resume"), run.num_actors) == (["auto"], 5)
    write_summary(RunFolder(Path("here")))
    FakeRun.made.clear()
    assert train.main([*auto, "--set", "stop.env_steps=9"]) == 0
    assert FakeRun.made == []


def test_wrong_settings_start_nothing(capsys):
    for flags in (["--set", "seed=-1"], ["--resume"]):
        assert train.main(flags) == 2
        assert "error: " in capsys.readouterr().err
    assert FakeRun.made == []


def begin(*overrides):
    """Write down what a learner writes at its start, before it has a port."""
    write_down(RunFolder(Path("here")), *overrides)


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
    """It was told by the learner, which has a summary, or by who gave the run up."""
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
    # The folder that lies there now is somebody else's.
    monkeypatch.setattr(FakeRun, "has_begun", True)
    ends(75, say)
    started("--run-dir", "here", code=75)
    assert log.exists()


@pytest.mark.parametrize(("flags", "code"), [([], 2), (["--resume", "auto"], 75)])
def test_a_folder_that_another_learner_took_at_the_same_moment_is_not_told_of_again(
    flags, code, ends, caplog
):
    config = load_config(packaged_configs()["cartpole"])
    ends(code, lambda folder: RunFolder(folder.path).begin(config))
    started("--run-dir", "here", *flags, code=code)
    assert caplog.messages == []


def test_a_folder_that_a_learner_has_is_refused_before_anything_is_started(capsys):
    """Not even a log is opened there."""
    folder = RunFolder(Path("here"))
    folder.begin(load_config(packaged_configs()["cartpole"]))
    before = sorted(Path("here").iterdir())
    assert train.main(["--resume", "--run-dir", "here"]) == 2
    assert "here is in use by a run of another learner" in capsys.readouterr().err
    assert FakeRun.made == []
    assert sorted(Path("here").iterdir()) == before


def test_a_folder_that_another_learner_took_at_the_same_moment_is_not_advised_to_resume(
    ends, caplog
):
    other, log = RunFolder(Path("here")), Path("here/actors/actor-0.log")

    def lose(folder):
        other.begin(load_config(packaged_configs()["cartpole"]))
        log.parent.mkdir(exist_ok=True)
        log.write_text("its own\n")

    ends(2, lose)
    started("--run-dir", "here", code=2)
    assert (caplog.messages, log.exists()) == ([], True)


def test_the_summary_of_an_earlier_start_is_none(ends, caplog):
    begin()
    write_summary(RunFolder(Path("here")))
    ends(70)
    started("--resume", "--run-dir", "here", "--set", "stop.mean_return=none", code=70)
    assert "the learner ended with exit code 70" in caplog.text


def test_a_resumed_learner_that_ended_on_the_spot_is_no_success(ends, caplog, monkeypatch):
    begin()
    write_summary(RunFolder(Path("here")))
    ends(0)
    flags = ("--resume", "--run-dir", "here", "--set", "stop.mean_return=none")
    started(*flags, code=2)
    assert "the learner ended with exit code 0" in caplog.text
    # One that finds a setting wrong has said so.
    caplog.clear()
    ends(2)
    started(*flags, code=2)
    assert caplog.messages == []
    # One that was told to has lost nothing.
    caplog.clear()
    ends(0, lambda folder: FakeRun.made[-1].heard.append(signal.SIGTERM))
    started(*flags)
    assert caplog.messages == []


def test_without_a_summary_to_read_a_code_is_kept_but_an_end_on_the_spot_is_no_success(
    ends, caplog
):
    for name, ended, code, leave in (
        ("unread", 75, 75, lambda folder: Path("unread/summary.json").mkdir()),
        ("here", 0, 2, lambda folder: folder.announce("tcp://a:1", "tcp://a:2", 1)),
    ):
        ends(ended, lambda folder, leave=leave: (write_down(folder), leave(folder)))
        started("--run-dir", name, code=code)
        assert f"the learner ended with exit code {ended}{LOST}" in caplog.text


def test_a_learner_that_was_killed_after_its_summary_is_told_of(ends, caplog):
    """It may draw its curve then."""
    ends(137, lambda folder: (write_down(folder), write_summary(folder)))
    started("--run-dir", "here", code=137)
    assert "the learner was killed (SIGKILL), by hand, or" in caplog.messages[-1]
    assert caplog.messages[-1].endswith("; its summary is there")
    # Where it was an actor, that was told, and is no death of the learner's.
    caplog.clear()
    ends(137, lambda folder: (write_down(folder), write_summary(folder)), verdict=(137, "why"))
    started("--run-dir", "there", code=137)
    assert caplog.messages == []


@pytest.mark.parametrize("code", [0, 2])
def test_a_learner_that_ended_on_the_spot_while_it_started_is_told_of(ends, caplog, code):
    ends(code, write_down)
    started("--run-dir", "here", code=2)
    assert f"the learner ended with exit code {code}{LOST}" in caplog.text
    # The poll may miss that it served.
    caplog.clear()
    ends(code, lambda folder: (write_down(folder), write_summary(folder)))
    started("--run-dir", "there", code=code)
    assert caplog.messages == []


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


def test_actors_that_cannot_be_started_leave_no_folder(ends, monkeypatch, caplog):
    def refuse(folder):
        (folder.path / "actors").mkdir(parents=True)
        (folder.path / "actors" / "actor-0.log").touch()
        raise StartError("no descriptor is left")

    ends(0, refuse)
    started("--run-dir", "here", code=75)
    assert not Path("here").exists()


def test_a_death_behind_a_checkpoint_has_lost_less(ends, monkeypatch, caplog):
    def during(folder):
        write_down(folder)
        (folder.checkpoints / "ckpt-1-5").mkdir()

    ends(137, during)
    monkeypatch.setattr(FakeRun, "has_begun", True)
    started("--run-dir", "here", code=137)
    assert "; what it trained since its last checkpoint is lost; to go on: " in caplog.text
