"""The door: which checkpoint plays, what is told of it, and what is wrong."""

import ctypes
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box

from bench.probes import ActionReward, Counting
from impala_async.config.model import ModelSection
from impala_async.config.policies import ONE_POLICY, PoliciesSection
from impala_async.config.run import EnvSection, RunConfig
from impala_async.evaluate import main
from impala_async.evaluation.play import build_players
from impala_async.runs.folder import RunFolder
from impala_async.training.checkpoint import save_checkpoint
from impala_async.weights import Version
from tests.envs.test_batch import Odd
from tests.evaluation.test_video import Drawn, greys

PROBES = "bench.probes"


# -------------------- runs and checkpoints


def begin(tmp_path, env, *, policies=ONE_POLICY, kwargs=None, **model):
    """A new run with these settings, and its policy, of which there is a checkpoint."""
    model = ModelSection(hidden_sizes=(4,), **model)
    config = RunConfig(env=EnvSection(id=env), model=model, policies=policies)
    envs, policy = build_players(config, 1)
    envs.close()
    folder = RunFolder(tmp_path / "run")
    section = EnvSection(id=env, kwargs=kwargs or {})
    folder.begin(config.model_copy(update={"env": section}))
    save(folder, policy)
    return folder, policy


def save(folder, policy, update=1):
    tensors = {"model": policy.named_tensors()}
    state = {"env_steps_trained": 32 * update}
    return save_checkpoint(folder.checkpoints, Version(1, update), tensors, state)


@pytest.fixture
def run(tmp_path):
    """A run of an environment that rewards action 1; its policy prefers that, but not at first."""
    folder, policy = begin(tmp_path, f"{PROBES}:ActionReward")
    for update, bias in ((10, [9.0, -9.0]), (20, [-9.0, 9.0])):
        with torch.no_grad():
            policy.model.policy_head.bias.copy_(torch.tensor(bias))
        save(folder, policy, update)
    return folder


def says_one_error(said, text):
    lines = said.splitlines()
    return len(lines) == 1 and lines[0].startswith("error: ") and text in lines[0]


@pytest.mark.parametrize(
    ("num_agents", "asked", "played"),
    [(1, 10, 10), (1, 1, 1), (1, 9, 10), (3, 20, 63)],
)
def test_each_agent_plays_as_many_as_are_asked_for_or_a_few_more(
    tmp_path, capsys, num_agents, asked, played
):
    kwargs = {"lengths": [1, 2, 4][:num_agents]}
    run, _ = begin(tmp_path, "tests.envs.test_agents:Lives", kwargs=kwargs)
    assert main([str(run.path), *(["--episodes", str(asked)] if asked != 10 else [])]) == 0
    plural = "s" * (played != 1)
    assert f"mean return of {played} greedy episode{plural}: " in capsys.readouterr().out


def test_a_recurrent_checkpoint_plays_with_the_threads_of_an_actor(tmp_path, capsys):
    model = {"core": "lstm", "core_size": 5, "normalize_obs": True}
    run, _ = begin(tmp_path, f"{PROBES}:Counting", **model)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert main([str(run.path), "--episodes", "3"]) == 0
        assert torch.get_num_threads() == run.load_config().actor.threads == 1
    finally:
        torch.set_num_threads(before)
    assert "mean return of 3 greedy episodes" in capsys.readouterr().out


def test_the_newest_checkpoint_plays_or_the_one_that_is_named(run, capsys, monkeypatch):
    for path, checkpoint, mean in (
        (run.path, "ckpt-1-20", "1.00"),
        (run.checkpoints, "ckpt-1-20", "1.00"),
        (run.checkpoints / "ckpt-1-10", "ckpt-1-10", "0.00"),
    ):
        monkeypatch.chdir(path)
        for named in (str(path), "."):
            assert main([named, "--episodes", "5"]) == 0
            said = capsys.readouterr().out
            assert f"{PROBES}:ActionReward with {checkpoint}\n" in said
            assert f"mean return of 5 greedy episodes: {mean}\n" in said
            assert f"smallest {mean}, largest {mean}" in said


