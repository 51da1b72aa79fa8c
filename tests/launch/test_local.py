"""A learner and actors as real processes behind fake doors."""

import errno
import functools
import os
import re
import signal
import time
from pathlib import Path

import pytest

from impala_async import processes
from impala_async.errors import ConfigError, StartError, how_it_ended
from impala_async.launch import actors, local
from impala_async.launch.local import LocalRun
from impala_async.output import Wait
from impala_async.processes import GIVE_UP
from tests.e2e.zygote import children
from tests.launch.fake_doors import ACTOR_UNTIL_KILLED, events, make_doors, signals

LEARNER_UNTIL_TOLD = """
told = []
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, frame: told.append(number))
hear()
note(flags=sys.argv[1:])
wait_for(lambda: told)
note(signal=told[0])
sys.exit(0 if told == [signal.SIGTERM] else 130)
"""


def prepare(learner, actor=ACTOR_UNTIL_KILLED):
    make_doors(learner=learner, actor=actor)
    Path("run").mkdir(exist_ok=True)
    return LocalRun(["--flag", "1"], Path("run"))


def run(learner, actor=ACTOR_UNTIL_KILLED, num_actors=1):
    code = prepare(learner, actor).run(num_actors)
    assert children() == []
    return code


# -------------------- what each is given, and how it ends


