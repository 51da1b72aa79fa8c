"""Several seeds behind the train door: which are trained, and what is told at their end."""

import json
import os
import re
import shlex
import signal
from pathlib import Path

import pytest

from impala_async import train
from impala_async.config.packaged import packaged_configs
from impala_async.config.ranks import Place
from impala_async.runs.folder import RunFolder
from tests.fake_run import FakeRun, write_down

WHOLE = {
    "exit_reason": "mean_return",
    "env_steps_trained": 123456,
    "env_id": "E",
    "mean_return": 475.0,
    "best_eval_return": None,
    "run_s": 1.5,
    "seed": 0,
}

pytestmark = pytest.mark.usefixtures("fake_run")


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
    monkeypatch.setattr("impala_async.runs.seed_runs.place_in", lambda: Place(1, 2, 1))
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
    for change in ({"exit_reason": None}, {"seed": "x"}, {"mean_return": "x"}, {"run_s": None}):
        folder.write_json("summary.json", {**WHOLE, **change})
        assert train.main(auto) == 2
        (name,) = change
        assert f"error: all/seed-2/summary.json: {name} is odd: " in capsys.readouterr().err
    assert FakeRun.made == []


@pytest.mark.parametrize("reason", ["interrupted", "updates"])
@pytest.mark.parametrize("number", [None, signal.SIGTERM])
def test_a_seed_that_was_ended_before_it_went_on_is_not_over(
    number, reason, monkeypatch, caplog, capsys
):
    """The summary there is of an earlier start."""
    write_down(folder := RunFolder(Path("all/seed-1")), "seed=1", "stop.updates=9")
    folder.write_json("summary.json", {**WHOLE, "exit_reason": reason, "updates": 3})

    def during(folder):
        FakeRun.made[-1].heard += [number] if number else []

    monkeypatch.setattr(FakeRun, "during", staticmethod(during))
    auto = ["--seeds", "1-2", "--resume", "auto", "--run-dir", "all"]
    assert train.main(auto) == (0 if number else 2)
    assert len(FakeRun.made) == 1
    assert "mean" not in capsys.readouterr().out.partition("best evaluation")[2]
    assert caplog.messages[-1].startswith("to go on with the seeds that are left")


def test_a_seed_that_had_its_time_goes_on_with_more(monkeypatch, capsys):
    write_down(folder := RunFolder(Path("all/seed-1")), "seed=1", "stop.wall_s=5")
    folder.write_json("summary.json", {**WHOLE, "exit_reason": "wall_s"})
    auto = ["--seeds", "1", "--resume", "auto", "--run-dir", "all", "--set"]
    assert train.main([*auto, "stop.wall_s=4"]) == 0
    assert "it had the 5 seconds of stop.wall_s, and goes on with more" in capsys.readouterr().out
    assert not FakeRun.made
    for more in ("6", "none"):
        monkeypatch.setattr(
            FakeRun,
            "during",
            staticmethod(lambda f: f.write_json("summary.json", {**WHOLE, "wall_s": 2.0})),
        )
        folder.write_json("summary.json", {**WHOLE, "exit_reason": "wall_s"})
        FakeRun.made.clear()
        assert train.main([*auto, f"stop.wall_s={more}"]) == 0
        assert len(FakeRun.made) == 1


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


def test_a_seed_that_was_ended_behind_its_goal_counts_in_the_means(monkeypatch, capsys):
    write_down(folder := RunFolder(Path("all/seed-1")), "seed=1", "stop.updates=9")
    folder.write_json("summary.json", {**WHOLE, "exit_reason": "terminated", "updates": 9})

    def during(folder):
        write_down(folder, "seed=2", "stop.updates=9")
        folder.write_json("summary.json", {**WHOLE, "seed": 2, "mean_return": 25.0})

    monkeypatch.setattr(FakeRun, "during", staticmethod(during))
    assert train.main(["--seeds", "1-2", "--resume", "auto", "--run-dir", "all"]) == 0
    assert re.search(r"(?m)^mean +250 ", capsys.readouterr().out)


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


@pytest.mark.parametrize("output", ["a full disk", "nobody"])
def test_what_the_output_does_not_take_ends_no_seeds(output, monkeypatch, capfd):
    """A single run ends as it would, too."""

    def during(folder):
        write_down(folder, f"seed={len(FakeRun.made) - 1}")
        folder.write_json("summary.json", {**WHOLE, "seed": len(FakeRun.made) - 1})

    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr(FakeRun, "during", staticmethod(during))
    with open("/dev/full" if output == "a full disk" else writer, "w") as stdout:
        monkeypatch.setattr("sys.stdout", stdout)
        assert train.main(["--seeds", "0-1", "--run-dir", "all"]) == 0
    assert len(FakeRun.made) == 2
    assert "Traceback" not in capfd.readouterr().err


def test_without_an_end_a_seed_has_none_after_it(capsys):
    endless = ["--set", "env.id=CartPole-v1", "--run-dir", "all"]
    assert train.main([*endless, "--seeds", "3,4"]) == 2
    said = capsys.readouterr().err
    assert "--seeds: seed 3 would never end for the next to begin: say --set stop.env_ste" in said
    assert train.main([*endless, "--seeds", "3"]) != 2


def test_seeds_that_go_on_want_a_folder(capsys):
    assert train.main(["--seeds", "1-2", "--resume", "auto"]) == 2
    assert "--resume auto needs --run-dir, the folder of all seeds" in capsys.readouterr().err


def test_seeds_are_refused_where_they_are_not_what_is_asked_for(capsys):
    write_down(RunFolder(Path("all/seed-2")))
    for flags, says in (
        (["--resume"], "--seeds: wants no single run to resume and no recording: say --resume au"),
        (["--record", "x"], "--seeds: wants no single run to resume and no recording"),
        (["--set", "seed=3"], "--set: seed: --seeds names the seeds: drop either"),
        ([], "all/seed-2 already holds a run: go on with it by --resume auto"),
        (["--run-dir", "all/seed-2"], "all/seed-2 already holds a run: name another folder"),
    ):
        where = [] if flags[:1] == ["--run-dir"] else ["--run-dir", "all"]
        assert train.main(["--seeds", "1-2", *where, *flags]) == 2
        assert says in capsys.readouterr().err
    assert FakeRun.made == []
