import json
import re
import shlex
import signal
from pathlib import Path

import pytest

from impala_async import train
from impala_async.config.load import load_config
from impala_async.config.packaged import packaged_configs
from impala_async.config.ranks import Place
from impala_async.errors import how_it_ended
from impala_async.runs.folder import RunFolder

ANY = "tcp://127.0.0.1:*"
SUMMARY = {"exit_reason": "mean_return", "env_steps_trained": 123456}
WHOLE = {
    **SUMMARY,
    "env_id": "E",
    "mean_return": 475.0,
    "best_eval_return": None,
    "wall_s": 1.5,
    "seed": 0,
}
LOST = "; what it trained is lost"


class FakeRun:
    """Stands for the processes: it notes what it is given, and does what a run would."""

    made: list["FakeRun"]
    code = 0
    verdict = None
    has_begun = False

    def __init__(self, learner_flags, run_dir):
        self.flags = list(learner_flags)
        self.run_dir = run_dir
        self.num_actors, self.heard = 0, []
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


def test_ports_that_are_named_are_kept():
    # The default one, too, is one that is named.
    for data in ("tcp://0.0.0.0:7001", "tcp://127.0.0.1:5555"):
        run = started("--set", f"bind.data={data}")
        assert run.settings == {"bind.data": data, "bind.weights": ANY}
    begin(*run.values("--set"), "train.num_actors=4")
    run = started("--resume", "--run-dir", "here")
    assert run.num_actors == 4
    assert "--resume" in run.flags
    # Neither is needed: the run folder holds the config.
    assert run.values("--config") == run.values("--set") == []


def test_a_command_that_is_run_again_trains_what_it_began_with():
    auto = ("--resume", "auto", "--run-dir", "here")
    run = started(*auto)
    assert run.values("--config") == [str(packaged_configs()["cartpole"])]
    begin("train.num_actors=5", "env.id=Acrobot-v1")
    run = started(*auto)
    assert run.values("--config") == []
    assert (run.values("--resume"), run.num_actors) == (["auto"], 5)
    write_summary(RunFolder(Path("here")))
    FakeRun.made.clear()
    assert train.main([*auto, "--set", "stop.env_steps=9"]) == 0
    assert FakeRun.made == []


def test_each_seed_is_trained_in_a_folder_of_its_own_and_told_in_one_table(monkeypatch, capsys):
    def during(folder):
        number = len(FakeRun.made)
        write_down(folder, f"seed={number}")
        folder.write_json("summary.json", {**WHOLE, "seed": number, "mean_return": 10.0 * number})
        line = {"env_steps_trained": 5, "mean_return": number, "episodes/return_mean": 1.0}
        lines = [line, line | {"env_steps_trained": 9}]
        folder.metrics.write_text("".join(f"{json.dumps(each)}\n" for each in lines))

    monkeypatch.setattr(FakeRun, "during", staticmethod(during))
    assert train.main(["--seeds", "1-3", "--run-dir", "all", "--set", "stop.updates=9"]) == 0
    assert [run.run_dir for run in FakeRun.made] == [Path(f"all/seed-{n}") for n in (1, 2, 3)]
    for number, run in enumerate(FakeRun.made, start=1):
        assert run.values("--set")[:2] == ["stop.updates=9", f"seed={number}"]
        assert run.values("--config") == [str(packaged_configs()["cartpole"])]
    table = capsys.readouterr().out
    assert re.search(r"(?m)^2 +mean_return +20.0 +- +123,456 +1.5$", table)
    assert re.search(r"(?m)^mean +20.0 +- +123,456 +1.5$", table)
    assert Path("all/learning_curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("code", "reason"), [(130, "interrupted"), (0, "terminated"), (75, "checkpoint_not_written")]
)
def test_the_seeds_after_one_that_was_ended_are_not_trained(code, reason, monkeypatch, capsys):
    def during(folder):
        write_down(folder)
        folder.write_json("summary.json", {**WHOLE, "exit_reason": reason})

    monkeypatch.setattr(FakeRun, "during", staticmethod(during))
    monkeypatch.setattr(FakeRun, "code", code)
    assert train.main(["--seeds", "0,5"]) == code
    assert len(FakeRun.made) == 1
    assert re.search(rf"(?m)^0 +{reason} +4\d\d +", capsys.readouterr().out)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_signal_to_a_run_that_is_over_ends_the_seeds_too(number, code, monkeypatch):
    def during(folder):
        write_down(folder)
        folder.write_json("summary.json", WHOLE)
        FakeRun.made[-1].heard.append(number)

    monkeypatch.setattr(FakeRun, "during", staticmethod(during))
    assert train.main(["--seeds", "0,5"]) == code
    assert len(FakeRun.made) == 1
    # There was no seed to come.
    assert train.main(["--seeds", "0", "--run-dir", "last"]) == 0