def test_one_json_object_tells_of_all_that_was_played(run, capsys):
    assert main([str(run.path), "--episodes", "3", "--seeds", "4,0-1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["env_id"] == f"{PROBES}:ActionReward"
    assert found["checkpoint"] == str(run.checkpoints.resolve() / "ckpt-1-20")
    assert (found["updates"], found["env_steps_trained"]) == (20, 640)
    assert (found["actions"], found["video"]) == ("greedy", None)
    assert (found["mean_return"], found["standard_error"]) == (1.0, 0.0)
    assert [row["seed"] for row in found["rows"]] == [4, 0, 1, None]
    assert [(each["seed"], each["return"]) for each in found["episodes"]] == [
        (seed, 1.0) for seed in (4, 0, 1) for _ in range(3)
    ]


class Chatty(Counting):
    """Prints, as a library in C does too."""

    def reset(self, **how):
        print("from Python")
        os.write(1, b"from C\n")
        ctypes.CDLL(None).puts(b"by stdio")
        return super().reset(**how)


def test_an_environment_that_prints_leaves_stdout_to_the_object(tmp_path, capfd):
    run, _ = begin(tmp_path, f"{__name__}:Chatty", kwargs={"length": 2})
    assert main([str(run.path), "--episodes", "1"]) == 0
    assert "from C\n" in capfd.readouterr().out
    assert main([str(run.path), "--episodes", "1", "--json"]) == 0
    # Until the process ends, as simulators print then, too.
    print("at the end", flush=True)
    os.write(1, b"at the end\n")
    out, err = capfd.readouterr()
    assert json.loads(out)["episodes"][0]["length"] == 2
    assert {*err.splitlines()} == {"from Python", "from C", "by stdio", "at the end"}


def test_sampled_actions_are_those_of_the_policy_and_the_same_again(run, capsys):
    with torch.no_grad():
        _, policy = begin(run.path.parent / "other", f"{PROBES}:ActionReward")
        policy.model.policy_head.bias.zero_()
    save(run, policy, 30)
    told = []
    for flags in (["--sampled"], ["--sampled"], ["--sampled", "--seeds", "2"], ["--greedy"]):
        assert main([str(run.path), "--episodes", "40", *flags]) == 0
        told.append(re.search(r"40 (\w+) episodes: ([\d.]+)", capsys.readouterr().out).groups())
    (kind, first), again, other, (usual, greedy) = told
    assert (kind, usual) == ("sampled", "greedy")
    assert again[1] == first != other[1]
    assert 0.1 < float(first) < 0.9
    assert greedy in ("0.00", "1.00")


class Moving(Drawn):
    """Works in a folder of its own."""

    def reset(self, **how):
        os.chdir("/")
        return super().reset(**how)


def test_a_film_lies_where_it_was_wanted_though_the_current_folder_changes(
    tmp_path, capsys, monkeypatch
):
    run, _ = begin(tmp_path, f"{__name__}:Moving", kwargs={"length": 4})
    monkeypatch.chdir(tmp_path)
    assert main([str(run.path), "--episodes", "1", "--video", "film.gif"]) == 0
    assert capsys.readouterr().out.endswith(f"\nvideo: {tmp_path}/film.gif (4 steps)\n")
    assert (tmp_path / "film.gif").is_file()


def test_a_film_of_an_episode_lies_where_it_was_wanted(tmp_path, capsys):
    run, _ = begin(tmp_path, "tests.evaluation.test_video:Drawn", kwargs={"length": 4})
    path = tmp_path / "film.gif"
    assert main([str(run.path), "--episodes", "1", "--video", str(path)]) == 0
    assert capsys.readouterr().out.endswith(f"\nvideo: {path} (4 steps)\n")
    assert [grey for grey, _ in greys(path)] == [0, 40, 80, 120, 160]


def test_a_film_is_made_though_nobody_reads_what_is_said(tmp_path, monkeypatch):
    run, _ = begin(tmp_path, "tests.evaluation.test_video:Drawn", kwargs={"length": 4})
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as stdout:
        monkeypatch.setattr("sys.stdout", stdout)
        assert main([str(run.path), "--episodes", "1", "--video", str(tmp_path / "film.gif")]) == 0
    assert (tmp_path / "film.gif").exists()


@pytest.mark.parametrize(
    ("env", "kwargs", "says"),
    [
        (f"{PROBES}:ActionReward", None, "ActionReward failed to be made with kwargs {'render_"),
        (
            f"{PROBES}:CountingVector",
            {},
            "CountingVector makes a whole vector of",
        ),
        ("tests.evaluation.test_video:Drawn", {"picture": None}, "Drawn: --video: wants a pict"),
    ],
)
def test_an_environment_that_draws_nothing_is_told_in_a_line(env, kwargs, says, tmp_path, capsys):
    run, _ = begin(tmp_path, env, kwargs=kwargs)
    assert main([str(run.path), "--video", str(tmp_path / "film.gif")]) == 2
    assert says_one_error(capsys.readouterr().err, says)
    assert not [*tmp_path.glob("*film*")]


def test_a_result_that_the_disk_does_not_take_is_no_success(run, capsys, monkeypatch):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        assert main([str(run.path)]) == 75
    assert "No space left on device (standard output)" in capsys.readouterr().err


def read_until(file, end):
    text = ""
    while not text.endswith(end):
        text += os.read(file.fileno(), 1 << 16).decode()
    return text


def test_a_result_waits_for_its_reader_though_stdout_does_not(run):
    """As some parents make it; what is played here is more than a pipe holds."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    many = ["--episodes", "1000", "--json"]
    command = [sys.executable, "-u", "-m", "impala_async.evaluate", str(run.path), *many]
    with subprocess.Popen(command, stdout=writer) as process:
        kept = os.dup(writer)
        os.close(writer)
        with os.fdopen(reader) as result:
            select.select([result], [], [])
            time.sleep(0.3)  # it would be cut off by then
            found = json.JSONDecoder().raw_decode(read_until(result, "\n}\n"))[0]
    assert len(found["episodes"]) >= 1000
    assert process.returncode == 0
    assert not os.get_blocking(kept), "it is as the parent has made it"
    os.close(kept)


def test_a_damaged_newest_one_falls_back_to_the_older(run, capsys, caplog):
    damaged = run.checkpoints / "ckpt-1-20"
    with (damaged / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")
    assert main([str(run.path)]) == 0
    assert "mean return of 10 greedy episodes: 0.00" in capsys.readouterr().out
    assert "skipping a damaged checkpoint" in caplog.text
    # Named by itself, it is not passed over.
    assert main([str(damaged)]) == 2
    assert "is not what its manifest says" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [[], ["--sampled"]])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_policy_that_comes_to_nan_gives_no_result(flags, tmp_path, capsys):
    run, policy = begin(tmp_path, f"{PROBES}:ActionReward")
    with torch.no_grad():
        # Finite as they are, all logits are infinite.
        for layer in (*policy.model.policy_torso.layers, policy.model.policy_head):
            layer.weight.fill_(3e38)
            layer.bias.fill_(3e38)
    save(run, policy, 2)
    assert main([str(run.path), *flags]) == 2
    said = capsys.readouterr()
    assert "mean return" not in said.out
    assert says_one_error(said.err, "the policy comes to NaN: are its weights")


def test_an_environment_without_an_end_is_given_up(run, capsys):
    # Its episodes have one step each, and a row between two of them is none.
    assert main([str(run.path), "--episodes", "24", "--max-steps", "1"]) == 0
    folder, _ = begin(run.path.parent / "longer", f"{PROBES}:Counting")
    assert main([str(folder.path), "--episodes", "1", "--max-steps", "3"]) == 0
    assert main([str(folder.path), "--episodes", "1", "--max-steps", "2"]) == 2
    assert main([str(folder.path), "--episodes", "24", "--max-steps", "2"]) == 2
    said = capsys.readouterr().err
    assert "16 of 24 episodes ended within 6 steps: give it a time limit, or allow" in said


class Unclosed(ActionReward):
    """Cannot be closed once it has been played."""

    has_stepped = False

    def step(self, action):
        self.has_stepped = True
        return super().step(action)

    def close(self):
        if self.has_stepped:
            raise ValueError("still open")


def test_a_close_that_fails_takes_no_result_with_it(tmp_path, capfd):
    run, _ = begin(tmp_path, f"{__name__}:Unclosed")
    assert main([str(run.path), "--json"]) == 0
    said = capfd.readouterr()
    assert len(json.loads(said.out)["episodes"]) >= 10
    assert said.err.startswith("warning: ")
    assert "Unclosed failed in close: ValueError: still open" in said.err


class Hushed(ActionReward):
    """Wants nobody to hear it."""

    def __init__(self, how=""):
        super().__init__()
        if how == "closes its own":
            sys.stdout.close()
        elif how.startswith("loses"):
            os.closerange(3, 64)
            if how == "loses and opens":
                self.files = [os.open(os.devnull, os.O_WRONLY) for _ in range(16)]
            if how == "loses and fails":
                raise ValueError("the true reason")
        elif how:
            silence = open(os.devnull, "w")  # noqa: SIM115
            if how == "redirects":
                os.dup2(silence.fileno(), 1)
            else:
                sys.stdout = silence


@pytest.mark.parametrize("how", ["replaces", "redirects", "closes its own"])
def test_an_environment_that_silences_stdout_silences_no_result(how, tmp_path):
    run, _ = begin(tmp_path, f"{__name__}:Hushed", kwargs={"how": how})
    command = [sys.executable, "-m", "impala_async.evaluate", str(run.path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=40)
    assert (done.returncode, "mean return of 10 greedy" in done.stdout) == (0, True), done.stderr


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("loses and opens", "stdout is lost: the environment closed what is not its own"),
        ("loses and fails", "the true reason"),
    ],
)
def test_an_environment_that_loses_stdout_is_told_of(how, says, tmp_path):
    run, _ = begin(tmp_path, f"{__name__}:Hushed", kwargs={"how": how})
    command = [sys.executable, "-m", "impala_async.evaluate", str(run.path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=40)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr


class Unclosing(ActionReward):
    """Does not come back from its close."""

    def __init__(self, how=""):
        super().__init__()
        self._how = how
        if how:
            sys.modules["__main__"].CLOSE_S = 0.1

    def close(self):
        if self._how:
            print("printed while it closes", flush=True)
        if self._how == "exits":
            os._exit(0)
        if self._how == "crashes":
            ctypes.string_at(0)
        while self._how:
            time.sleep(1)


@pytest.mark.parametrize("flags", [[], ["--json"]])
@pytest.mark.parametrize(("how", "code"), [("hangs", 0), ("exits", 0), ("crashes", -11)])
def test_a_close_without_an_end_takes_no_result_with_it(how, code, flags, tmp_path, forks):
    run, _ = begin(tmp_path, f"{__name__}:Unclosing", kwargs={"how": how})
    command = [sys.executable, "-m", "impala_async.evaluate", str(run.path), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=40)
    assert done.returncode == code
    if flags:
        assert len(json.loads(done.stdout)["episodes"]) >= 10
    else:
        assert "mean return" in done.stdout
    assert how != "hangs" or "in close, and is left so: there is a result" in done.stderr


def test_a_close_without_an_end_holds_up_no_error(tmp_path, forks):
    run, _ = begin(tmp_path, f"{__name__}:Unclosing", kwargs={"how": "hangs"})
    film = ["--video", str(tmp_path / "film.gif")]
    command = [sys.executable, "-m", "impala_async.evaluate", str(run.path), *film]
    done = subprocess.run(command, capture_output=True, text=True, timeout=40)
    assert done.returncode == 70
    assert re.search("in close, after this: (Config|Env)Error: .*render", done.stderr)


class Broken(Odd):
    """Gives this in one place of its second step."""

    def __init__(self, place=1, value=None):
        super().__init__(Box(-1, 1, (1,)), np.zeros(1, np.float32), value, 2, 3, place)
        if value == "widen":
            torch.set_default_dtype(torch.float64)

    def step(self, action):
        if self._age == 1 and self._then == "exit":
            sys.exit(0)
        if self._age == 1 and self._then == "interrupt":
            raise KeyboardInterrupt
        if self._age == 1 and self._then == "signal":
            os.kill(os.getpid(), self._place)
        while self._age == 1 and self._then == "stay":
            with suppress(BaseException):
                os.write(2, b"stay\n")
                signal.pause()
        return super().step(action)

    def close(self):
        if self._then == "signal":
            os.kill(os.getpid(), self._place)  # its echo


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"value": None}, "reward in step: wants a number, got None (NoneType)"),
        ({"value": float("nan")}, "step gave a reward that is not finite: nan"),
        ({"place": 0, "value": [float("inf")]}, "step gave an observation that is not finite"),
        ({"place": 2, "value": "False"}, "terminated in step: wants True or False, got 'False'"),
        ({"place": 0, "value": [1.0, 2.0]}, "observation in step: the space promises shape (1,)"),
        ({"value": "exit"}, "failed in step: SystemExit: 0"),
        ({"value": "interrupt"}, "failed in step: KeyboardInterrupt"),
        ({"value": "widen"}, ":Broken has called torch.set_default_dtype"),
    ],
)
def test_an_environment_that_breaks_in_a_later_step_is_no_mean(kwargs, says, tmp_path, capsys):
    run, _ = begin(tmp_path, f"{__name__}:Broken", kwargs=kwargs)
    try:
        assert main([str(run.path)]) == 2
    finally:
        torch.set_default_dtype(torch.float32)
    captured = capsys.readouterr()
    assert "mean" not in captured.out
    assert says_one_error(captured.err, f"{__name__}:Broken")
    assert says in captured.err


@pytest.mark.parametrize(
    ("number", "code", "word"),
    [(signal.SIGINT, 130, "interrupted\n"), (signal.SIGTERM, 75, "terminated\n")],
)
def test_a_signal_ends_it_with_a_word_while_it_plays(number, code, word, tmp_path, capsys):
    kwargs = {"value": "signal", "place": int(number)}
    run, _ = begin(tmp_path, f"{__name__}:Broken", kwargs=kwargs)
    assert main([str(run.path)]) == code
    captured = capsys.readouterr()
    assert captured.err == word
    assert "mean" not in captured.out


def test_a_second_signal_ends_it_where_its_environment_does_not_come_back(tmp_path, forks):
    run, _ = begin(tmp_path, f"{__name__}:Broken", kwargs={"value": "stay"})
    command = [sys.executable, "-m", "impala_async.evaluate", str(run.path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        try:
            for number in (signal.SIGTERM, signal.SIGINT):
                assert b"stay\n" in iter(process.stderr.readline, b"")
                process.send_signal(number)
            assert process.wait(20) == 130
        finally:
            process.kill()


def test_what_cannot_be_played_is_told(run, tmp_path, capsys):
    (run.path / "actors" / "checkpoints").mkdir(parents=True)
    (run.checkpoints / "note").touch()
    RunFolder(tmp_path / "empty").begin(run.load_config())
    other = ModelSection(hidden_sizes=(5,))
    envs, policy = build_players(run.load_config().model_copy(update={"model": other}), 1)
    envs.close()
    save(run, policy)
    for path, flags, says in (
        ("run/checkpoints/ckpt-1-1", [], "ckpt-1-1 does not fit"),
        ("empty", [], "holds no whole checkpoint yet"),
        ("empty/checkpoints", [], "holds no whole checkpoint yet"),
        ("none", [], "there is no such folder"),
        (300 * "n", [], "there is no such folder"),  # it cannot even be looked for
        (".", [], "wants the folder of a run, its checkpoints or its best, or one of"),
        ("run/config.json", [], "wants the folder of a run"),
        ("run/actors", [], "wants the folder of a run"),
        ("run/actors/checkpoints", [], "wants the folder of a run"),
        ("run/checkpoints/note", [], "is not a checkpoint"),
        ("run", ["--episodes", "0"], "--episodes: wants a whole number from 1 up, got 0"),
        ("run", ["--video", "film.avi"], "--video: wants a name that ends in .gif or .mp4, got f"),
        ("run", ["--video", "none/film.gif"], "--video: none/film.gif: there is no such folder"),
        ("run", ["--max-steps", "0"], "--max-steps: wants a whole number from 1 up, got 0"),
    ):
        assert main([str(tmp_path / path), *flags]) == 2
        assert says_one_error(capsys.readouterr().err, says)


def in_order(agents, rng):
    return dict(zip(agents, ("main", "other"), strict=True))


def test_each_policy_of_a_team_is_told_of(tmp_path, capsys):
    policies = PoliciesSection(names=("main", "other"), mapping="tests.test_evaluate:in_order")
    lives = {"policies": policies, "kwargs": {"lengths": [1, 3]}}
    run, team = begin(tmp_path, "tests.envs.test_agents:Lives", **lives, core="gru", core_size=3)
    for member, bias in (("main", [9.0, -9.0]), ("other", [-9.0, 9.0])):
        with torch.no_grad():
            team.members[member].model.policy_head.bias.copy_(torch.tensor(bias))
    save(run, team, 2)
    assert main([str(run.path), "--episodes", "4"]) == 0
    said = capsys.readouterr().out
    # Rewards are the step's number, and 10 more for action 1.
    assert "main: mean return of 4 greedy episodes: 1.00" in said
    assert "other: mean return of 4 greedy episodes: 36.0" in said
