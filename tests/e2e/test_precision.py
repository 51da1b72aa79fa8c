"""What torsos round to bfloat16 anyway travels in it, to actors that take it."""

import signal

import pytest

from tests.e2e.harness import Site, identities_hold

pytestmark = pytest.mark.e2e

ENDLESS = ("stop.mean_return=none", "stop.env_steps=none")
# A torso of 4, 64 and 64 for the policy and one for the value; two actions, a value.
TORSO_NUMBERS = 2 * (4 * 64 + 64 + 64 * 64 + 64)
HEAD_NUMBERS = 64 * 2 + 2 + 64 + 1


def test_a_learner_in_bfloat16_sends_half_the_bytes(site: Site) -> None:
    learner = site.learner("model.precision=bfloat16", *ENDLESS, config="configs/cartpole.toml")
    actor = site.actor()
    report = site.wait_report("training", lambda r: r["updates"] > 50, 30)
    assert report["weights/served"] > 1
    assert report["weights/bytes"] == report["weights/served"] * (
        2 * TORSO_NUMBERS + 4 * HEAD_NUMBERS
    )
    assert identities_hold(report)
    assert report["trajectories/rejected"] == 0
    for door in (actor, learner):
        door.signal(signal.SIGTERM)
        assert door.wait_exit(10) == 0
