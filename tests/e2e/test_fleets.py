"""Commands as an engine runs them, again and again: a run that is begun and goes on, and the actors
of a host."""

import secrets
import signal
import socket
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.e2e.harness import CARTPOLE, ENDLESS, given, is_alive, wait_until
from tests.proxy import HOST, LEARNER_HOST, proxy

pytestmark = pytest.mark.e2e

ANY_PORTS = ("bind.data=tcp://127.0.0.1:*", "bind.weights=tcp://127.0.0.1:*")
QUICK = ("env.id=CartPole-v1", "actor.sampler=serial", "train.num_actors=1")


def test_one_command_begins_a_run_goes_on_with_it_and_ends_where_it_is_over(site):
    config = site.folder / "run.toml"
    config.write_text("stop.updates = 30\nseed = 1\n")

    def start(door):
        flags = ["--run-dir", str(site.run_dir), "--config", str(config)]
        return site.open(door, "--resume", "auto", *flags, *given((*QUICK, *ANY_PORTS)))

    # It is killed as soon as there is a run, and when it has come far enough to save nothing yet.
    for name in ("config.json", "service.json"):
        door = start("learner")
        wait_until(f"there is a {name}", (site.run_dir / name).exists)
        door.kill()
    assert site.checkpoints() == []
    epochs = []
    for _ in range(2):
        door = start("train")
        assert door.wait_exit(60) == 0, door.log
        epochs.append((site.run_dir / "epoch").read_text())
    assert site.summary["exit_reason"] == "updates"
    assert epochs[0] == epochs[1]
    assert len(door.log.splitlines()) == 1
    assert door.log.startswith("the run is over: stop.updates is 30, and it came to ")
    config.write_text("stop.updates = 31\nseed = 1\n")
    door = start("learner")
    assert door.wait_exit(30) == 2
    assert "stop.updates (31 in the file, 30 in the run)" in door.log


def actors_of(door):
    """The actors that a door has started: an env worker or a watcher of it is none."""
    return [child for child in psutil.Process(door.process.pid).children() if is_alive(child)]


@pytest.mark.parametrize("where", ["url", "folder"])
def test_actors_of_a_host_are_back_after_a_kill_and_go_home_when_the_run_is_over(site, where):
    terms, same = (*ENDLESS, "actor.sampler=serial"), ()
    if where == "url":
        learner = site.learner(*terms, config=CARTPOLE)
        same = site.same_ports
        door = site.open("actors", "--learner", site.service["data_url"], "--num", "2")
    else:  # they come first
        logs = ["--log-dir", str(site.folder / "logs")]
        door = site.open("actors", "--learner", str(site.run_dir), "--num", "2", *logs)
        learner = site.learner(*terms, config=CARTPOLE)
    site.wait_report("two actors", lambda r: r["num_actors"] == 2 and r["updates"] > 0)
    opened = site.reports()[-1]["sessions/opened"]
    first, second = actors_of(door)
    first.kill()
    killed_at = time.monotonic()
    wait_until("a new actor", lambda: len({*actors_of(door)} - {first, second}) == 1)
    site.wait_report("its session", lambda r: r["sessions/opened"] > opened)
    assert time.monotonic() - killed_at < 15.0
    # It goes on for a little, at other ports if it is found by its folder; then the run is over.
    learner.ends()
    assert door.process.poll() is None
    end = site.summary["env_steps_trained"] + 1
    site.learner(*same, f"stop.env_steps={end}", resume=True)
    assert door.wait_exit(60) == 0, door.log
    assert "was killed (SIGKILL)" in door.log
    assert "the run is over" in door.log.splitlines()[-1]
    said = door.log if where == "url" else (site.folder / "logs" / "actor-1.log").read_text()
    assert "the learner says goodbye: " in said
    assert ("actor 1: " in door.log) == (where == "url")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_actors_of_a_host_end_within_seconds_when_they_are_told_to(site, number, code):
    site.learner(*ENDLESS, "actor.sampler=serial", config=CARTPOLE)
    door = site.open("actors", "--learner", site.service["data_url"], "--num", "2")
    site.wait_report("two actors", lambda r: r["num_actors"] == 2)
    door.ends(number, code, within_s=5.0)
    assert "told to end: all actors have ended" in door.log
    site.wait_report("no actor", lambda r: r["num_actors"] == 0)


def test_no_actor_outlives_a_supervisor_that_is_killed(site):
    # There is no learner, and they look for one.
    door = site.open("actors", "--learner", "tcp://127.0.0.1:9", "--num", "2")
    wait_until("both look for it", lambda: door.log.count("no learner answers at") >= 2)
    started = actors_of(door)
    assert len(started) == 2
    door.kill()
    wait_until("all have ended", lambda: not any(map(is_alive, started)), within_s=3.0)


