"""A team over real processes: it plays, learns, is saved and resumed, and in lockstep is the same
to the last bit."""

from pathlib import Path

import psutil
import pytest
from safetensors import safe_open

from tests.e2e.harness import Door, Site, identities_hold, site
from tests.e2e.test_lockstep import disturbed, outcome

pytestmark = pytest.mark.e2e

SELF_PLAY = "configs/tictactoe_selfplay.toml"
HERE = str(Path(__file__).resolve().parents[2])
# Two actors of four games, and a column for each side.
LOCKSTEP = (
    *("pace.mode=lockstep", "actor.num_envs=4", "learner.batch_columns=16"),
    *("algorithm.name=appo", "learner.num_passes=2", "model.core=lstm", "model.core_size=16"),
    *("trajectory.rows=10", "policies.copy_every_updates=3", "stop.env_steps=4000"),
)


def train(opened: Site, *settings: str) -> Door:
    flags = ["--config", SELF_PLAY, "--run-dir", str(opened.run_dir)]
    flags += [part for setting in settings for part in ("--set", setting)]
    return opened.open("train", *flags, PYTHONPATH=HERE)


def test_a_team_is_trained_saved_and_evaluated(site: Site) -> None:
    door = train(site, "stop.env_steps=20000")
    assert door.wait_exit(90) == 0, door.log
    assert all(identities_hold(report) for report in site.reports())
    last = site.reports()[-1]
    assert last["trajectories/rejected"] == 0
    # One of two sides learns, and a row in seven or so is a reset: the others are masked.
    assert 0.35 < last["batch/valid_rows_mean"] / (32 * 20) < 0.5
    # Episodes are those of the side that learns.
    assert 5 <= last["episodes/length_mean"] <= 9
    (checkpoint,) = list((site.run_dir / "checkpoints").iterdir())
    with safe_open(checkpoint / "model.safetensors", framework="np") as file:
        owners = {name.partition("/")[0] for name in file.keys()}  # noqa: SIM118
    assert owners == {"main", "past"}
    told = site.open("evaluate", str(site.run_dir), "--episodes", "16", PYTHONPATH=HERE)
    assert told.wait_exit(60) == 0, told.log
    assert "main: mean return of 8 greedy episodes" in told.log
    assert "past: mean return of 8 greedy episodes" in told.log


@pytest.mark.slow
def test_a_resumed_team_goes_on_where_it_was(site: Site) -> None:
    settings = ("stop.env_steps=none", "checkpoint.every_s=0.5")
    learner = site.learner(*settings, config=SELF_PLAY, PYTHONPATH=HERE)
    for _ in range(2):
        site.actor(PYTHONPATH=HERE)
    before = site.wait_report("training", lambda r: r["updates"] > 20, 40)
    learner.signal(15)
    assert learner.wait_exit(10) == 0
    resumed = site.learner(resume=True, PYTHONPATH=HERE)
    refused = site.open(
        *("learner", "--run-dir", str(site.run_dir), "--resume"),
        *("--set", "policies.copy_every_updates=7"),
    )
    assert refused.wait_exit(20) == 2
    assert "policies.copy_every_updates: cannot change in a resumed run" in " ".join(
        refused.log.split()
    )
    for _ in range(2):
        site.actor(PYTHONPATH=HERE)
    more = site.wait_report("more", lambda r: r["updates"] > before["updates"] + 20, 40)
    assert more["trajectories/rejected"] == 0
    resumed.signal(15)
    assert resumed.wait_exit(10) == 0


def test_two_teams_in_lockstep_are_equal_to_the_last_bit(tmp_path: Path) -> None:
    with site(tmp_path / "first") as calm, site(tmp_path / "second") as restless:
        for each in (calm, restless):
            each.folder.mkdir()
        doors = [train(each, *LOCKSTEP) for each in (calm, restless)]
        with disturbed(psutil.Process(doors[1].process.pid)):
            for door in doors:
                assert door.wait_exit(100) == 0, door.log
        first, second = (outcome(each.run_dir) for each in (calm, restless))
    assert first == second
    assert first["updates"] > 40


def test_what_cannot_be_is_told_before_anything_starts(site: Site) -> None:
    for setting, text in {
        "env.id=CartPole-v1": "CartPole-v1 has a single agent",
        "policies.mapping=nowhere:deal": "policies.mapping: nowhere:deal",
        "policies.train=[]": "train must name each policy that learns",
    }.items():
        door = train(site, setting)
        assert door.wait_exit(60) == 2, (setting, door.log)
        assert text in " ".join(door.log.split()), setting
        assert not (site.run_dir / "checkpoints").exists(), setting
