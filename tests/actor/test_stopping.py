"""An actor that is told to end while its environment has the main thread."""

import math
import os
import signal

import pytest

from impala_async.actor import stopping
from impala_async.actor.stopping import Stopper
from impala_async.envs.faults import RUNNING, Blame
from tests.wire.ends import until


class Stage:
    """Notes what a stopper says, when, and how it ends its process."""

    def __init__(self):
        self.now = 100.0
        self.told = []
        self.codes = []
        self.stopper = Stopper(
            self.told.append,
            lambda: "actor 2 (Game-v1)",
            leave=self.codes.append,
            clock=lambda: self.now,
        )

    def pass_s(self, seconds):
        self.now += seconds
        self.stopper.look()


@pytest.fixture
def stage():
    # Steps of other tests may have left a number there.
    RUNNING.place[0] = 0
    RUNNING.look(-math.inf)
    yield Stage()
    RUNNING.call = None


def be(where, since=90.0, *, is_here=True):
    RUNNING.call = Blame("Game-v1", where, 1, is_here=is_here), since


@pytest.mark.parametrize("where", ["in step", "in reset"])
@pytest.mark.parametrize(
    ("number", "word", "code"),
    [(signal.SIGTERM, "terminated\n", 0), (signal.SIGINT, "interrupted\n", 130)],
)
def test_an_environment_that_does_not_come_back_is_told_of_and_then_left(
    stage, capfd, where, number, word, code
):
    be(where)
    stage.stopper.take(number)
    stage.pass_s(2.9)
    assert stage.told == []
    stage.pass_s(0.1)
    hang = f"environment 0 of actor 2 (Game-v1) has been {where} for"
    assert stage.told == [f"ending within 7 s: {hang} 13 s; another signal ends it at once"]
    stage.pass_s(6.9)
    assert stage.codes == []
    stage.pass_s(0.1)
    assert stage.told[1:] == [f"{hang} 20 s, and is not waited for any longer"]
    assert stage.codes == [code]
    assert capfd.readouterr().err == word


def test_what_only_starts_ends_at_once(stage):
    be("to be made")
    stage.stopper.take(signal.SIGTERM)
    stage.pass_s(0.5)
    assert (stage.codes, stage.told) == ([0], [])


def test_a_network_is_not_waited_for_longer_than_a_step(stage):
    with stage.stopper.building():
        stage.pass_s(60.0)
        stage.stopper.take(signal.SIGINT)
        stage.pass_s(9.9)
        assert (stage.codes, stage.told) == ([], [])
        stage.pass_s(0.1)
    assert stage.codes == [130]
    assert stage.told == ["the network is still being built, and is not waited for any longer"]
    stage.pass_s(0.5)
    assert stage.codes == [130]


def test_a_second_signal_ends_it_at_once(stage, capfd):
    for _ in range(2):  # a supervisor tells its group, and each in it
        stage.stopper.take(signal.SIGTERM)
    assert stage.codes == []
    stage.stopper.take(signal.SIGINT)
    assert stage.codes == [130]
    assert capfd.readouterr().err == "interrupted\n"


@pytest.mark.parametrize("is_told", [True, False])
def test_nobody_is_hurried_for_nothing(stage, is_told):
    """One that is about to end, one whose env workers can be left, one that nobody told."""
    if is_told:
        stage.stopper.take(signal.SIGTERM)
        stage.pass_s(60.0)
        be("in step", is_here=False)
    else:
        be("in step")
    stage.pass_s(60.0)
    assert (stage.codes, stage.told) == ([], [])


def test_it_hears_a_signal_wherever_the_main_thread_is(stage, monkeypatch):
    monkeypatch.setattr(stopping, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(stopping, "END_AFTER_S", 0.0)
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    stage.stopper.start()
    try:
        be("in step")
        os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: stage.codes)
        assert stage.codes[0] == 0
    finally:
        stage.stopper.close()
        signal.signal(signal.SIGTERM, before)
    assert signal.set_wakeup_fd(-1) == -1


def test_an_environment_may_close_all_that_is_open(monkeypatch):
    monkeypatch.setattr(signal, "set_wakeup_fd", lambda *_, **__: -1)
    stopper = Stopper(print, str).start()
    os.close(stopper._wakeup)
    stopper.close()