def test_each_process_is_given_its_own(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setattr(actors, "RESTART_AFTER_S", 60.0)
    look = """
import stat
fd = int(os.environ["IMPALA_ASYNC_LIFELINE"])
note(
    flags=sys.argv[1:],
    threads=[os.environ[f"{each}_NUM_THREADS"] for each in ("MKL", "OMP")],
    # A group of its own is spared the terminal's signals.
    is_held=stat.S_ISFIFO(os.fstat(fd).st_mode) and os.getpgid(0) == os.getpid(),
)
"""
    learner = f"{look}\nwait_for(lambda: count('actor') == 3)"
    assert run(learner, f"{look}\nprint('heard')", num_actors=3) == 0
    given = events("learner") + events("actor")
    assert [(e["threads"], e["is_held"]) for e in given] == [(["1", "3"], True)] * 4
    # As long as there is a learner to wait for, an actor waits.
    flags = "--learner run --connect-s inf --over-fd FD --start"
    found = sorted(re.sub(r"(?<=-fd )\d+", "FD", " ".join(each["flags"])) for each in given)
    assert found == ["--flag 1", *(f"{flags} {number} 0 {number}" for number in range(3))]
    logs = sorted(Path("run/actors").iterdir())
    assert [log.name for log in logs] == ["actor-0.log", "actor-1.log", "actor-2.log"]
    assert [log.read_text() for log in logs] == ["heard\n"] * 3


@pytest.mark.parametrize(
    ("end", "code"),
    [("sys.exit(70)", 70), ("os.kill(os.getpid(), signal.SIGKILL)", 137)],
)
def test_the_learner_decides_the_exit_code(end, code):
    assert run(f"wait_for(lambda: count('actor') == 1)\n{end}\n") == code


def test_what_cannot_begin_is_told_in_a_line(monkeypatch):
    log = Path("run/actors/actor-0.log")
    for make, why in (
        (lambda: log.parent.touch(), "cannot write to run/actors: "),
        (lambda: log.parent.unlink() or log.mkdir(parents=True), "cannot write to run/actors/act"),
        (lambda: log.rmdir() or os.mkfifo(log), "cannot write to run/actors/actor-0.log: it is no"),
    ):
        started = prepare(LEARNER_UNTIL_TOLD)
        make()
        with pytest.raises(ConfigError, match=f"--run-dir: {re.escape(why)}"):
            started.run(1)
        assert children() == []
    monkeypatch.setattr("sys.executable", "nothing")
    with pytest.raises(StartError, match="cannot start a process of the learner: No such file"):
        LocalRun([], Path("run"))


# -------------------- actors that end before the learner


def test_a_dead_actor_is_started_again_after_a_pause(monkeypatch, caplog):
    monkeypatch.setattr(actors, "RESTART_AFTER_S", 0.2)
    actor = """
note(began=" ".join(sys.argv[-3:-1]))
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
    (again,) = (e for e in began if e["began"] in ("0 1", "1 1"))
    assert {e["began"] for e in began if e is not again} == {"0 0", "1 0"}
    assert again["at"] - death["at"] >= 0.2
    told = f" {how_it_ended(-signal.SIGKILL)}: starting it again; its log: run/actors/actor-"
    assert told in caplog.text


def test_one_that_was_at_work_for_long_is_started_again_at_once(monkeypatch, caplog):
    monkeypatch.setattr(actors, "RESTART_AFTER_S", 60.0)
    monkeypatch.setattr(actors, "QUICK_DEATH_S", 0.01)
    actor = """
print("at work", file=sys.stderr, flush=True)
note()
time.sleep(1.0)
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert run("wait_for(lambda: count('actor') == 3)", actor) == 0
    first, *_, third = (e["at"] for e in events("actor"))
    assert third - first < 10


def test_an_actor_that_was_ended_by_somebody_is_started_again_after_a_while(monkeypatch, caplog):
    monkeypatch.setattr(actors, "RESTART_AFTER_S", 0.2)
    assert run("wait_for(lambda: count('actor') == 3)", "note()") == 0
    first, second, third = (e["at"] for e in events("actor"))
    assert min(second - first, third - second) >= 0.2
    assert caplog.messages[-1] == (
        "actor 0 ended with exit code 0, though the run goes on: starting it again; "
        "its log: run/actors/actor-0.log"
    )


def test_an_actor_that_is_told_that_the_run_is_over_is_not_started_again(caplog):
    actor = """
note()
os.eventfd_write(int(sys.argv[sys.argv.index("--over-fd") + 1]), 1)
"""
    learner = """
wait_for(lambda: count("actor") == 2)
time.sleep(0.3)
"""
    assert run(learner, actor, num_actors=2) == 0
    assert len(events("actor")) == 2
    assert caplog.messages == []


def test_an_actor_that_cannot_be_started_again_yet_does_not_end_the_run(monkeypatch, caplog):
    spawn, faults = actors.spawn, [StartError("cannot start a process: Too many open files")]

    def fail_once(door, *args, **how):
        if door == "actor" and events("actor") and faults:
            raise faults.pop()
        return spawn(door, *args, **how)

    monkeypatch.setattr(actors, "spawn", fail_once)
    actor = "note()\nif count('actor') > 1: wait_for(lambda: False)\nsys.exit(2)"
    assert run("wait_for(lambda: count('actor') == 2)", actor) == 0
    cannot = "actor 0 cannot be started again yet: cannot start a process: Too many open files"
    assert caplog.messages[1:] == [f"{cannot}; still trying"]


def test_a_run_folder_that_cannot_be_read_for_now_ends_nothing(monkeypatch):
    look = os.stat

    def stale(path, **how):
        if Path(path).name == "service.json":
            raise OSError(errno.ESTALE, "Stale file handle")
        return look(path, **how)

    monkeypatch.setattr(os, "stat", stale)
    assert run("wait_for(lambda: count('actor') == 1)") == 0


@pytest.mark.parametrize("code", [77, 78])
def test_a_hopeless_actor_ends_the_run_with_its_reason(monkeypatch, code):
    said = []
    # The learner has said its last word by then.
    monkeypatch.setattr(
        local.logger, "error", lambda *line: said.append((line, len(events("learner", "signal"))))
    )
    actor = f"""
wait_for(lambda: count("learner") == 1)
print("log line\\nerror: it does not fit\\nmore", flush=True)
note()
sys.exit({code})
"""
    assert run(LEARNER_UNTIL_TOLD, actor) == code
    why = f"it ended with exit code {code} (it does not fit); its log: run/actors/actor-0.log"
    assert said == [(("%s", f"actor 0 cannot run: {why}"), 1)]
    assert [e["signal"] for e in events("learner", "signal")] == [signal.SIGTERM]
    assert len(events("actor")) == 1


def test_an_actor_that_could_be_made_before_gets_another_try(monkeypatch):
    monkeypatch.setattr(actors, "RESTART_AFTER_S", 0.05)
    actor = """
note()
if count("actor") > 2:
    wait_for(lambda: False)
sys.exit([2, 78][count("actor") - 1])
"""
    assert run("wait_for(lambda: count('actor') == 3)", actor) == 0


HOPELESS = 'wait_for(lambda: count("learner") == 1)\nsys.exit(78)\n'


def test_a_learner_that_serves_is_told_that_its_run_is_given_up():
    numbers = "(signal.SIGTERM, signal.SIGINT"
    learner = LEARNER_UNTIL_TOLD.replace(numbers, f"{numbers}, {int(GIVE_UP)}")
    assert run(learner.replace("hear()", "serve()\nhear()"), HOPELESS) == 78
    assert [e["signal"] for e in events("learner", "signal")] == [GIVE_UP]


def test_a_learner_that_does_not_end_when_the_run_is_given_up_is_killed(monkeypatch):
    monkeypatch.setattr(local, "LEARNER_END_S", 0.1)
    monkeypatch.setattr("impala_async.launch.children.ASKED_END_S", 0.1)
    learner = """
signal.signal(signal.SIGTERM, lambda *_: note(told=True))
note(began=True)
wait_for(lambda: False)
"""
    assert run(learner, HOPELESS) == 78
    assert events("learner", "told")


@pytest.mark.parametrize(
    ("end", "code", "why"),
    [
        ("os.abort()", 134, "it died of SIGABRT (it said nothing)"),
        # A start that lasts longer than any death that is called quick is no life.
        ("time.sleep(0.5)\nprint('error: it raised', flush=True)\nsys.exit(2)", 2, "(it raised)"),
    ],
)
def test_an_actor_that_dies_quickly_again_and_again_ends_the_run(
    monkeypatch, caplog, end, code, why
):
    monkeypatch.setattr(actors, "QUICK_DEATH_S", 0.4)
    monkeypatch.setattr(actors, "MAX_QUICK_DEATHS", 2)
    started = prepare(LEARNER_UNTIL_TOLD, f'wait_for(lambda: count("learner"))\nnote()\n{end}\n')
    assert started.run(1) == code
    assert started.verdict
    assert len(events("actor")) == 3
    last = caplog.messages[-1]
    assert last.startswith("actor 0 cannot run: ")
    assert why in last
    assert last.endswith("; its log: run/actors/actor-0.log")


@pytest.mark.parametrize(("most", "quick_s"), [(0, 0.05), (5, 10.0)])
def test_an_actor_that_lived_for_a_while_or_died_not_often_gets_another_try(
    monkeypatch, caplog, most, quick_s
):
    monkeypatch.setattr(actors, "MAX_QUICK_DEATHS", most)
    monkeypatch.setattr(actors, "QUICK_DEATH_S", quick_s)
    actor = """
note()
print("error: the simulator crashed", flush=True)
time.sleep(0.3)
sys.exit(2)
"""
    assert run("wait_for(lambda: count('actor') == 3)", actor) == 0
    assert caplog.text.count("actor 0 ended with exit code 2 (the simulator crashed)") == 2
    assert "cannot run" not in caplog.text


# -------------------- signals


def are_noted(most):
    return lambda n: len(events("learner")) + len(events("actor")) == most


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_reaches_the_learner_once_and_the_actors_end_with_it(monkeypatch, number, code):
    monkeypatch.setattr(local, "GOODBYE_S", 5.0)
    actor = "signal.signal(signal.SIGINT, lambda *_: note(interrupted=True))\n" + ACTOR_UNTIL_KILLED
    before = signal.getsignal(number)
    started = time.monotonic()
    with signals(number, when=are_noted(3)):
        assert run(LEARNER_UNTIL_TOLD, actor, num_actors=2) == code
    # Not waited for: they think that the learner comes back.
    assert time.monotonic() - started < local.GOODBYE_S
    assert [e["signal"] for e in events("learner", "signal")] == [number]
    assert events("actor", "interrupted") == []
    assert signal.getsignal(number) is before


def test_nobody_is_started_again_once_the_run_is_told_to_end(monkeypatch, caplog):
    learner = """
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
note()
wait_for(lambda: told)
open("told", "x").close()
wait_for(lambda: count("actor") == 4)
time.sleep(0.2)
"""
    actor = """
note()
wait_for(Path("told").exists)
note()
sys.exit(78 * (count("actor") % 2))
"""
    with signals(signal.SIGTERM, when=are_noted(3)):
        assert run(learner, actor, num_actors=2) == 0
    assert len(events("actor")) == 4
    assert caplog.messages == []


STARTS = """
note()
wait_for(lambda: signal.SIGINT in signal.sigpending())
signal.signal(signal.SIGINT, lambda number, frame: sys.exit(130))
hear()
"""


@pytest.mark.parametrize(
    ("learner", "number", "code"),
    [("note()\ntime.sleep(30)", signal.SIGTERM, 0), (STARTS, signal.SIGINT, 130)],
)
def test_a_learner_that_only_starts_ends_as_it_was_asked_to(learner, number, code):
    with signals(number, when=lambda n: len(events("learner")) == 1):
        assert run(learner) == code


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (signal.SIGINT, signal.SIGINT),
        (signal.SIGTERM, signal.SIGINT),
        # It leaves the learner its time.
        (signal.SIGTERM, signal.SIGTERM),
    ],
)
def test_a_second_signal_reaches_the_learner_too(monkeypatch, first, second):
    monkeypatch.setattr(local, "QUIT_S", 0.0 if second == signal.SIGTERM else 3.0)
    learner = """
signals = []

def take(number, frame):
    signals.append(number)
    note(signal=number)

signal.signal(signal.SIGINT, take)
signal.signal(signal.SIGTERM, take)
hear()
note()
wait_for(lambda: len(signals) == 2)
time.sleep(0.2)
sys.exit(130)
"""
    with signals(first, second, when=lambda n: len(events("learner")) == n + 1):
        assert run(learner) == 130
    assert [e["signal"] for e in events("learner", "signal")] == [first, second]


