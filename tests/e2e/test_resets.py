"""A network that resets every connection a few times a second. The leases are longer than a test:
what waits for one does not end in time."""

import hashlib
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.e2e.harness import Door, Site, identities_hold, site
from tests.proxy import HOST, LEARNER_HOST, Proxy, proxy

pytestmark = pytest.mark.e2e

RESET_EVERY_S = 0.3
TERMS = ("stop.mean_return=none", "stop.env_steps=40000", "learner.lease_s=60")
LOCKSTEP = ("pace.mode=lockstep", "train.num_actors=1", "learner.batch_columns=8")


@contextmanager
def training(opened: Site, num_actors: int, *settings: str) -> Iterator[tuple[Door, Proxy]]:
    """A learner, and actors that reach it over that network and no shorter way."""
    with tempfile.TemporaryDirectory(dir="/tmp") as runtime:
        learner = opened.learner(
            *TERMS, *settings, config="configs/cartpole.toml", XDG_RUNTIME_DIR=runtime
        )
        (nonce,) = Path(runtime).glob("*/nonce")
        nonce.unlink()
        urls = opened.service["data_url"], opened.service["weights_url"]
        with proxy(*urls, every_s=RESET_EVERY_S) as network:
            for _ in range(num_actors):
                opened.open("actor", "--learner", urls[0].replace(LEARNER_HOST, HOST))
            yield learner, network


def weights_of(run_dir: Path) -> str:
    (newest,) = sorted((run_dir / "checkpoints").glob("ckpt-1-*"))[-1:]
    return hashlib.sha256((newest / "model.safetensors").read_bytes()).hexdigest()


def test_training_goes_on_and_every_step_counts_once(site: Site) -> None:
    with training(site, 2) as (learner, network):
        assert learner.wait_exit(50) == 0, learner.log
    assert network.num_resets > 3
    assert all(identities_hold(report) for report in site.reports())
    summary, last = site.read("summary.json"), site.reports()[-1]
    assert summary is not None
    assert summary["env_steps_trained"] >= 40_000
    assert last["trajectories/rejected"] == last["rejected/duplicate"]


def test_lockstep_comes_to_the_same_bits(tmp_path: Path) -> None:
    with ExitStack() as stack:
        calm, restless = (stack.enter_context(site(tmp_path / name)) for name in ("a", "b"))
        for each in (calm, restless):
            each.folder.mkdir()
        direct = calm.learner(*TERMS, *LOCKSTEP, config="configs/cartpole.toml")
        calm.actor()
        learner, network = stack.enter_context(training(restless, 1, *LOCKSTEP))
        assert direct.wait_exit(50) == learner.wait_exit(50) == 0
        assert network.num_resets > 3
    assert weights_of(restless.run_dir) == weights_of(calm.run_dir)
