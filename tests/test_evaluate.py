"""Greedy episodes, of each column the same number, and their means."""

import itertools
import os
import signal
import subprocess
import sys
from contextlib import suppress

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete

from bench.probes import Counting
from impala_async.config.model import ModelSection
from impala_async.config.policies import ONE_POLICY, PoliciesSection
from impala_async.config.run import EnvSection, RunConfig
from impala_async.envs.agents import AgentEnvs
from impala_async.envs.make import build_envs
from impala_async.envs.vector import SerialEnvs
from impala_async.evaluate import _play_greedily, build_players, main
from impala_async.policy import Action
from impala_async.runs.folder import RunFolder
from impala_async.training.checkpoint import save_checkpoint
from impala_async.weights import Version
from tests.envs.test_agents import Lives
from tests.envs.test_batch import Odd

PROBES = "bench.probes"


class Remembering:
    """Chooses action 1 in a column as long as it remembers as many steps as the episode has had.

    `Counting` gives 10 more for it. So a memory that is lost, or kept too long, shows in returns.
    """

    members = {"": None}  # noqa: RUF012

    def first_state(self, num_columns):
        return {"sum": np.zeros((num_columns, 1), np.float32)}

    def act(self, obs, state):
        is_right = state["sum"][:, 0] == obs[""][:, 2]
        return Action({"": is_right.astype(np.int32)}, None, {"sum": state["sum"] + 1})


def returns_of(envs, per_column):
    played = _play_greedily(Remembering(), envs, per_column, seed=0)
    assert {policy for policy, _ in played} == {0}
    envs.close()
    return sorted(total for _, total in played)


def counted(length):
    """The return of `length` steps of `Counting` with action 1: each its number, and 10 more."""
    return sum(step + 10 for step in range(1, length + 1))


# -------------------- episodes


@pytest.mark.parametrize("autoreset", ["NextStep", "SameStep"])
@pytest.mark.parametrize("ends", ["terminated", "truncated", "both"])
def test_returns_are_those_of_the_episodes_which_know_nothing_of_each_other(autoreset, ends):
    lengths = (1, 3, 5)
    kwargs = {"lengths": lengths, "autoreset": autoreset, "ends": ends}
    section = EnvSection(id=f"{PROBES}:CountingVector", kwargs=kwargs)
    # As many of each: short episodes are not favoured.
    expected = [counted(length) for length in lengths for _ in range(4)]
    assert returns_of(build_envs("vector", section, 3), 4) == expected
    serial = build_envs("serial", EnvSection(id=f"{PROBES}:Counting", kwargs={"length": 4}), 2)
    assert returns_of(serial, 2) == [counted(4)] * 4
    agents = AgentEnvs([Lives(lengths) for _ in range(2)])
    assert returns_of(agents, 2) == expected


def test_a_key_called_policy_means_nothing_where_there_is_one():
    class Named(gym.wrappers.TransformObservation):
        def __init__(self):
            shown = Dict({"": Box(-9, 9, (3,)), "policy": Discrete(9)})
            super().__init__(Counting(2), lambda obs: {"": obs, "policy": 7}, shown)

    assert returns_of(SerialEnvs([Named()]), 4) == [counted(2)] * 4


def test_a_long_play_says_how_far_it_is(capfd):
    envs = SerialEnvs([Counting(2), Counting(2)])
    # Each look at the clock, one per step, is a second later.
    seconds = itertools.count()
    _play_greedily(Remembering(), envs, 6, seed=0, clock=lambda: float(next(seconds)))
    out, err = capfd.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "playing: 2 of 12 episodes after 3 s, mean return 23.0",
        "playing: 8 of 12 episodes after 13 s, mean return 23.0",
    ]


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
    return save_checkpoint(folder.checkpoints, Version(1, update), tensors, {})


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
    assert f"mean return of {played} greedy episodes" in capsys.readouterr().out


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


def test_a_result_that_the_disk_does_not_take_is_no_success(run, capsys, monkeypatch):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        assert main([str(run.path)]) == 75
    assert "No space left on device" in capsys.readouterr().err


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


def test_an_environment_without_an_end_is_given_up(run, capsys):
    # Three episodes of one step and a reset row each take five steps.
    for max_steps, code in (("5", 0), ("4", 2)):
        assert main([str(run.path), "--episodes", "24", "--max-steps", max_steps]) == code
    assert "16 of 24 episodes ended within 4 steps" in capsys.readouterr().err


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
    [(signal.SIGINT, 130, "interrupted\n"), (signal.SIGTERM, 0, "terminated\n")],
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
        (".", [], "wants the folder of a run, its checkpoints, or one of them"),
        ("run/config.json", [], "wants the folder of a run"),
        ("run/actors", [], "wants the folder of a run"),
        ("run/actors/checkpoints", [], "wants the folder of a run"),
        ("run/checkpoints/note", [], "is not a checkpoint"),
        ("run", ["--episodes", "0"], "--episodes: wants a whole number from 1 up, got 0"),
        ("run", ["--seed", "-1"], "--seed: wants a whole number from 0 up, got -1"),
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
