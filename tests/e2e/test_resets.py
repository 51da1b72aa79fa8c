"""A network that resets every connection a few times a second. The leases are longer than a test:
who waits for one does not end in time."""

import tempfile
from pathlib import Path

import pytest

from tests.e2e.harness import CARTPOLE, Site, identities_hold
from tests.proxy import HOST, LEARNER_HOST, proxy

pytestmark = pytest.mark.e2e

RESET_EVERY_S = 0.3
TERMS = ("stop.mean_return=none", "stop.env_steps=40000", "learner.lease_s=60")


def test_training_goes_on_and_every_step_counts_once(site: Site) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as runtime:
        learner = site.learner(*TERMS, config=CARTPOLE, XDG_RUNTIME_DIR=runtime)
        # The actors have no shorter way than over that network.
        (nonce,) = Path(runtime).glob("*/nonce")
        nonce.unlink()
        urls = site.service["data_url"], site.service["weights_url"]
        with proxy(*urls, every_s=RESET_EVERY_S) as network:
            for _ in range(2):
                site.open("actor", "--learner", urls[0].replace(LEARNER_HOST, HOST))
            assert learner.wait_exit(50) == 0, learner.log
    assert network.num_resets > 3
    assert all(identities_hold(report) for report in site.reports())
    last = site.reports()[-1]
    assert site.summary["env_steps_trained"] >= 40_000
    assert last["trajectories/rejected"] == last["rejected/duplicate"]