def test_actors_that_cannot_make_the_environment_end_with_its_reason(site):
    # This host lacks it.
    settings = ("env.id=lost:Lost", "env.probe=actor", "actor.sampler=serial")
    site.learner(*settings, config=CARTPOLE)
    door = site.open("actors", "--learner", str(site.run_dir))
    assert door.wait_exit(40) == 78, door.log
    last = door.log.splitlines()[-1]
    assert "actor 0 cannot run: it ended with exit code 78 (" in last
    assert "lost:Lost" in last
    assert last.endswith("its words are above")


@pytest.mark.parametrize("way", ["ipc", "tcp"])
def test_a_learner_that_comes_back_elsewhere_is_found_by_its_run_folder(site, way):
    # The lease is longer than the test: who waits for its end does not come back in time.
    terms = ("learner.lease_s=100", "checkpoint.every_s=0.5", "actor.sampler=serial")
    with tempfile.TemporaryDirectory(dir="/tmp") as runtime:
        learner = site.learner(*ENDLESS, *terms, config=CARTPOLE, XDG_RUNTIME_DIR=runtime)
        if way == "tcp":  # as from another host
            (nonce,) = Path(runtime).glob("*/nonce")
            nonce.unlink()
        before = site.service
        actor = site.open("actor", "--learner", str(site.run_dir))
        site.wait_report("training", lambda r: r["num_actors"] == 1 and r["updates"] > 10)
        wait_until("a checkpoint", site.checkpoints)
        learner.kill()
        with socket.socket() as taken:
            # Nobody is where it was.
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.bind(("127.0.0.1", int(before["data_url"].rpartition(":")[2])))
            learner = site.learner(*ANY_PORTS, resume=True, XDG_RUNTIME_DIR=runtime)
            serves_at = time.monotonic()
            assert site.service["data_url"] != before["data_url"]
            site.wait_report("it is back", lambda r: r["num_actors"] == 1)
            assert time.monotonic() - serves_at < 15.0
            site.wait_report("more updates", lambda r: r["updates"] > 50)
        assert actor.process.poll() is None
        learner.ends()
        actor.ends()


def test_a_run_with_a_key_hears_those_who_have_it_and_tells_the_others(site):
    key = secrets.token_hex(32)
    learner = site.learner(*ENDLESS, "bind.encrypt=on", config=CARTPOLE)
    url = site.service["data_url"]
    without = site.open("actor", "--learner", url)
    assert without.wait_exit(30) == 77
    assert f"the learner at {url} wants the key of its run: set IMPALA_ASYNC_KEY" in without.log
    wrong = site.open("actor", "--learner", url, "--connect-s", "4", IMPALA_ASYNC_KEY=key)
    assert wrong.wait_exit(30) == 75
    assert "the key that we have is not that of its run" in wrong.log
    kept = (site.run_dir / "key").read_text()
    friend = site.open("actor", "--learner", url, IMPALA_ASYNC_KEY=kept)
    site.wait_report("it trains", lambda report: report["updates"] > 0)
    wait_until(
        "it counts the others", lambda: "as they do without the key of this run" in learner.log
    )
    # It goes on with another key, which its folder tells.
    same = site.same_ports
    learner.ends()
    assert friend.process.poll() is None
    friend.kill()
    by_folder = site.open("actor", "--learner", str(site.run_dir))
    site.learner(*same, resume=True, IMPALA_ASYNC_KEY=key)
    assert (site.run_dir / "key").read_text().strip() == key
    site.wait_report("it trains again", lambda report: report["num_actors"] == 1)
    assert kept.strip() not in learner.log + friend.log + by_folder.log


@pytest.mark.parametrize("encrypt", ["on", "off"])
def test_nobody_on_the_way_can_read_what_is_said_with_a_key(site, encrypt):
    with tempfile.TemporaryDirectory(dir="/tmp") as runtime:
        learner = site.learner(
            *ENDLESS, f"bind.encrypt={encrypt}", config=CARTPOLE, XDG_RUNTIME_DIR=runtime
        )
        (nonce,) = Path(runtime).glob("*/nonce")
        nonce.unlink()  # as from another host
        urls = site.service["data_url"], site.service["weights_url"]
        key = {"IMPALA_ASYNC_KEY": (site.run_dir / "key").read_text()} if encrypt == "on" else {}
        with proxy(*urls, is_read=True) as way:
            actor = site.open("actor", "--learner", urls[0].replace(LEARNER_HOST, HOST), **key)
            site.wait_report("it trains", lambda report: report["updates"] > 10)
            actor.ends()
        learner.ends()
    # The settings go to the actor, and rewards of 1 come back.
    is_read = encrypt == "off"
    assert (b"CartPole-v1" in way.carried) is is_read
    assert (np.ones(20, np.float32).tobytes() in way.carried) is is_read
    assert len(way.carried) > 100_000
