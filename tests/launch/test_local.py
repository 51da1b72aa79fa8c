"""Real processes behind fake doors: the folder that they start in holds a package of that name."""

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from impala_async.errors import ConfigError
from impala_async.launch import local
from impala_async.launch.local import LocalRun, free_url

URL = "tcp://127.0.0.1:1"
WITHIN_S = 10.0
START = """
import json, os, signal, sys, time
from pathlib import Path

me = Path(__file__).stem

def note(**what):
    line = json.dumps({"who": me, "at": time.monotonic(), "pid": os.getpid(), **what})
    with open("events", "a") as file:
        file.write(line + "\\n")

def count(who):
    return sum(json.loads(line)["who"] == who for line in Path("events").read_text().splitlines())

def wait_for(is_there):
    give_up_at = time.monotonic() + 20
    while not is_there() and time.monotonic() < give_up_at:
        time.sleep(0.005)
"""
LEARNER_UNTIL_TOLD = """
told = []
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, frame: told.append(number))
note(flags=sys.argv[1:])
wait_for(lambda: told)
note(signal=told[0])
sys.exit(0 if told == [signal.SIGTERM] else 130)
"""
ACTOR_UNTIL_KILLED = """
note(flags=sys.argv[1:])
wait_for(lambda: False)
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(local, "POLL_S", 0.005)
    monkeypatch.setattr(local, "RESTART_AFTER_S", 0.02)
    monkeypatch.setattr(local, "ACTOR_END_S", 0.1)
    monkeypatch.setattr(local, "ASKED_END_S", 2.0)
    Path("events").touch()


def run(learner: str, actor: str, num_actors: int = 1) -> int:
    package = Path("impala_async")
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "learner.py").write_text(START + learner)
    (package / "actor.py").write_text(START + actor)
    code = LocalRun(["--flag", "1"], URL, Path("logs")).run(num_actors)
    assert psutil.Process().children() == []
    return code


def events(who: str, *keys: str) -> list[dict[str, Any]]:
    noted = [json.loads(line) for line in Path("events").read_text().splitlines()]
    return [e for e in noted if e["who"] == who and e.keys() >= set(keys)]


def test_when_the_learner_is_done_everybody_is() -> None:
    learner = "note(flags=sys.argv[1:])\nwait_for(lambda: count('actor') == 3)\n"
    code = run(learner, "note(flags=sys.argv[1:])\nprint('heard')\n", num_actors=3)
    assert code == 0
    assert [e["flags"] for e in events("learner")] == [["--flag", "1"]]
    assert [e["flags"] for e in events("actor")] == [["--learner", URL]] * 3
    logs = sorted(Path("logs").iterdir())
    assert [log.name for log in logs] == ["actor-0.log", "actor-1.log", "actor-2.log"]
    assert [log.read_text() for log in logs] == ["heard\n"] * 3


@pytest.mark.parametrize(
    ("end", "code"),
    [("sys.exit(2)", 2), ("sys.exit(70)", 70), ("os.kill(os.getpid(), signal.SIGKILL)", 137)],
)
def test_the_learner_decides_the_exit_code(end: str, code: int) -> None:
    learner = f"wait_for(lambda: count('actor') == 1)\n{end}\n"
    assert run(learner, ACTOR_UNTIL_KILLED) == code


def test_an_actor_that_ignores_the_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "ACTOR_END_S", 0.05)
    monkeypatch.setattr(local, "ASKED_END_S", 0.05)
    ignore = "signal.signal(signal.SIGTERM, lambda *_: note(told=True))\n"
    assert run("wait_for(lambda: count('actor') == 1)", ignore + ACTOR_UNTIL_KILLED) == 0
    assert len(events("actor", "told")) == 1


def test_a_dead_actor_is_started_again_after_a_pause(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(local, "RESTART_AFTER_S", 0.2)
    actor = """
note(began=True)
try:
    open("victim", "x").close()
except FileExistsError:
    wait_for(lambda: False)
note(died=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert run("wait_for(lambda: count('actor') == 4)", actor, num_actors=2) == 0
    (death,) = events("actor", "died")
    began = events("actor", "began")
    assert len({e["pid"] for e in began}) == 3
    assert began[2]["at"] - death["at"] >= 0.2
    assert "ended with code -9: starting it again" in caplog.text


def test_an_actor_that_has_ended_in_good_order_is_not_started_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    actor = """
try:
    open("good", "x").close()
except FileExistsError:
    note()
    sys.exit(75)
"""
    # The other one comes again three times meanwhile.
    assert run("wait_for(lambda: count('actor') == 4)", actor, num_actors=2) == 0
    assert "ended with code 75" in caplog.text
    assert "ended with code 0" not in caplog.text


@pytest.mark.parametrize("code", [2, 77, 78])
def test_a_hopeless_actor_ends_the_run_with_its_reason(
    caplog: pytest.LogCaptureFixture, code: int
) -> None:
    actor = f"""
wait_for(lambda: count("learner") == 1)
print("log line\\nerror: it does not fit\\nmore", flush=True)
note()
sys.exit({code})
"""
    started = time.monotonic()
    assert run(LEARNER_UNTIL_TOLD, actor) == code
    assert time.monotonic() - started < local.LEARNER_END_S / 2
    assert f"actor 0 cannot run: it does not fit ({code})" in caplog.text
    assert [e["signal"] for e in events("learner", "signal")] == [signal.SIGTERM]
    assert len(events("actor")) == 1


@pytest.mark.parametrize(("end", "code"), [("1 / 0", 1), ("os.abort()", 134)])
def test_an_actor_that_dies_quickly_again_and_again_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, end: str, code: int
) -> None:
    monkeypatch.setattr(local, "MAX_QUICK_DEATHS", 2)
    actor = f'wait_for(lambda: count("learner") == 1)\nnote()\n{end}\n'
    assert run(LEARNER_UNTIL_TOLD, actor) == code
    assert len(events("actor")) == 3
    assert "cannot run: " in caplog.text
    if code == 1:
        assert "ZeroDivisionError: division by zero" in caplog.text
    else:
        assert "it said nothing" in caplog.text


