import threading

from impala_async.waiting import Wait, told_meanwhile


def test_it_is_told_after_a_while_and_then_now_and_then() -> None:
    told: list[str] = []
    now = 100.0
    wait = Wait(told.append, clock=lambda: now)
    for second in range(28):
        now = 100.0 + second
        wait.look(lambda s: f"{s:.0f}")
    assert told == ["3", "13", "23"]


def test_a_wait_may_have_begun_before() -> None:
    told: list[str] = []
    wait = Wait(told.append, after_s=10.0, since=90.0, clock=lambda: 101.0)
    wait.look(lambda s: f"{s:.0f} s")
    wait.look(lambda s: "too soon")
    assert told == ["11 s"]


def test_a_thread_that_is_busy_is_told_of_until_it_is_done() -> None:
    is_told = threading.Event()
    told: list[str] = []

    def tell(line: str) -> None:
        told.append(line)
        is_told.set()

    with told_meanwhile(Wait(tell, after_s=0.0), lambda s: "drawing"):
        assert is_told.wait(30)
    assert set(told) == {"drawing"}
    assert "telling" not in [thread.name for thread in threading.enumerate()]
