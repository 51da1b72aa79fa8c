"""The launch door, up to where an engine takes over."""

import re
from pathlib import Path

import pytest

from impala_async.config.load import load_config
from impala_async.launch import __main__ as door
from impala_async.runs.folder import RunFolder
from tests.test_doors import ROOT

CARTPOLE = ROOT / "configs/cartpole.toml"
RUN = ("--config", str(CARTPOLE))


def test_a_job_is_shown_where_there_is_no_slurm_and_nothing_is_written(capsys, tmp_path):
    flags = ("--set", "stop.updates=3", "--nodes", "4", "--actors", "2", "--print")
    assert door.main(["slurm", *RUN, *flags, "--run-dir", "mine", "--", "-p", "gpu"]) == 0
    script = capsys.readouterr().out
    for words in (
        "#SBATCH --nodes=4\n",
        "#SBATCH -p gpu\n",
        f"run={tmp_path}/mine\n",
        '-m impala_async actors --learner "$run" --num 2 &\n',
        f"--config {ROOT}/configs/cartpole.toml \\\n    --set stop.updates=3 \\\n",
        "--set 'bind.data=tcp://0.0.0.0:*' \\\n    --set 'bind.weights=tcp://0.0.0.0:*'\ndo\n",
    ):
        assert words in script
    assert not (tmp_path / "mine").exists()


def test_ports_of_the_settings_are_kept(capsys):
    flags = ("--set", "bind.data=tcp://10.0.0.1:7000", "--print")
    assert door.main(["slurm", *RUN, *flags]) == 0
    script = capsys.readouterr().out
    assert script.count("bind.data") == script.count("bind.weights") == 1
    assert "--set 'bind.weights=tcp://0.0.0.0:*'\ndo\n" in script


def test_a_run_that_only_its_own_host_could_reach_is_open_to_all(capsys):
    folder = RunFolder(Path("run"))
    own = [f"bind.{key}=tcp://127.0.0.1:*" for key in ("data", "weights")]
    folder.begin(load_config(CARTPOLE, own))
    folder.let_go()
    assert door.main(["slurm", *RUN, "--run-dir", "run", "--print"]) == 0
    script = capsys.readouterr().out
    assert script.count("tcp://0.0.0.0:*") == 2
    flags = ["--set", own[0], "--print"]
    assert door.main(["slurm", *RUN, "--run-dir", "run", *flags]) == 0
    script = capsys.readouterr().out
    assert (script.count("tcp://0.0.0.0:*"), script.count("tcp://127.0.0.1:*")) == (1, 1)


def test_the_settings_of_a_run_are_those_of_another_one_but_for_where_it_was(capsys):
    """Nobody had set an address there, or `train` had, which lets nobody else in; or it is open."""
    for name, overrides in (
        ("by-learner", ()),
        ("by-train", [f"bind.{key}=tcp://127.0.0.1:*" for key in ("data", "weights")]),
        ("open", [f"bind.{key}=tcp://10.0.0.1:*" for key in ("data", "weights")]),
    ):
        folder = RunFolder(Path(name))
        folder.begin(load_config(CARTPOLE, overrides))
        folder.let_go()
        assert door.main(["slurm", "--config", f"{name}/config.json", "--print"]) == 0
        assert capsys.readouterr().out.count("tcp://0.0.0.0:*") == 2 * (name != "open")


@pytest.mark.parametrize(
    "own",
    ["bind.data =tcp://127.0.0.1:7001", 'bind={data="tcp://127.0.0.1:7001"}'],
)
def test_a_port_that_is_set_in_another_form_is_kept_too(own, capsys):
    folder = RunFolder(Path("run"))
    folder.begin(load_config(CARTPOLE))
    folder.let_go()
    assert door.main(["slurm", *RUN, "--run-dir", "run", "--set", own, "--print"]) == 0
    assert "bind.data=tcp://0.0.0.0" not in capsys.readouterr().out


def test_a_run_that_another_job_works_at_gets_one_more_and_one_that_is_over_none(capsys):
    folder = RunFolder(Path("run"))
    config = load_config(CARTPOLE, ["stop.updates=10"])
    folder.begin(config)
    flags = ["slurm", "--config", str(CARTPOLE), "--set", "stop.updates=10", "--run-dir", "run"]
    assert door.main([*flags, "--print"]) == 0
    assert "learner --resume auto" in capsys.readouterr().out
    folder.write_json("summary.json", {"updates": 10, "exit_reason": "updates"})
    assert door.main([*flags, "--print"]) == 0
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("the run is over: stop.updates is 10, ")
    folder.let_go()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["slurm", *RUN, "--nodes", "0"], "--nodes: wants a whole number from 1 to 1024, got"),
        (["slurm", *RUN, "--actors", "0"], "--actors: wants a whole number from 1 to 1024"),
        (
            ["slurm", *RUN],
            "there is no sbatch here, which submits jobs: use --print to see this one",
        ),
        (["slurm", "--print"], "config: env.id: required (for example --set env.id="),
        (["ray", *RUN, "--", "-p"], "launch ray: takes no flags behind --, got -p"),
    ],
)
def test_what_is_wrong_is_one_line(flags, says, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nowhere")
    assert door.main(flags) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {says}")
    assert said.count("\n") == 1


RUN_FLAGS = {"--config", "--set", "--run-dir", "--actors", "-h", "--help"}
FLAGS = {"slurm": RUN_FLAGS | {"--nodes", "--print"}, "ray": RUN_FLAGS}


@pytest.mark.parametrize("engine", FLAGS)
def test_flags_of_engines_are_frozen(engine, capsys):
    with pytest.raises(SystemExit, match="0"):
        door.main([engine, "--help"])
    _, _, options = capsys.readouterr().out.partition("options:")
    options = options.partition("for example")[0]
    assert {*re.findall(r"(?<![\w-])-{1,2}[a-z][a-z-]*", options)} == FLAGS[engine]


@pytest.mark.parametrize("flags", [[], ["mpi"], ["ray", "--nodes", "2"], ["slurm", "--resume"]])
def test_flags_that_an_engine_does_not_have_are_refused(flags, capsys):
    with pytest.raises(SystemExit, match="2"):
        door.main(flags)
    assert "error: " in capsys.readouterr().err


def test_in_lockstep_as_many_actors_are_started_as_are_waited_for(capsys):
    flags = [*RUN, "--set", "pace.mode=lockstep", "--print"]
    assert door.main(["slurm", *flags]) == 0
    assert door.main(["slurm", *flags, "--nodes", "2"]) == 2
    assert "train.num_actors (1): in lockstep the learner waits" in capsys.readouterr().err