def test_an_actor_that_lived_for_a_while_may_die_as_often_as_it_likes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local, "MAX_QUICK_DEATHS", 1)
    monkeypatch.setattr(local, "QUICK_DEATH_S", 0.0)
    assert run("wait_for(lambda: count('actor') >= 5)", "note()\nsys.exit(75)\n") == 0


def test_a_learner_that_does_not_end_when_the_run_is_given_up_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local, "LEARNER_END_S", 0.1)
    monkeypatch.setattr(local, "ASKED_END_S", 0.1)
    learner = """
signal.signal(signal.SIGTERM, lambda *_: note(told=True))
note(began=True)
wait_for(lambda: False)
"""
    assert run(learner, "wait_for(lambda: count('learner') == 1)\nsys.exit(78)") == 78
    assert events("learner", "told")


def signal_when(is_ready: Callable[[int], bool], *numbers: int) -> threading.Thread:
    """Send signals to this process, each once what came before has arrived."""

    def send() -> None:
        give_up_at = time.monotonic() + WITHIN_S
        for n, number in enumerate(numbers):
            while not is_ready(n):
                assert time.monotonic() < give_up_at
            os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_reaches_the_learner_once_and_the_actors_end_with_it(
    monkeypatch: pytest.MonkeyPatch, number: int, code: int
) -> None:
    monkeypatch.setattr(local, "ACTOR_END_S", 5.0)
    actor = "signal.signal(signal.SIGINT, lambda *_: note(interrupted=True))\n" + ACTOR_UNTIL_KILLED
    before = signal.getsignal(number)
    started = time.monotonic()
    thread = signal_when(lambda n: len(events("learner")) + len(events("actor")) == 3, number)
    assert run(LEARNER_UNTIL_TOLD, actor, num_actors=2) == code
    thread.join()
    # Not waited for: they think that the learner comes back.
    assert time.monotonic() - started < local.ACTOR_END_S
    assert [e["signal"] for e in events("learner", "signal")] == [number]
    assert events("actor", "interrupted") == []
    assert signal.getsignal(number) is before


def test_a_second_ctrl_c_reaches_the_learner_too() -> None:
    learner = """
signals = []

def take(number, frame):
    signals.append(number)
    note(signal=number)

signal.signal(signal.SIGINT, take)
note()
wait_for(lambda: len(signals) == 2)
sys.exit(130)
"""
    thread = signal_when(lambda n: len(events("learner")) == n + 1, signal.SIGINT, signal.SIGINT)
    assert run(learner, ACTOR_UNTIL_KILLED) == 130
    thread.join()
    assert len(events("learner", "signal")) == 2


def test_each_process_has_one_thread_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    learner = "note(threads=os.environ['MKL_NUM_THREADS'])\nwait_for(lambda: count('actor'))\n"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert run(learner, "note(threads=os.environ['OMP_NUM_THREADS'])\n") == 0
    assert events("learner")[0]["threads"] == "1"
    assert events("actor")[0]["threads"] == "3"


def test_children_hold_a_lifeline_and_are_spared_the_terminal_s_signals() -> None:
    hold = """
import stat
fd = int(os.environ["IMPALA_ASYNC_LIFELINE"])
note(holds=stat.S_ISFIFO(os.fstat(fd).st_mode), leads=os.getpgid(0) == os.getpid())
"""
    assert run(f"{hold}\nwait_for(lambda: count('actor'))", hold) == 0
    children = events("learner") + events("actor")
    assert [(e["holds"], e["leads"]) for e in children] == [(True, True)] * 2


def test_a_folder_that_cannot_be_written_is_a_config_error() -> None:
    Path("file").touch()
    with pytest.raises(ConfigError, match="--run-dir: cannot write to file/logs"):
        LocalRun([], URL, Path("file/logs"))
    assert psutil.Process().children() == []


def test_a_free_url_can_be_bound() -> None:
    url = free_url()
    assert url.startswith("tcp://127.0.0.1:")
    with socket.socket() as here:
        here.bind(("127.0.0.1", int(url.rpartition(":")[2])))
