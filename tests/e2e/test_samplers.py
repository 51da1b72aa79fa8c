"""Env workers under real actors: learning with each sampler, faults, and ends."""

import re
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.e2e.harness import Door, Site, identities_hold, site, wait_until
from tests.e2e.test_lockstep import outcome

pytestmark = pytest.mark.e2e
SLOW = "env.id=bench.probes:Slow"


def train(opened: Site, *settings: str) -> Door:
    flags = [part for setting in settings for part in ("--set", setting)]
    door = opened.open("train", "--run-dir", str(opened.run_dir), *flags)
    assert door.wait_exit(90) == 0, door.log
    assert all(identities_hold(report) for report in opened.reports())
    return door


def workers_of(actor: Door) -> list[psutil.Process]:
    """The children that an actor has now."""
    try:
        return psutil.Process(actor.process.pid).children()
    except psutil.NoSuchProcess:
        return []


def test_a_policy_learns_whatever_steps_its_environments(site: Site) -> None:
    train(
        site,
        "env.id=bench.probes:MatchObservation",
        "actor.sampler=parallel",
        "actor.num_envs=4",
        "actor.num_workers=2",
        "train.num_actors=1",
        "trajectory.rows=20",
        "stop.mean_return=0.95",
        "stop.wall_s=60",
    )
    summary = site.read("summary.json")
    assert summary is not None
    assert summary["exit_reason"] == "mean_return"
    assert summary["rejected"] == 0


def test_auto_says_what_it_takes_and_what_it_measured(site: Site) -> None:
    train(site, SLOW, "env.kwargs.step_s=0.01", "train.num_actors=1", "stop.env_steps=400")
    log = (site.run_dir / "actors/actor-0.log").read_text()
    (told,) = re.findall(r"actor\.sampler auto takes (\w+); ms for a step of all 8 columns", log)
    assert told in ("serial", "parallel")
    assert "columns: serial " in log


def test_in_lockstep_auto_measures_nothing(site: Site) -> None:
    train(
        site,
        "env.id=CartPole-v1",
        "pace.mode=lockstep",
        "train.num_actors=1",
        "stop.env_steps=2000",
    )
    log = (site.run_dir / "actors/actor-0.log").read_text()
    assert "actor.sampler auto takes vector: lockstep measures nothing" in log


@pytest.mark.slow
def test_in_lockstep_a_run_is_the_same_whatever_steps_its_environments(tmp_path: Path) -> None:
    outcomes = []
    for sampler in ("serial", "parallel"):
        folder = tmp_path / sampler
        folder.mkdir()
        with site(folder) as opened:
            train(
                opened,
                "env.id=CartPole-v1",
                "pace.mode=lockstep",
                f"actor.sampler={sampler}",
                "actor.num_envs=6",
                "train.num_actors=2",
                "stop.env_steps=6000",
            )
            outcomes.append(outcome(opened.run_dir))
    assert outcomes[0] == outcomes[1]
    assert outcomes[0]["updates"] > 5


def test_a_killed_worker_ends_its_actor_with_a_word_and_its_siblings(site: Site) -> None:
    site.learner("env.id=CartPole-v1", "actor.sampler=parallel", "actor.num_workers=2")
    actor = site.actor()
    site.wait_report("it trains", lambda report: report["updates"] > 3)
    first, second = workers_of(actor)
    first.kill()
    assert actor.wait_exit() == 2, actor.log
    (error,) = [line for line in actor.log.splitlines() if line.startswith("error: ")]
    assert "the env worker of environments 0 to 3 of CartPole-v1 was killed (SIGKILL)" in error
    wait_until("its sibling is gone", lambda: not second.is_running())


def test_a_hanging_environment_holds_no_end_up(site: Site) -> None:
    site.learner(
        "env.id=tests.actor.worlds:Hanging",
        "env.kwargs={after=100}",
        "actor.sampler=parallel",
        "actor.num_workers=2",
    )
    actor = site.actor()
    site.wait_report("it trained", lambda report: report["updates"] > 0)
    workers = workers_of(actor)
    time.sleep(0.5)
    told_at = time.monotonic()
    actor.signal(signal.SIGTERM)
    assert actor.wait_exit() == 0, actor.log
    assert time.monotonic() - told_at < 4
    assert "Traceback" not in actor.log
    assert not any(worker.is_running() for worker in workers)


def test_workers_end_with_an_actor_that_is_killed(site: Site) -> None:
    site.learner("env.id=CartPole-v1", "actor.sampler=parallel", "actor.num_workers=2")
    actor = site.actor()
    site.wait_report("it trains", lambda report: report["updates"] > 3)
    workers = workers_of(actor)
    assert len(workers) == 2
    actor.process.kill()
    wait_until("its workers are gone", lambda: not any(w.is_running() for w in workers))
