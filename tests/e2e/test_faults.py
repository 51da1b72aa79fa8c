"""Actors come, die and return; the learner carries on and says what it sees."""

import signal
import tempfile
import time
from pathlib import Path

import pytest

from tests import matrix
from tests.e2e.harness import CARTPOLE, ENDLESS, QUICK_LEASE, identities_hold, use_of, wait_until
from tests.proxy import HOST, LEARNER_HOST, proxy

pytestmark = pytest.mark.e2e
LOCKSTEP = ("pace.mode=lockstep", "pace.lag=1", "train.num_actors=2", "actor.num_envs=8")


def test_actors_are_killed_added_stopped_and_come_back(site):
    learner = site.learner(*ENDLESS, *QUICK_LEASE, config=CARTPOLE)
    actors = [site.actor() for _ in range(3)]
    site.wait_report("three actors", lambda r: r["num_actors"] == 3 and r["updates"] > 10)

    actors[0].tell(signal.SIGKILL)
    after = site.wait_report("the lease of the dead ends", lambda r: r["num_actors"] == 2)
    assert after["sessions/expired"] >= 1
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
        actor.tell(signal.SIGSTOP)
    starved = site.wait_report("starvation", lambda r: r["learner/starved_since_s"] is not None)
    assert starved["bottleneck"].startswith("actors") or "no batch" in starved["bottleneck"]
    site.wait_report("all leases end", lambda r: r["num_actors"] == 0)
    share, wakes_per_s = use_of(learner.process, over_s=1.5)
    # A wait in small steps is seen by its wakes: what one of them takes differs by the machine.
    assert (share < 0.25, wakes_per_s < 100) == (True, True), (share, wakes_per_s)
    assert learner.log.count("learner starved") == num_onsets + 1

    for actor in running:
        actor.tell(signal.SIGCONT)
    back = site.wait_report(
        "training goes on", lambda r: r["num_actors"] == 4 and r["env_steps_per_s"] > 0
    )
    assert back["updates"] > starved["updates"]
    assert learner.log.count("no longer starved") == num_onsets + 1

    learner.ends()
    assert all(identities_hold(report) for report in site.reports())
    assert site.reports()[-1]["trajectories/in_slots"] == 0


# With the long lease: whoever waits for its end does not come back in time.
@pytest.mark.parametrize(
    "case", matrix.first_of(QUICK_LEASE, ("learner.lease_s=60",), (*QUICK_LEASE, *LOCKSTEP))
)
def test_a_learner_is_killed_and_resumed_under_the_same_actors(site, case):
    learner = site.learner(*ENDLESS, *case, "checkpoint.every_s=0.5", config=CARTPOLE)
    actors = [site.actor() for _ in range(2)]
    site.wait_report("both actors", lambda r: r["num_actors"] == 2 and r["updates"] > 10)
    wait_until("a checkpoint", lambda: len(site.checkpoints()) >= 2)

    learner.kill()
    saved = int(site.checkpoints()[-1].name.split("-")[2])
    resumed = site.learner(*site.same_ports, resume=True)
    first = site.wait_report("both actors are back", lambda r: r["num_actors"] == 2, 30)
    assert all(actor.process.poll() is None for actor in actors)
    assert first["weights/version_epoch"] == 2
    assert first["updates"] >= saved
    more = site.wait_report("training", lambda r: r["updates"] > saved + 50)
    # Data that was settled before the checkpoint and comes again is refused, not trained twice.
    assert more["env_steps_trained"] >= first["env_steps_trained"]
    assert more["time_s"] > first["time_s"]
    if LOCKSTEP[0] in case:
        assert more["trajectories/rejected"] == 0
        assert more["lag/quantiles"] == [1] * 5

    resumed.ends(signal.SIGINT, 130, within_s=30)
    assert f"learning curve: {site.run_dir}/learning_curve.png" in resumed.log
    assert site.summary["exit_reason"] == "interrupted"
    assert site.checkpoints()[-1].name == f"ckpt-2-{site.summary['updates']}"
    assert all(identities_hold(report) for report in site.reports())
    for actor, (number, code) in zip(
        actors, ((signal.SIGTERM, 0), (signal.SIGINT, 130)), strict=True
    ):
        actor.ends(number, code)


def test_over_a_network_that_resets_training_goes_on_and_every_step_counts_once(site):
    # The lease is longer than the test: who waits for one does not end in time.
    terms = ("stop.mean_return=none", "stop.env_steps=150000", "learner.lease_s=60")
    with tempfile.TemporaryDirectory(dir="/tmp") as runtime:
        learner = site.learner(*terms, config=CARTPOLE, XDG_RUNTIME_DIR=runtime)
        # The actors have no shorter way than over that network.
        (nonce,) = Path(runtime).glob("*/nonce")
        nonce.unlink()
        urls = site.service["data_url"], site.service["weights_url"]
        with proxy(*urls, every_s=0.3) as network:
            for _ in range(2):
                site.open("actor", "--learner", urls[0].replace(LEARNER_HOST, HOST))
            assert learner.wait_exit(50) == 0, learner.log
    assert network.num_resets > 3
    assert all(identities_hold(report) for report in site.reports())
    last = site.reports()[-1]
    assert site.summary["env_steps_trained"] >= 40_000
    assert last["trajectories/rejected"] == last["rejected/duplicate"]
