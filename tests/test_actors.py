"""The actors door, with real processes behind a fake door of the actor."""

import signal
import time
from pathlib import Path

import pytest

from impala_async import actors as door
from impala_async import processes
from impala_async.launch import actors
from tests.e2e.zygote import children
from tests.launch.fake_doors import ACTOR_UNTIL_KILLED, events, make_doors, signals

IS_OVER = 'os.eventfd_write(int(sys.argv[sys.argv.index("--over-fd") + 1]), 1)'
STUBBORN = f"signal.signal(signal.SIGTERM, lambda *_: note(told=True))\n{ACTOR_UNTIL_KILLED}"


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(actors, "RESTART_AFTER_S", 0.02)
    monkeypatch.setattr(processes, "ECHO_S", 0.0)
    Path("events").touch()


def run(actor, *flags):
    make_doors(actor=actor)
    code = door.main(["--learner", "tcp://host:1", *flags])
    assert children() == []
    return code


def test_it_ends_well_when_the_run_is_over_and_lets_the_others_say_goodbye(monkeypatch):
    monkeypatch.setattr(door, "GOODBYE_S", 30.0)
    actor = f"""
note()
wait_for(lambda: count("actor") >= 3)
{IS_OVER}
time.sleep(0.2)
note(ended=True)
"""
    assert run(actor, "--num", "3") == 0
    assert len(events("actor", "ended")) == 3


def test_one_is_the_default_and_one_that_dies_is_started_again(capsys):
    actor = f"note()\nprint('at work', flush=True)\nif count('actor') < 3: os.abort()\n{IS_OVER}"
    assert run(actor) == 0
    assert len(events("actor")) == 3
    assert capsys.readouterr().err.count("actor 0: at work\n") == 3


def test_one_that_cannot_run_ends_all_with_its_code_and_its_reason(caplog):
    actor = """
note()
wait_for(lambda: count("actor") == 2)
try:
    open("victim", "x").close()
except FileExistsError:
    wait_for(lambda: False)
print("error: other spaces", flush=True)
sys.exit(78)
"""
    assert run(actor, "--num", "2", "--log-dir", "all/logs") == 78
    assert caplog.messages[-1].partition(" cannot run: ")[2] in [
        f"it ended with exit code 78 (other spaces); its log: all/logs/actor-{number}.log"
        for number in range(2)
    ]
    assert sorted(path.name for path in Path("all/logs").iterdir()) == [
        "actor-0.log",
        "actor-1.log",
    ]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 0), (signal.SIGHUP, 0), (signal.SIGINT, 130)]
)
def test_a_signal_ends_all_and_is_told_by_the_exit_code(number, code):
    if number not in processes.REQUESTS:
        pytest.skip("it is ignored, as nohup has it")
    with signals(number, when=lambda n: len(events("actor")) == 2):
        assert run(ACTOR_UNTIL_KILLED, "--num", "2") == code
    assert len(events("actor")) == 2


def test_a_second_signal_waits_for_nobody(monkeypatch):
    monkeypatch.setattr("impala_async.launch.children.ASKED_END_S", 60.0)
    started = time.monotonic()
    with signals(*[signal.SIGTERM] * 2, when=lambda n: len(events("actor")) == n + 1):
        assert run(STUBBORN) == 0
    assert time.monotonic() - started < 15.0


def test_a_log_that_cannot_be_opened_is_one_line(capsys):
    Path("logs").touch()
    assert run(ACTOR_UNTIL_KILLED, "--log-dir", "logs") == 2
    assert capsys.readouterr().err == "error: --log-dir: cannot write to logs: File exists\n"
