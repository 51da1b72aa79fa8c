"""The learning suite: its environments are what they say, its verdicts follow from the outcomes."""

import json
from dataclasses import replace

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from bench.learning import __main__ as door
from bench.learning import envs
from bench.learning.cases import CASES, Case
from bench.learning.table import is_held, measured, write
from bench.learning.train import Outcome, read, train
from bench.learning.trials import return_at_the_end
from bench.one_run import CONFIGS
from impala_async.config.load import load_config

PASSED = Outcome(0, 12.5, 1000, 3.0, 2, True)
MISSED = Outcome(1, 12.5, 1000, 3.0, 2, False)
CASE = Case("CartPole, briefly", "cartpole.toml", 475, 3_000)


@pytest.mark.filterwarnings("ignore")
def test_environments_are_sound():
    for env in (
        *(envs.no_velocities(), envs.split_pole(), envs.split_pole(withhold=True)),
        *(envs.RepeatPrevious(), envs.FewLegal(is_masked=False), envs.TwoPoles()),
        *(envs.pole_in_bytes(), envs.pole_in_int64(), envs.as_flags("Taxi-v4")),
    ):
        check_env(env, skip_render_check=True)


def test_environments_reward_what_they_say():
    env = envs.RepeatPrevious(delay=2, length=10)
    shown, total = [env.reset(seed=1)[0]], 0.0
    for n in range(10):
        answer = np.argmax(shown[n - 2]) if n >= 2 else 0
        obs, reward, terminated, _, _ = env.step(np.int64(answer))
        shown.append(obs)
        total += float(reward)
    assert terminated
    assert total == pytest.approx(1.0)
    poles, _ = envs.TwoPoles().reset(seed=0)
    assert not np.array_equal(poles[:4], poles[4:])
    # An illegal action ends the episode, or the run where it was masked.
    env = envs.FewLegal(is_masked=False)
    obs, _ = env.reset(seed=0)
    assert obs.keys() == {"light"}
    illegal = next(action for action in range(8) if action not in env._legal)
    assert env.step(np.int64(illegal))[1:3] == (0.0, True)
    masked = envs.FewLegal()
    obs, _ = masked.reset(seed=0)
    with pytest.raises(AssertionError, match="not legal"):
        masked.step(np.int64(np.argmin(obs["action_mask"])))


def test_settings_beside_those_of_a_case_are_for_no_page(monkeypatch, tmp_path, capsys):
    trained = []

    def note(case, seed, folder):
        trained.append((case.overrides[-1], seed))
        return replace(PASSED, seed=seed)

    monkeypatch.setattr(door, "train", note)
    flags = ["bench.learning", "--only", "Acrobot", "--seeds", "2", "--set", "actor.num_envs=32"]
    monkeypatch.setattr("sys.argv", flags)
    assert door.main() == 0
    assert trained == [("actor.num_envs=32", 0), ("actor.num_envs=32", 1)]
    monkeypatch.setattr("sys.argv", [*flags, "--write", str(tmp_path)])
    with pytest.raises(SystemExit):
        door.main()
    assert "--set changes the cases" in capsys.readouterr().err


def test_a_floor_is_held_by_as_many_seeds_as_it_says():
    for case in CASES:
        load_config(CONFIGS / case.config if case.config else None, case.overrides)
        assert 0 < case.num_must <= case.num_seeds, case.name
    two_of_three = Case("x", "cartpole.toml", 1, 1, num_seeds=3, num_must=2)
    assert is_held(two_of_three, [PASSED, MISSED, PASSED])
    assert not is_held(two_of_three, [PASSED, MISSED, MISSED])
    # Fewer seeds: as many in proportion, one at least.
    assert not is_held(two_of_three, [MISSED])


def test_a_row_that_is_measured_again_leaves_the_others_as_they_are(tmp_path):
    first, second = CASES[:2]
    assert measured(tmp_path, CASE) == []
    write(tmp_path, second, [PASSED] * second.num_seeds, "a command")
    write(tmp_path, first, [MISSED] * first.num_seeds, "another")
    write(tmp_path, first, [MISSED, PASSED], "a third")
    entries = json.loads((tmp_path / "learning.json").read_text())
    assert [entry["task"] for entry in entries] == [first.name, second.name]
    assert [entry["command"] for entry in entries] == ["a third", "a command"]
    assert [entry["held"] for entry in entries] == [False, True]
    page = (tmp_path / "learning.md").read_text()
    assert page.count("| 1 of 2 **missed** |") == page.count("| 10 of 10 |") == 1
    # Seeds that were there before keep the name of their commit.
    entries[0]["commit"] = "a and b"
    (tmp_path / "learning.json").write_text(json.dumps(entries))
    write(tmp_path, first, [MISSED, PASSED, PASSED], "a fourth")
    (more, _) = json.loads((tmp_path / "learning.json").read_text())
    assert more["commit"].startswith("a and b and ")
    assert (more["torch"], more["cores"]) == (entries[0]["torch"], entries[0]["cores"])
    write(tmp_path, first, [MISSED, PASSED], "a fifth")
    # Seeds are kept while their settings are those of today.
    assert measured(tmp_path, first) == [MISSED, PASSED]
    others = (
        {"goal": 1},
        {"overrides": ("seed=1",)},
        {"num_ranks": 2},
        {"trial": return_at_the_end},
    )
    for other in (CASE, *(replace(first, **what) for what in others)):
        assert measured(tmp_path, other) == []


@pytest.mark.e2e
def test_a_case_is_trained_through_the_door_of_users(tmp_path, forks):
    task = train(CASE, 3, tmp_path / "task")
    assert not task.has_passed
    assert task.env_steps >= 3_000
    run = tmp_path / "task" / "run"
    assert read(CASE.without("nothing", goal=475), 3, run, 1.0).has_passed
    # A trial's score of it is what counts, where there is one.
    case = replace(CASE, goal=0.5, trial={run: 0.5}.get)
    outcome = read(case, 3, run, 1.0)
    assert (outcome.best_return, outcome.has_passed) == (0.5, True)
    more = replace(case, goal=0.6)
    assert not read(more, 3, run, 1.0).has_passed
    assert read(replace(more, is_control=True), 3, run, 1.0).has_passed


def test_only_a_task_without_a_trial_ends_at_its_goal(tmp_path, monkeypatch):
    ends = []

    def launch(config, settings, *more):
        ends.extend(part for part in settings if "stop.mean_return" in part)
        raise RuntimeError("exit code 1")

    monkeypatch.setattr("bench.learning.train.OneRun", launch)
    for kind in ({}, {"is_control": True}, {"trial": return_at_the_end}):
        with pytest.raises(RuntimeError, match="exit code 1"):
            train(replace(CASE, **kind), 3, tmp_path / str(len(ends)))
    assert ends == ["stop.mean_return=475", "stop.mean_return=none", "stop.mean_return=none"]
    (tmp_path / "summary.json").write_text('{"mean_return_100": 9.3}')
    assert return_at_the_end(tmp_path) == 9.3
