"""CartPole by one documented command of an engine, and what it has to bear."""

import json
import socket
import subprocess
import sys
import time
from contextlib import suppress

import psutil

from tests.e2e.harness import CARTPOLE, given, is_alive, wait_until

# All is on this machine.
HERE = ("bind.data=tcp://127.0.0.1:*", "bind.weights=tcp://127.0.0.1:*")
BACK_S = 5.0
GOAL = 475.0


def free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def run_flags(site, *settings):
    """The flags of CartPole in the folder of a site."""
    return ["--config", CARTPOLE, "--run-dir", str(site.run_dir), *given((*HERE, *settings))]


def launch(engine, *flags, code=0):
    """The command of an engine that ends once it has begun; all that it says."""
    command = [sys.executable, "-m", "impala_async", "launch", engine, *flags]
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(command, timeout=60, check=False, **how)
    assert done.returncode == code, done.stdout
    return done.stdout


def actors_of(learner):
    """The processes of actors that anybody has started for a learner."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "impala_async.actor" in words and learner in words and is_alive(process):
            found.append(process)
    return found


def learns(site):
    """The run comes to its goal."""
    ends_by(site, "mean_return", within_s=100.0)
    assert site.summary["mean_return_100"] >= GOAL


def ends_by(site, reason, within_s=40.0):
    """The run comes to this end. One that goes on loses its summary until the next."""

    def has_ended():
        with suppress(FileNotFoundError):
            summary = json.loads((site.run_dir / "summary.json").read_text())
            return summary["exit_reason"] == reason
        return False

    wait_until(f"the end, by {reason}", has_ended, within_s)


def goes_on_after_a_kill(site, learner, num_actors):
    """An actor is killed while all are at work: another comes in time, and the run goes on. The
    address or the folder of the learner is as its actors were told."""
    site.wait_report("all work", lambda r: r["updates"] and r["num_actors"] == num_actors)
    limit_s = max(BACK_S, 3 * load_s())
    opened = site.reports()[-1]["sessions/opened"]
    actors = actors_of(learner)
    assert len(actors) == num_actors
    actors[0].kill()
    killed_at = time.monotonic()
    back = site.wait_report("another", lambda r: r["sessions/opened"] > opened)
    back_s = time.monotonic() - killed_at
    print(f"an actor was back {back_s:.1f} s after a kill (limit: {limit_s:.1f} s)")
    assert back_s < limit_s
    site.wait_report("the run goes on", lambda r: r["updates"] > back["updates"] + 100)


def load_s():
    """How long a process takes now to load what an actor does; neighbours may have the cores."""
    started = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch, impala_async.actor.service"], check=True)
    return time.monotonic() - started