def test_an_echo_of_ctrl_c_is_no_second_one(monkeypatch):
    """Supervisors send it to a process, and to its group."""
    monkeypatch.setattr(processes, "ECHO_S", 60.0)
    monkeypatch.setattr(local, "QUIT_S", 0.0)
    learner = LEARNER_UNTIL_TOLD.replace("sys.exit", "time.sleep(0.2)\nnote(told=told)\nsys.exit")
    with signals(*[signal.SIGINT] * 2, when=lambda n: len(events("learner")) == n + 1):
        assert run(learner) == 130
    assert [e["told"] for e in events("learner", "told")] == [[signal.SIGINT]]


@pytest.mark.parametrize("does", ["serve()", "# only starts"])
def test_a_second_ctrl_c_kills_a_learner_that_does_not_answer(monkeypatch, caplog, does):
    """It may be stopped, or hold the interpreter's lock."""
    monkeypatch.setattr(local, "QUIT_S", 0.2)
    monkeypatch.setattr(local, "Wait", functools.partial(Wait, after_s=0.0))
    learner = f"""
{does}
note()
os.kill(os.getpid(), signal.SIGSTOP)
wait_for(lambda: False)
"""
    stubborn = "signal.signal(signal.SIGTERM, lambda *_: None)\n" + ACTOR_UNTIL_KILLED
    ready = ["actor", "has not answered yet"]
    with signals(
        *[signal.SIGINT] * 2,
        when=lambda n: bool(events(ready[n]) and events("learner")) or ready[n] in caplog.text,
    ):
        assert run(learner, stubborn) == 130
    told = [text for text in caplog.messages if not text.startswith("starting: ")]
    assert "waiting for the learner, which has not answered yet (0 s); press Ctrl-C" in told[0]


def test_a_start_that_is_waited_for_is_told(monkeypatch):
    for waiting in (local, actors):
        monkeypatch.setattr(waiting, "Wait", functools.partial(Wait, after_s=0.0))
    learner = """
wait_for(lambda: count("actor") == 2)
wait_for(Path("told").exists)
serve()
"""
    said = []

    def say(text):
        said.append(text.partition(" (")[0])
        Path("told").touch()

    for telling in (local, actors):
        monkeypatch.setattr(telling.logger, "info", say)
    assert run(learner, ACTOR_UNTIL_KILLED, num_actors=2) == 0
    assert said[0].startswith("starting: waiting for the learner, which loads torch, tries ")
    assert said[-1] == "ending: waiting for the actors"
