"""An actor that is told to end does, whatever it is doing."""

import signal
import time
from pathlib import Path

import numpy as np
import pytest

from impala_async.policy import Policy
from impala_async.weights import Version, Weights
from impala_async.wire.messages import Bye, ByeOk, Get, Heartbeat, Hello, Spec, WeightsReply
from tests.actor.scripted import Session, open_scene, settings_for
from tests.e2e.harness import wait_until

pytestmark = pytest.mark.e2e
# A process that imports torch, on a machine that does other things too.
START_S = 30.0
# Less than sixteen slow steps, after which it would look without being told to.
SOON_S = 5.0


@pytest.fixture
def scene(tmp_path):
    with open_scene(tmp_path) as opened:
        yield opened


def start(site, scene, is_started=False):
    return site.open("actor", "--learner", scene.learner.url, is_started=is_started)


def unroll(scene, settings):
    """Welcome an actor and give it weights; it has no credit."""
    hello = scene.learner.data.hear(Hello, START_S)
    welcome = scene.learner.welcome(hello, settings, heartbeat_s=0.05)
    session = Session(scene.learner.data.hear(Spec), welcome)
    layout = Policy(session.schema, settings.model, seed=0).layout
    weights = Weights(Version(1, 1), np.zeros(layout.num_bytes, np.uint8))
    reply = WeightsReply(1, 1, layout.digest, weights.digest())
    scene.learner.weights.find(Get).answer(reply, weights.buffer.tobytes())
    for _ in range(5):
        scene.learner.weights.find(Heartbeat)
    return session


def ends_soon(actor, scene, session=None):
    """See that it ends at a signal; if it has a session, it says goodbye."""
    told_at = time.monotonic()
    actor.tell(signal.SIGTERM)
    if session is not None:
        bye = scene.learner.data.find(Bye)
        assert bye.message.session == session.id
        bye.answer(ByeOk(session.id))
    assert actor.wait_exit() == 0, actor.log
    assert time.monotonic() - told_at < SOON_S
    assert "Traceback" not in actor.log


def test_sigterm_ends_it_soon_whatever_it_does(site, scene):
    importing = start(site, scene, is_started=True)
    maps = Path(f"/proc/{importing.process.pid}/maps")
    wait_until("it imports torch", lambda: "libtorch" in maps.read_text())
    ends_soon(importing, scene)

    connecting = start(site, scene)
    scene.learner.data.hear(Hello, START_S)
    ends_soon(connecting, scene)
    scene.learner.data.drain()

    waiting = start(site, scene)
    session = unroll(scene, settings_for("Counting", rows=1, sampler="serial"))
    ends_soon(waiting, scene, session)

    # Eight environments make a step of 0.4 s: it must look after each.
    unrolling = start(site, scene)
    session = unroll(scene, settings_for("Slow", rows=1000, sampler="serial", step_s=0.05))
    ends_soon(unrolling, scene, session)
