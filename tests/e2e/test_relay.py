"""Actors behind a relay: they train, their weights are fetched once, and it may be killed."""

import hashlib
import re
import signal
from pathlib import Path

import pytest

from impala_async.launch.local import free_ports
from tests.e2e.harness import Door, Site, identities_hold, site, wait_until

pytestmark = pytest.mark.e2e

CARTPOLE = "configs/cartpole.toml"
QUICK_LEASE = ("learner.lease_s=2", "learner.heartbeat_s=0.5")
ENDLESS = ("stop.mean_return=none", "stop.env_steps=none")
SHORT = ("stop.mean_return=none", "stop.env_steps=8000")


def open_relay(site: Site, port: int | None = None) -> tuple[Door, str]:
    """A relay to the learner of a site, and where it listens."""
    bind = f"tcp://127.0.0.1:{port or '*'}"
    relay = site.open("relay", "--learner", site.service["data_url"], "--bind", bind)
    said = wait_until(
        "the relay listens", lambda: re.search(r"--learner (tcp://\S+)", relay.log), 20
    )
    return relay, said[1]


def status_of(relay: Door) -> dict[str, int]:
    """What it said last."""
    *_, line = re.findall(r"\d+ actors; messages: .*", relay.log)
    return {name: int(number) for number, name in re.findall(r"(\d+) (\w+)", line)}


def test_two_actors_train_and_weights_are_fetched_once_for_both(site: Site) -> None:
    learner = site.learner(*ENDLESS, config=CARTPOLE)
    relay, url = open_relay(site)
    actors = [site.open("actor", "--learner", url) for _ in range(2)]
    both = site.wait_report("two actors", lambda r: r["num_actors"] == 2, 30)
    enough = both["env_steps_trained"] + 8000
    site.wait_report("training", lambda r: r["env_steps_trained"] > enough, 30)
    for actor in actors:
        actor.signal(signal.SIGTERM)
        assert actor.wait_exit(10) == 0
    gone = site.wait_report("goodbyes", lambda r: r["num_actors"] == 0)
    assert gone["sessions/closed"] == 2
    learner.signal(signal.SIGTERM)
    assert learner.wait_exit(10) == 0
    relay.signal(signal.SIGTERM)
    assert relay.wait_exit(10) == 0
    status, last = status_of(relay), site.reports()[-1]
    assert all(identities_hold(report) for report in site.reports())
    assert (status["bad"], status["lost"]) == (0, 0)
    assert 0 < status["fetched"] < status["served"]
    # What came over the network is what the learner sent.
    assert status["fetched"] == last["weights/served"]


def test_a_killed_relay_comes_back_and_nothing_is_lost(site: Site) -> None:
    learner = site.learner(*ENDLESS, *QUICK_LEASE, config=CARTPOLE)
    (port,) = free_ports(1)
    relay, url = open_relay(site, port)
    actors = [site.open("actor", "--learner", url) for _ in range(2)]
    site.wait_report("training", lambda r: r["num_actors"] == 2 and r["updates"] > 50, 30)
    relay.signal(signal.SIGKILL)
    relay.wait_exit()
    site.wait_report("both sessions end", lambda r: r["num_actors"] == 0)
    again, _ = open_relay(site, port)
    before = site.wait_report("both are back", lambda r: r["num_actors"] == 2, 30)
    after = site.wait_report("training", lambda r: r["updates"] > before["updates"] + 50, 30)
    assert after["rejected/invalid"] == after["rejected/nonfinite"] == 0

    actors[0].signal(signal.SIGKILL)
    # Its connection to the learner is closed with its own to the relay.
    site.wait_report("the learner notices", lambda r: r["num_actors"] == 1)
    learner.signal(signal.SIGTERM)
    assert learner.wait_exit(10) == 0
    assert all(identities_hold(report) for report in site.reports())
    again.signal(signal.SIGINT)
    assert again.wait_exit(10) == 130


def test_a_killed_learner_is_found_again_through_the_relay(site: Site) -> None:
    data, weights = free_ports(2)
    ports = f"bind.data=tcp://127.0.0.1:{data}", f"bind.weights=tcp://127.0.0.1:{weights}"
    settings = (*ENDLESS, *QUICK_LEASE, "checkpoint.every_s=0.5")
    learner = site.learner(*settings, *ports, config=CARTPOLE)
    _, url = open_relay(site)
    actors = [site.open("actor", "--learner", url) for _ in range(2)]
    checkpoints = site.run_dir / "checkpoints"
    wait_until("a checkpoint", lambda: len(list(checkpoints.glob("ckpt-1-*"))) >= 2, 30)
    learner.signal(signal.SIGKILL)
    learner.wait_exit()
    resumed = site.learner(resume=True)
    first = site.wait_report("both are back", lambda r: r["num_actors"] == 2, 30)
    assert first["weights/version_epoch"] == 2
    more = site.wait_report("training", lambda r: r["updates"] > first["updates"] + 100, 30)
    # The weights that the relay held are those of another start.
    assert more["rejected/dead_branch"] <= first["rejected/dead_branch"] + 16
    assert all(actor.process.poll() is None for actor in actors)
    resumed.signal(signal.SIGTERM)
    assert resumed.wait_exit(10) == 0
    assert all(identities_hold(report) for report in site.reports())


def model_of(site: Site) -> str:
    """A digest of the last weights that a run has saved."""
    newest = max(
        (site.run_dir / "checkpoints").glob("ckpt-*"),
        key=lambda path: [int(number) for number in path.name.split("-")[1:]],
    )
    return hashlib.sha256((newest / "model.safetensors").read_bytes()).hexdigest()


def test_lockstep_comes_to_the_same_bits(tmp_path: Path) -> None:
    models = []
    for name in ("direct", "relayed"):
        folder = tmp_path / name
        folder.mkdir()
        with site(folder) as run:
            # With a lag more than one version is kept, of which none may be passed over.
            pace = ("pace.mode=lockstep", "pace.lag=1")
            learner = run.learner(*SHORT, *pace, config=CARTPOLE)
            url = run.service["data_url"] if name == "direct" else open_relay(run)[1]
            actors = [run.open("actor", "--learner", url) for _ in range(2)]
            assert learner.wait_exit(60) == 0, learner.log
            # The learner's goodbye reaches them too.
            assert [actor.wait_exit(10) for actor in actors] == [0, 0]
            assert run.reports()[-1]["env_steps_trained"] >= 8000
            models.append(model_of(run))
    assert models[0] == models[1]