def test_ranks_do_not_train_several_seeds(monkeypatch, capsys):
    monkeypatch.setattr("impala_async.config.ranks.place_in", lambda: Place(1, 2, 1))
    assert train.main(["--seeds", "0,5", "--run-dir", "all"]) == 2
    assert "--seeds: does not go with 2 ranks" in capsys.readouterr().err
    assert not FakeRun.made


def test_a_seed_of_which_nothing_can_be_read_is_no_success(monkeypatch, caplog):
    monkeypatch.setattr(FakeRun, "during", staticmethod(write_down))
    monkeypatch.setattr(FakeRun, "has_begun", True)
    assert train.main(["--seeds", "0,5"]) == 75
    assert len(FakeRun.made) == 1
    assert caplog.messages[-1].startswith("to go on with the seeds that are left: ")


def test_a_damaged_summary_of_one_seed_is_told_before_another_is_trained(capsys):
    folder = RunFolder(Path("all/seed-2"))
    write_down(folder, "seed=2", "stop.updates=9")
    auto = ["--seeds", "1-2", "--resume", "auto", "--run-dir", "all", "--set", "stop.updates=9"]
    for change in ({"exit_reason": None}, {"seed": "x"}, {"mean_return": "x"}, {"wall_s": None}):
        folder.write_json("summary.json", {**WHOLE, **change})
        assert train.main(auto) == 2
        (name,) = change
        assert f"error: all/seed-2/summary.json: {name} is odd: " in capsys.readouterr().err
    assert FakeRun.made == []


def test_a_folder_that_holds_a_run_of_another_seed_is_not_gone_on_with(capsys):
    write_down(RunFolder(Path("all/seed-2")), "seed=0")
    assert train.main(["--seeds", "1-2", "--resume", "auto", "--run-dir", "all"]) == 2
    assert "all/seed-2 holds a run of seed 0: name another folder" in capsys.readouterr().err
    assert FakeRun.made == []


def test_seeds_of_other_settings_in_one_table_are_told_of(monkeypatch, caplog):
    def during(folder):
        number = len(FakeRun.made)
        write_down(
            folder, f"seed={number}", f"algorithm.lr={number}e-3", "bind.data=tcp://127.0.0.1:7"
        )
        folder.write_json("summary.json", {**WHOLE, "seed": number})

    monkeypatch.setattr(FakeRun, "during", staticmethod(during))
    assert train.main(["--seeds", "1-2"]) == 0
    assert "the seeds do not have the same settings: algorithm.lr" in caplog.messages


@pytest.mark.parametrize(
    ("summary", "settings"),
    [
        ({"exit_reason": "terminated", "updates": 9}, ["stop.updates=9"]),
        ({"exit_reason": "wall_s"}, ["stop.wall_s=5"]),
    ],
)
def test_seeds_that_are_over_are_passed_over(summary, settings, monkeypatch, capsys):
    folder = RunFolder(Path("all/seed-1"))
    write_down(folder, "seed=1", *settings)
    folder.write_json("summary.json", {**WHOLE, **summary})

    def during(folder):
        write_down(folder, "seed=2", *settings)
        folder.write_json("summary.json", {**WHOLE, "seed": 2})

    monkeypatch.setattr(FakeRun, "during", staticmethod(during))
    sets = [word for each in settings for word in ("--set", each)]
    auto = ["--seeds", "1-2", "--resume", "auto", "--run-dir", "all", *sets]
    assert train.main(auto) == 0
    assert [run.run_dir for run in FakeRun.made] == [Path("all/seed-2")]
    assert "the run is over: " in capsys.readouterr().out


MINE = ("stop.updates=9",)


