import functools
import threading

from impala_async import waiting
from impala_async.waiting import Wait, told_of


def test_it_is_told_after_a_while_and_then_now_and_then():
    told = []
    now = 100.0
    wait = Wait(told.append, clock=lambda: now)
    for second in range(28):
        now = 100.0 + second
        wait.look(lambda s: f"{s:.0f}")
    assert told == ["3", "13", "23"]


def test_a_wait_may_have_begun_before():
    told = []
    wait = Wait(told.append, after_s=10.0, since=90.0, clock=lambda: 101.0)
    wait.look(lambda s: f"{s:.0f} s")
    wait.look(lambda s: "too soon")
    assert told == ["11 s"]


def test_what_keeps_a_thread_busy_is_told_of_by_another(monkeypatch):
    monkeypatch.setattr(waiting, "LOOK_EVERY_S", 0.001)
    monkeypatch.setattr(waiting, "Wait", functools.partial(Wait, after_s=0.0))
    told = []
    is_told = threading.Event()

    def tell(line):
        told.append(line)
        is_told.set()

    with told_of("starting: torch is loaded", tell):
        assert is_told.wait(20.0)
    assert told == ["starting: torch is loaded (0 s)"]
