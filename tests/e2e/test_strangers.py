"""Who reaches a port may say anything: the learner lives, and the actors at work feel little."""

import re
import subprocess
import sys
import time

import psutil
import pytest

from tests.e2e.harness import CARTPOLE, ENDLESS, Door, Site, identities_hold, module, wait_until
from tests.e2e.strangers import Hoarder, Strangers
from tests.wire import raw_peer

pytestmark = pytest.mark.e2e

# A router that reads only when it is told to, as a learner that builds a model.
ROUTER = """
import sys
from impala_async.wire.sockets import Router, new_context
router = Router(new_context(), "tcp://127.0.0.1:*", None, 1 << 20)
print(router.url, flush=True)
sys.stdin.readline()
router.has_input()
print("lives", flush=True)
"""
# Longer than any heartbeat that was ever set.
BEAT_S = 6.0


@pytest.mark.slow
def test_who_hangs_up_while_its_messages_wait_ends_nobody() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", ROUTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as router:
        assert router.stdout is not None
        url = router.stdout.readline().strip()
        for _ in range(40):
            raw = raw_peer.connect(url)
            raw.sendall(raw_peer.message(b"hello") * 3000)
            raw_peer.hang_up(raw)
        with pytest.raises(subprocess.TimeoutExpired):
            router.wait(BEAT_S)
        assert router.communicate("\n", timeout=20.0)[0] == "lives\n"
        assert router.returncode == 0


# Its steps take time, but no processor.
SLEEPY = """
import time
import gymnasium

class Sleepy(gymnasium.Wrapper):
    def __init__(self):
        super().__init__(gymnasium.make("CartPole-v1"))
    def step(self, action):
        time.sleep(0.001)
        return super().step(action)
"""


def at_work(site: Site) -> Door:
    """A learner with an actor."""
    path = module(site.folder, "sleepy", SLEEPY)
    learner = site.learner("env.id=sleepy:Sleepy", *ENDLESS, config=CARTPOLE, **path)
    site.actor(**path)
    site.wait_report("training", lambda r: r["updates"] > 10)
    return learner


def join_late(site: Site, learner: Door) -> None:
    """Another actor comes."""
    actor = site.actor(**module(site.folder, "sleepy", SLEEPY))

    def has_joined() -> bool:
        number = re.search(r"INFO actor (\d+): ", actor.log)
        return number is not None and f"actor {number[1]} joined" in learner.log

    wait_until("it has joined", has_joined, 40.0)


def settle_one(strangers: Strangers) -> float:
    """From a new one's hello to its first message in a batch; its process runs already."""
    started = time.monotonic()
    newcomer = Hoarder(strangers, columns=4, num_messages=1)

    def is_settled() -> bool:
        newcomer.go_on()
        return newcomer.num_settled > 0

    wait_until("its message is settled", is_settled, 40.0)
    return time.monotonic() - started


def test_strangers_end_nothing(site: Site) -> None:
    learner = at_work(site)
    strangers = Strangers(site)
    wait_until("all have credit", lambda: all(s.has_credit for s in strangers.hoarders), 40.0)
    wait_until("some deserted", lambda: any(s.num_settled for s in strangers.deserters), 40.0)
    join_late(site, learner)
    after = site.wait_report("who sends too much is cut off", lambda r: r["wire/cut"] > 0)
    site.wait_report("training goes on", lambda r: r["updates"] > after["updates"] + 10)
    strangers.close()
    assert learner.process.poll() is None
    assert all(identities_hold(report) for report in site.reports())
    assert "\nERROR all is lost" not in learner.log
    assert "Traceback" not in learner.log


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_strangers_for_a_minute_cost_little(site: Site) -> None:
    learner = at_work(site)
    quiet = rate_of(site, 20.0)
    memory = memory_of(learner)
    strangers = Strangers(site)
    busy = rate_of(site, 60.0)
    grown = memory_of(learner) - memory
    num_lines = learner.log.count("\n")
    joined_s = settle_one(strangers)
    join_late(site, learner)
    strangers.close()
    num_deserted = sum(deserter.num_settled > 0 for deserter in strangers.deserters)
    print(
        f"{num_deserted} deserted, {busy / quiet:.3f} of the rate, {grown / 1e6:.0f} MB, "
        f"the first message of a new one settled after {joined_s:.1f} s"
    )
    assert busy >= 0.9 * quiet
    assert grown < 50e6
    assert num_lines < 25 * 90
    assert joined_s < 3.0


def memory_of(learner: Door) -> float:
    """The least of some seconds, in bytes: a burst is over after a fraction of one."""
    process = psutil.Process(learner.process.pid)
    found = []
    for _ in range(30):
        found.append(process.memory_info().rss)
        time.sleep(0.1)
    return float(min(found))


def rate_of(site: Site, seconds: float) -> float:
    """Env steps per second over a while."""
    first = site.wait_report("a report", lambda r: True)
    last = site.wait_report(
        "a while later", lambda r: r["time_s"] >= first["time_s"] + seconds, seconds + 20.0
    )
    steps = last["env_steps_trained"] - first["env_steps_trained"]
    return float(steps / (last["time_s"] - first["time_s"]))