@pytest.mark.parametrize("cut", ["before it began", "in its midst"])
def test_seeds_that_were_cut_short_say_the_command_that_goes_on(cut, monkeypatch, caplog, capsys):
    def during(folder):
        if len(FakeRun.made) == 1:
            write_down(folder, *MINE, "seed=0", config="cartpole_ppo")
            folder.write_json("summary.json", {**WHOLE, "exit_reason": "updates", "updates": 9})
            return
        FakeRun.code = 130
        if cut == "in its midst":
            write_down(folder, *MINE, "seed=1", config="cartpole_ppo")
            folder.write_json("summary.json", {**WHOLE, "exit_reason": "interrupted"})

    monkeypatch.setattr(FakeRun, "code", 0)
    monkeypatch.setattr(FakeRun, "during", staticmethod(during))
    flags = ["--run-dir", "my runs", "--config", "cartpole_ppo", "--set", "stop.updates=9"]
    assert train.main(["--seeds", "0-3", *flags]) == 130
    told, _, line = caplog.messages[-1].partition(": ")
    assert told == "to go on with the seeds that are left"
    capsys.readouterr()
    FakeRun.made.clear()

    def again(folder):
        if not folder.exists():
            write_down(folder, *MINE, f"seed={folder.path.name[-1]}", config="cartpole_ppo")
        folder.write_json("summary.json", {**WHOLE, "exit_reason": "updates", "updates": 9})

    monkeypatch.setattr(FakeRun, "code", 0)
    monkeypatch.setattr(FakeRun, "during", staticmethod(again))
    assert train.main(shlex.split(line)[3:]) == 0
    assert [run.run_dir.name for run in FakeRun.made] == ["seed-1", "seed-2", "seed-3"]
    assert {run.settings["stop.updates"] for run in FakeRun.made} == {"9"}
    # The first one is told of once more, in a table of all.
    said = capsys.readouterr().out
    assert "the run is over: stop.updates is 9, and it came to 9" in said
    assert re.search(r"(?m)^mean +4\d\d +", said)
    assert said.count("updates  475") == 4


@pytest.mark.parametrize("code", [0, 130])
def test_seeds_with_nothing_left_or_nothing_begun_advise_nothing(code, monkeypatch, caplog):
    def during(folder):
        if code == 0:
            write_down(folder)
            folder.write_json("summary.json", WHOLE)

    monkeypatch.setattr(FakeRun, "during", staticmethod(during))
    monkeypatch.setattr(FakeRun, "code", code)
    assert train.main(["--seeds", "0,5"]) == code
    assert caplog.messages == []


def test_a_full_disk_behind_the_output_ends_seeds_as_an_error_of_one_line(
    monkeypatch, caplog, capfd
):
    with open("/dev/full", "w") as full:

        def during(folder):
            write_down(folder)
            folder.write_json("summary.json", WHOLE)
            monkeypatch.setattr("sys.stdout", full)

        monkeypatch.setattr(FakeRun, "during", staticmethod(during))
        assert train.main(["--seeds", "0-1", "--run-dir", "all"]) == 75
    said = capfd.readouterr().err
    assert "Traceback" not in said
    assert re.search(r"(?m)^error: .*No space left on device$", said)
    assert caplog.messages[-1].endswith("--seeds 0,1 --run-dir all --resume auto")


def test_seeds_that_go_on_want_a_folder(capsys):
    assert train.main(["--seeds", "1-2", "--resume", "auto"]) == 2
    assert "--resume auto needs --run-dir, the folder of all seeds" in capsys.readouterr().err


def test_seeds_are_refused_where_they_are_not_what_is_asked_for(capsys):
    write_down(RunFolder(Path("all/seed-2")))
    for flags, says in (
        (["--resume"], "--seeds: wants no single run to resume and no recording: say --resume au"),
        (["--record", "x"], "--seeds: wants no single run to resume and no recording"),
        (["--set", "seed=3"], "--set: seed=3: --seeds names the seeds: drop either"),
        ([], "all/seed-2 already holds a run"),
        (["--run-dir", "all/seed-2"], "all/seed-2 already holds a run: name another folder"),
    ):
        where = [] if flags[:1] == ["--run-dir"] else ["--run-dir", "all"]
        assert train.main(["--seeds", "1-2", *where, *flags]) == 2
        assert says in capsys.readouterr().err
    assert FakeRun.made == []


def test_wrong_settings_start_nothing(capsys):
    for flags in (["--set", "seed=-1"], ["--resume"]):
        assert train.main(flags) == 2
        assert "error: " in capsys.readouterr().err
    assert FakeRun.made == []


def begin(*overrides):
    """Write down what a learner writes at its start, before it has a port."""
    write_down(RunFolder(Path("here")), *overrides)


def write_down(folder, *overrides, config="cartpole"):
    folder.begin(load_config(packaged_configs()[config], overrides))
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


def test_a_death_behind_a_checkpoint_has_lost_less(ends, monkeypatch, caplog):
    def during(folder):
        write_down(folder)
        (folder.checkpoints / "ckpt-1-5").mkdir()

    ends(137, during)
    monkeypatch.setattr(FakeRun, "has_begun", True)
    started("--run-dir", "here", code=137)
    assert "; what it trained since its last checkpoint is lost; to go on: " in caplog.text
