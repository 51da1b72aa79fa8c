"""A network that resets every connection a few times a second. The leases are longer than a test:
what waits for one does not end in time."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.harness import Door, Site, identities_hold
from tests.proxy import HOST, LEARNER_HOST, Proxy, proxy

pytestmark = pytest.mark.e2e

RESET_EVERY_S = 0.3
TERMS = ("stop.mean_return=none", "stop.env_steps=40000", "learner.lease_s=60")


@contextmanager
def training(opened: Site, num_actors: int) -> Iterator[tuple[Door, Proxy]]:
    """A learner, and actors that reach it over that network and no shorter way."""
    with tempfile.TemporaryDirectory(dir="/tmp") as runtime:
        learner = opened.learner(*TERMS, config="configs/cartpole.toml", XDG_RUNTIME_DIR=runtime)
        (nonce,) = Path(runtime).glob("*/nonce")
        nonce.unlink()
        urls = opened.service["data_url"], opened.service["weights_url"]
        with proxy(*urls, every_s=RESET_EVERY_S) as network:
            for _ in range(num_actors):
                opened.open("actor", "--learner", urls[0].replace(LEARNER_HOST, HOST))
            yield learner, network


def test_training_goes_on_and_every_step_counts_once(site: Site) -> None:
    with training(site, 2) as (learner, network):
        assert learner.wait_exit(50) == 0, learner.log
    assert network.num_resets > 3
    assert all(identities_hold(report) for report in site.reports())
    summary, last = site.read("summary.json"), site.reports()[-1]
    assert summary is not None
    assert summary["env_steps_trained"] >= 40_000
    assert last["trajectories/rejected"] == last["rejected/duplicate"]
