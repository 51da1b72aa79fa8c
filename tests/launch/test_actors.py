"""Actors as real processes behind a fake door; how `train` has them, tests/launch/test_local.py
tells."""

import time
from pathlib import Path

import pytest

from impala_async.errors import how_it_ended
from impala_async.launch.actors import Actors, _Actor, logger
from impala_async.launch.logs import EchoedLog, LogFile
from impala_async.output import Wait
from impala_async.processes import Lifeline
from tests.e2e.zygote import children
from tests.launch.fake_doors import events, make_doors

IS_OVER = 'os.eventfd_write(int(sys.argv[sys.argv.index("--over-fd") + 1]), 1)'
WITHIN_S = 30.0


@pytest.fixture
def begin():
    """Begins some actors that do this; all have ended when the test has."""
    lifeline, begun = Lifeline(), []

    def begin(actor, num=2, **how):
        make_doors(actor=actor)
        logs = [EchoedLog(f"actor {number}") for number in range(num)]
        begun.append(Actors("tcp://host:1", logs, lifeline, **how))
        return begun[-1]

    yield begin
    for actors in begun:
        actors.end(0.0, lambda: True)
    lifeline.close()
    assert children() == []


def look_until(actors, is_so):
    give_up_at = time.monotonic() + WITHIN_S
    while not is_so():
        assert time.monotonic() < give_up_at
        actors.look()
        time.sleep(0.005)


def test_those_that_say_nothing_yet_are_told_of(begin, caplog):
    caplog.set_level("INFO")
    actors = begin(
        'wait_for(Path("speak").exists)\nprint("a word", flush=True)\nwait_for(lambda: 0)'
    )
    actors._start_wait = Wait(logger.info, after_s=0.0)
    look_until(actors, lambda: all(each.process for each in actors._actors))
    actors.tell_starts()
    assert caplog.messages[-1] == (
        "starting: waiting for actor 0 and 1 more, which loads torch (0 s)"
    )
    Path("speak").touch()
    look_until(actors, lambda: all(each.spoke_at for each in actors._actors))
    caplog.clear()
    actors.tell_starts()
    assert caplog.messages == []


@pytest.mark.parametrize("has_numbers", [True, False])
def test_actors_of_several_hosts_have_no_numbers_but_count_their_lives(begin, has_numbers):
    """The learner would give two of one number the same seed."""
    actors = begin("note(flags=sys.argv[1:])\nsys.exit(75)", has_numbers=has_numbers)
    # That among those of its host each one has.
    numbers = [("0", "0"), ("1", "1")] if has_numbers else [("-1", "0"), ("-1", "1")]
    wanted = {(number, life, local) for number, local in numbers for life in ("0", "1")}

    def all_flags():
        return [each["flags"] for each in events("actor")]

    look_until(
        actors, lambda: {tuple(f[f.index("--start") + 1 :][:3]) for f in all_flags()} >= wanted
    )
    begun = ["--learner", "tcp://host:1", "--connect-s", "inf"]
    assert all(flags[:4] == begun for flags in all_flags())


def test_nobody_is_started_again_once_one_was_told_that_the_run_is_over(begin, capsys):
    actors = begin(f"note()\nif count('actor') == 2: {IS_OVER}\nelse: wait_for(lambda: False)")
    look_until(actors, lambda: actors.is_over)
    assert len(events("actor")) == 2
    for _ in range(50):
        actors.look()
        time.sleep(0.005)
    assert len(events("actor")) == 2
    assert actors.verdict is None


def test_one_that_was_killed_is_back_and_all_say_their_words_here(begin, caplog, capsys):
    actors = begin("""
note()
print("at work", flush=True)
try:
    open("victim", "x").close()
except FileExistsError:
    wait_for(lambda: False)
os.abort()
""")
    look_until(actors, lambda: len(events("actor")) == 3)
    (told,) = caplog.messages
    how = r"died of SIGABRT (the last line of its log: at work): starting it again"
    assert told[8:] == f"{how}; its words are above"
    said = []
    look_until(
        actors,
        lambda: said.append(capsys.readouterr().err) or "".join(said).count(": at work\n") == 3,
    )


def test_one_that_does_not_fit_at_its_first_start_is_the_verdict(begin):
    actors = begin("note()\nprint('error: other spaces')\nsys.exit(78)", num=1)
    look_until(actors, lambda: actors.verdict)
    why = "it ended with exit code 78 (other spaces); its words are above"
    assert actors.verdict == (78, f"actor 0 cannot run: {why}")
    actors.look()
    assert len(events("actor")) == 1


@pytest.mark.parametrize(
    ("ends", "code"), [("os._exit(3)", 2), ("os._exit(0)", 2), ("sys.exit(75)", 75)]
)
def test_a_code_of_an_environment_s_own_is_none_of_ours(begin, monkeypatch, ends, code):
    monkeypatch.setattr("impala_async.launch.actors.MAX_QUICK_DEATHS", 0)
    actors = begin(f"note()\n{ends}", num=1)
    look_until(actors, lambda: actors.verdict)
    assert actors.verdict[0] == code


def test_nobody_is_started_while_all_are_to_end(begin):
    actors = begin("note()")
    actors.is_ending = True
    actors.look()
    assert children() == []


INFO, WARNING = "03:52:22 INFO back at work", "03:52:22 WARNING in step for 12 s"


def test_last_words_are_told_where_they_may_be_a_reason(tmp_path):
    log = tmp_path / "log"
    for said, code, how in (
        ("", -11, "died of SIGSEGV (it said nothing)"),
        (INFO, -11, "died of SIGSEGV (it said nothing)"),
        (f"no GL\n{INFO}", -11, "died of SIGSEGV (the last line of its log: no GL)"),
        (WARNING, -11, f"died of SIGSEGV (the last line of its log: {WARNING})"),
        (f"error: no such world\n{WARNING}", 78, "ended with exit code 78 (no such world)"),
        # It may be its environment's, and no reason.
        ("ep 7", 78, "ended with exit code 78 (the last line of its log: ep 7)"),
        ("error: it raised", -9, how_it_ended(-9)),
        ("x" * 9999, 1, f"ended with exit code 1 (the last line of its log: {'x' * 300})"),
    ):
        log.write_text("error: of the life before\n")
        actor = _Actor(0, LogFile(log, "--log-dir"), 0)
        with actor.log.open() as file:
            file.write(said.encode())
        assert actor.how_it_ended(code) == how
    # No more is read of a long log than its end.
    log.write_text("error: it began\n" + "word " * 14_000)
    assert "it began" not in _Actor(0, LogFile(log, "--log-dir"), 0).how_it_ended(1)
