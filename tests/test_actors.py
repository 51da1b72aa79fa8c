"""The actors door, with real processes behind a fake door of the actor."""

import signal
import time
from pathlib import Path

import pytest

from impala_async import actors as door
from impala_async import processes
from impala_async.config.load import validate_config
from impala_async.launch import actors
from impala_async.runs import start
from impala_async.runs.folder import RunFolder
from tests.e2e.zygote import children
from tests.launch.fake_doors import ACTOR_UNTIL_KILLED, events, make_doors, signals

IS_OVER = 'os.eventfd_write(int(sys.argv[sys.argv.index("--over-fd") + 1]), 1)'
STUBBORN = f"signal.signal(signal.SIGTERM, lambda *_: note(told=True))\n{ACTOR_UNTIL_KILLED}"


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(actors, "RESTART_AFTER_S", 0.02)
    monkeypatch.setattr(processes, "ECHO_S", 0.0)
    monkeypatch.setattr(door, "POLL_S", 0.005)
    Path("events").touch()


def run(actor, *flags, learner="tcp://host:1"):
    make_doors(actor=actor)
    code = door.main(["--learner", learner, *flags])
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


def test_it_says_at_once_how_many_it_starts_and_for_whom(caplog):
    caplog.set_level("INFO")
    assert run(IS_OVER, "--num", "3") == 0
    assert caplog.messages[0] == "starting 3 actors for the learner at tcp://host:1"


@pytest.fixture
def make_run():
    """Makes a run folder whose last learner came to so many of ten updates."""

    def make(updates):
        folder = RunFolder(Path("run").absolute())
        folder.path.mkdir(exist_ok=True)
        config = validate_config({"env": {"id": "CartPole-v1"}, "stop": {"updates": 10}}, {})
        folder.write_settings(config, run_id="0" * 32)
        folder.write_json("summary.json", {"updates": updates, "exit_reason": "updates"})
        return folder

    return make


def test_where_the_run_is_over_it_says_so_and_ends_well(make_run, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr(door, "LATER_END_S", 0.2)
    make_run(updates=10)
    assert run(ACTOR_UNTIL_KILLED, learner="./run") == 0
    assert caplog.messages[1:] == [
        "the run in run is over: ending in 0 s, unless a learner goes on with it",
        "the run is over",
    ]


@pytest.mark.parametrize("how", ["it was ended early", "a later end", "a learner serves"])
def test_a_run_that_goes_on_is_waited_for(how, make_run, monkeypatch):
    monkeypatch.setattr(door, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(door, "LATER_END_S", 0.0 if how == "it was ended early" else 0.5)
    folder = make_run(updates=9 if how == "it was ended early" else 10)
    asked = []

    def is_over(folder):
        asked.append(folder)
        return look(folder)

    def goes_on(n):
        if len(asked) < 3 or not events("actor"):
            return False
        if how == "a later end":  # as a learner does when it is built
            folder.remove("summary.json")
        elif how == "a learner serves":
            folder.write_json("service.json", {})
        return len(asked) > 100

    look = start.is_over
    monkeypatch.setattr(start, "is_over", is_over)
    with signals(signal.SIGTERM, when=goes_on):
        assert run(ACTOR_UNTIL_KILLED, learner=str(folder.path)) == 0
    assert len(asked) > 100


def test_a_log_that_cannot_be_opened_is_one_line(capsys):
    Path("logs").touch()
    assert run(ACTOR_UNTIL_KILLED, "--log-dir", "logs") == 2
    assert capsys.readouterr().err == (
        "error: --log-dir: cannot write to logs: logs is a file, and a folder is wanted\n"
    )
