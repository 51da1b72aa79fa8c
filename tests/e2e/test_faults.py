"""Actors come, die and return; the learner carries on and says what it sees."""

import signal
import time

import pytest

from tests.e2e.harness import Site, cpu_share, identities_hold, wait_until

pytestmark = pytest.mark.e2e

CARTPOLE = "configs/cartpole.toml"
ENDLESS = ("stop.mean_return=none", "stop.env_steps=none")
QUICK_LEASE = ("learner.lease_s=2",)


def test_actors_are_killed_added_stopped_and_come_back(site: Site) -> None:
    learner = site.learner(*ENDLESS, *QUICK_LEASE, config=CARTPOLE)
    actors = [site.actor() for _ in range(3)]
    site.wait_report("three actors", lambda r: r["num_actors"] == 3 and r["updates"] > 10)

    actors[0].signal(signal.SIGKILL)
    after = site.wait_report("the lease of the dead ends", lambda r: r["num_actors"] == 2)
    assert after["sessions/expired"] == 1
    assert after["credit/granted_columns"] <= 16
    goes_on = site.wait_report("more updates", lambda r: r["updates"] > after["updates"] + 50)
    assert goes_on["learner/starved_since_s"] is None

    late = [site.actor() for _ in range(2)]
    for actor in late:
        wait_until("the actor has imported", lambda a=actor: "environments of" in a.log)
    imported_at = time.monotonic()
    site.wait_report("four actors", lambda r: r["num_actors"] == 4)
    assert time.monotonic() - imported_at < 2.0

    running = [*actors[1:], *late]
    num_onsets = learner.log.count("learner starved")
    for actor in running:
        actor.signal(signal.SIGSTOP)
    starved = site.wait_report("starvation", lambda r: r["learner/starved_since_s"] is not None)
    assert starved["bottleneck"].startswith("actors") or "no batch" in starved["bottleneck"]
    site.wait_report("all leases end", lambda r: r["num_actors"] == 0)
    assert cpu_share(learner.process, over_s=3.0) < 0.02
    assert learner.log.count("learner starved") == num_onsets + 1

    for actor in running:
        actor.signal(signal.SIGCONT)
    back = site.wait_report(
        "training goes on", lambda r: r["num_actors"] == 4 and r["env_steps_per_s"] > 0
    )
    assert back["updates"] > starved["updates"]
    assert learner.log.count("no longer starved") == num_onsets + 1

    learner.signal(signal.SIGTERM)
    assert learner.wait_exit(10) == 0
    assert all(identities_hold(report) for report in site.reports())
    assert site.reports()[-1]["trajectories/in_slots"] == 0


def test_the_learner_is_killed_and_resumed_under_the_same_actors(site: Site) -> None:
    settings = (*ENDLESS, *QUICK_LEASE, "checkpoint.every_s=0.5")
    learner = site.learner(*settings, config=CARTPOLE)
    actors = [site.actor() for _ in range(2)]
    site.wait_report("a while of training", lambda r: r["updates"] > 100)
    checkpoints = site.run_dir / "checkpoints"
    wait_until("a checkpoint", lambda: len(list(checkpoints.glob("ckpt-1-*"))) >= 2)

    learner.signal(signal.SIGKILL)
    learner.wait_exit()
    saved = max(int(path.name.split("-")[2]) for path in checkpoints.glob("ckpt-1-*"))
    resumed = site.learner(*site.same_ports, resume=True)
    first = site.wait_report("both actors are back", lambda r: r["num_actors"] == 2, 30)
    assert all(actor.process.poll() is None for actor in actors)
    assert first["weights/version_epoch"] == 2
    assert first["updates"] >= saved
    more = site.wait_report("training", lambda r: r["updates"] > saved + 100)
    # What was settled before the checkpoint and would come again is refused, not trained twice.
    assert more["env_steps_trained"] >= first["env_steps_trained"]
    assert more["time_s"] > first["time_s"]

    resumed.signal(signal.SIGTERM)
    assert resumed.wait_exit(10) == 0
    assert all(identities_hold(report) for report in site.reports())
    for actor in actors:
        actor.signal(signal.SIGTERM)
        assert actor.wait_exit(10) == 0


@pytest.mark.slow
def test_actors_of_this_host_wait_for_no_lease_when_a_killed_learner_resumes(site: Site) -> None:
    """Its sockets lie in another folder then; the lease is longer than the test."""
    patient = ("learner.lease_s=60", "checkpoint.every_s=0.5")
    learner = site.learner(*ENDLESS, *patient, config=CARTPOLE)
    for _ in range(2):
        site.actor()
    site.wait_report("two actors", lambda r: r["num_actors"] == 2 and r["updates"] > 10)
    wait_until("a checkpoint", lambda: list((site.run_dir / "checkpoints").glob("ckpt-1-*")))
    learner.signal(signal.SIGKILL)
    learner.wait_exit()
    site.learner(*site.same_ports, resume=True)
    bound_at = time.monotonic()
    first = site.wait_report("both are back", lambda r: r["num_actors"] == 2)
    site.wait_report("training", lambda r: r["updates"] > first["updates"])
    assert time.monotonic() - bound_at < 30.0


def test_first_interrupt_saves_and_exits_130(site: Site) -> None:
    learner = site.learner(*ENDLESS, config=CARTPOLE)
    actor = site.actor()
    site.wait_report("training", lambda r: r["updates"] > 5)
    learner.signal(signal.SIGINT)
    assert learner.wait_exit(30) == 130
    assert f"learning curve: {site.run_dir}/learning_curve.png" in learner.log
    summary = site.read("summary.json")
    assert summary is not None
    assert summary["exit_reason"] == "interrupted"
    assert list((site.run_dir / "checkpoints").glob("ckpt-1-*"))
    actor.signal(signal.SIGINT)
    assert actor.wait_exit(10) == 130
