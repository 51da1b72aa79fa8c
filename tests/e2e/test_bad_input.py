"""Wrong settings, wrong environments, wrong peers: one clear line, the right exit code."""

import random
import threading
import time
from pathlib import Path

import pytest

from impala_async.schema import ActionPart, ActionSpec, ArraySpec, ObsSpec, Schema
from impala_async.wire.messages import (
    PROTOCOL,
    REJECT_CODES,
    Hello,
    Message,
    Reject,
    Spec,
    Welcome,
    pack,
    unpack,
)
from impala_async.wire.session import reject
from impala_async.wire.sockets import Dealer, Router, new_context
from tests.e2e.harness import Site

pytestmark = pytest.mark.e2e

CARTPOLE = "configs/cartpole.toml"
ENDLESS = ("stop.mean_return=none", "stop.env_steps=none")
SHAPED_ENV = """
import os
import gymnasium
import numpy as np

class Shaped(gymnasium.Env):
    def __init__(self):
        size = int(os.environ["SHAPED_SIZE"])
        self.observation_space = gymnasium.spaces.Box(-1, 1, (size,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {}
    def step(self, action):
        return self.observation_space.sample(), 0.0, False, False, {}
"""


WRONG = {
    "--set env.id=X --set learner.num_pases=2": "did you mean learner.num_pass",
    "--set env.id=CartPole-v1 --set learner.num_passes=0": "from 1 up, got 0",
    "--config /nowhere.toml": "/nowhere.toml: cannot read",
    "--set nonsense --set env.id=CartPole-v1": "section.key=value",
    "--resume": "--resume needs --run-dir",
    "--set env.id=CartPole-v9": "`v1`",
    "--set env.id=CartPole-v1 --set env.squash_actions=true": "Discrete(2)",
    "--set env.id=CartPole-v1 --set learner.device=gpu": "learner.device",
}


@pytest.mark.parametrize("door", ["learner", "train"])
def test_wrong_settings(site: Site, door: str) -> None:
    for flags, says in WRONG.items():
        folder = () if "--resume" in flags else ("--run-dir", str(site.run_dir))
        opened = site.open(door, *flags.split(), *folder)
        assert opened.wait_exit(40) == 2, (flags, opened.log)
        errors = [line for line in opened.log.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1, (flags, opened.log)
        assert says in errors[0], flags
        assert "Traceback" not in opened.log
        assert not site.run_dir.exists(), flags


def test_a_second_learner_on_the_same_port(site: Site) -> None:
    site.learner(*ENDLESS, config=CARTPOLE)
    other = str(site.folder / "other")
    taken = f"bind.data={site.service['data_url']}"
    second = site.open("learner", "--config", CARTPOLE, "--run-dir", other, "--set", taken)
    assert second.wait_exit(30) == 2
    assert "bind.data" in second.log
    assert "Traceback" not in second.log


def test_a_run_folder_in_use_is_not_overwritten(site: Site) -> None:
    site.learner(*ENDLESS, config=CARTPOLE)
    second = site.open("learner", "--config", CARTPOLE, "--run-dir", str(site.run_dir))
    assert second.wait_exit(30) == 2
    assert "already holds a run" in second.log


def test_an_actor_with_another_space_exits_78(site: Site) -> None:
    (site.folder / "shaped.py").write_text(SHAPED_ENV)
    path = {"PYTHONPATH": f"{site.folder}:{Path.cwd()}"}
    site.learner("env.id=shaped:Shaped", **path, SHAPED_SIZE="3")
    actor = site.actor(**path, SHAPED_SIZE="5")
    assert actor.wait_exit(30) == 78
    (error,) = [line for line in actor.log.splitlines() if line.startswith("error: ")]
    assert "shape" in error
    assert "(3,)" in error
    assert "(5,)" in error
    fits = site.actor(**path, SHAPED_SIZE="3")
    site.wait_report("the right actor works", lambda r: r["num_actors"] == 1 and r["updates"] > 0)
    assert fits.process.poll() is None


def test_an_environment_missing_at_the_actor_exits_78(site: Site) -> None:
    (site.folder / "shaped.py").write_text(SHAPED_ENV)
    path = {"PYTHONPATH": f"{site.folder}:{Path.cwd()}", "SHAPED_SIZE": "3"}
    site.learner("env.id=shaped:Shaped", **path)
    actor = site.actor(SHAPED_SIZE="3")
    assert actor.wait_exit(30) == 78
    assert "shaped" in actor.log
    assert "Traceback" not in actor.log


def test_no_learner_there_exits_75(site: Site) -> None:
    actor = site.open("actor", "--learner", "tcp://127.0.0.1:9", "--connect-s", "1")
    assert actor.wait_exit(20) == 75
    assert "no learner answered at tcp://127.0.0.1:9" in actor.log


def test_an_actor_refused_for_its_protocol_exits_78(site: Site) -> None:
    context = new_context()
    router = Router(context, "tcp://127.0.0.1:*", None, 1 << 20)
    answered = threading.Event()

    def refuse() -> None:
        give_up_at = time.monotonic() + 30
        while time.monotonic() < give_up_at and not answered.is_set():
            arrived = router.receive()
            if arrived is None:
                time.sleep(0.01)
                continue
            assert isinstance(unpack(arrived[1]), Hello)
            router.send(arrived[0], [pack(reject("protocol", "protocol: version 2 here"))])
            answered.set()

    thread = threading.Thread(target=refuse)
    thread.start()
    actor = site.open("actor", "--learner", router.url)
    assert actor.wait_exit(30) == 78
    assert "error: the learner refuses this actor: protocol: version 2 here" in actor.log
    thread.join()
    router.close()
    context.term()


class Stranger:
    """A peer at the learner's ports that says whatever it likes."""

    def __init__(self, site: Site) -> None:
        self._context = new_context()
        self.data = Dealer(self._context, site.service["data_url"])
        self.weights = Dealer(self._context, site.service["weights_url"])

    def say(self, message: Message, *frames: bytes) -> Message:
        """Send on the data port; the answer."""
        give_up_at = time.monotonic() + 10
        while not self.data.send([pack(message), *frames]):
            assert time.monotonic() < give_up_at
        answer = self.data.receive(10)
        assert answer is not None
        return unpack(answer[0])

    def hello(self, protocol: int = PROTOCOL) -> Message:
        return self.say(Hello(protocol, random.randbytes(16), "0", bytes(16), 0, 0))

    def close(self) -> None:
        self.data.close()
        self.weights.close()
        self._context.term()


def test_old_protocol_and_wrong_rows_are_told_what_differs(site: Site) -> None:
    site.learner(*ENDLESS, config=CARTPOLE)
    stranger = Stranger(site)
    answer = stranger.hello(protocol=PROTOCOL + 7)
    assert isinstance(answer, Reject)
    assert REJECT_CODES[answer.code] == "protocol"
    assert f"version {PROTOCOL}, the actor {PROTOCOL + 7}" in answer.text
    welcome = stranger.hello()
    assert isinstance(welcome, Welcome)
    schema = Schema(
        ObsSpec((ArraySpec("", (4,), "float32"),)),
        ActionSpec((ActionPart("", "discrete", (2,)),)),
        20,
    )
    answer = stranger.say(Spec(welcome.session, schema.digest, bytes(16), 8, 1), schema.to_json())
    assert isinstance(answer, Reject)
    assert REJECT_CODES[answer.code] == "mismatch"
    assert "rows: 50 at the learner, 20 at the actor" in answer.text
    stranger.close()
