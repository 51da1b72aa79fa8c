import argparse
import errno
import functools
import importlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import zmq

from impala_async import __version__, doors, errors, processes
from impala_async.__main__ import DOORS
from impala_async.actor import __main__ as actor_door
from impala_async.actor.client import NewRun
from impala_async.config.load import load_config
from impala_async.config.run import RunConfig
from impala_async.errors import ConfigError, RunOver
from impala_async.output import Wait
from impala_async.processes import Interrupted
from impala_async.runs.start import RunFlags, check_run
from tests.test_errors import EXIT_CODES

ROOT = Path(__file__).resolve().parents[1]
RUN_FLAGS = {"--config", "--set", "--run-dir", "--resume", "--record"}
# Others call these: a flag that goes or comes is a decision, and this line is where it is made.
FLAGS = {
    "train": RUN_FLAGS | {"--seeds"},
    "learner": RUN_FLAGS,
    "actor": {"--learner", "--num-envs", "--connect-s"},
    "actors": {"--learner", "--num", "--log-dir"},
    "launch": set(),  # those of its engines: tests/launch/test_main.py
    "replay": {"--exact", "--loop", "--set", "--run-dir"},
    "evaluate": {
        *("--episodes", "--max-steps", "--seeds", "--greedy", "--sampled", "--json", "--video"),
    },
    "export": {"--onnx", "--torch", "--policy"},
}


def parse(*flags):
    parser = argparse.ArgumentParser()
    doors.add_run_flags(parser)
    return parser.parse_args(flags)


def given(*flags):
    return doors.run_flags_of(parse(*flags))


# -------------------- flags


@pytest.mark.parametrize("door", DOORS)
def test_flags_are_frozen_and_each_door_says_its_command_and_version(door, monkeypatch, capsys):
    def said(*flags, typed=f"/somewhere/impala_async/{door}.py"):
        monkeypatch.setattr("sys.argv", [typed, *flags])
        with pytest.raises(SystemExit) as end:
            importlib.import_module(DOORS[door][0]).main(flags)
        assert end.value.code == 0
        return capsys.readouterr().out

    shown, _, options = said("--help").partition("options:")
    assert shown.startswith(f"usage: python -m impala_async.{door} ")
    # An installed package has no checkout.
    assert re.findall(r"[\w/]+\.(?:md|toml|py)\b", shown + options) == []
    found = re.findall(r"(?<![\w-])-{1,2}[a-z][a-z-]*", options)
    assert set(found) == FLAGS[door] | {"-h", "--help", "--version"}
    console = said("--help", typed="/usr/bin/impala-async")
    assert console.startswith(f"usage: impala-async {door} ")
    assert said("--version") == f"impala-async {__version__}\n"


_MAIN = """
import importlib, json, sys
for module, flags in json.loads(sys.argv[1]):
    try:
        code = importlib.import_module(module).main(flags)
    except SystemExit as end:
        code = end.code
    print(code, "torch" in sys.modules)
"""
WRONG = [
    ("train", ["--set", "no.such=1"]),
    ("train", ["--config", "/nowhere.toml"]),
    ("train", ["--resume"]),
    ("train", ["--resume", "auto"]),
    ("train", ["--run-dir", "/proc/nowhere"]),
    ("learner", ["--run-dir", "/nowhere", "--resume"]),
    ("actor", ["--learner", "somewhere"]),
    ("actor", ["--learner", "tcp://h:1", "--num-envs", "0"]),
    ("actor", ["--learner", "tcp://h:1", "--connect-s", "-1"]),
    ("actor", []),
    ("actors", ["--learner", "tcp://h:1", "--num", "0"]),
    ("actors", ["--learner", "somewhere"]),
    ("launch", ["slurm", "--nodes", "2"]),
    ("learner", ["--record", "/proc/x", "--set", "env.id=CartPole-v1", "--run-dir", "r"]),
    ("replay", ["/nowhere"]),
    ("replay", ["/", "--exact", "--loop"]),
    ("evaluate", ["/nowhere"]),
    ("evaluate", ["/", "--episodes", "0"]),
    ("evaluate", ["/"]),
]


def test_what_is_wrong_with_flags_is_told_before_torch_is_loaded(tmp_path):
    calls = json.dumps([(DOORS[door][0], flags) for door, flags in WRONG])
    answer = subprocess.run(
        [sys.executable, "-c", _MAIN, calls],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
    )
    assert answer.stdout.splitlines() == ["2 False"] * len(WRONG), answer.stderr
    assert "Traceback" not in answer.stderr
    assert len(re.findall("error: ", answer.stderr)) == len(WRONG)
    assert list(tmp_path.iterdir()) == []


def test_seeds_are_a_range_or_a_list():
    for text, seeds in (("3", [3]), ("0-2", [0, 1, 2]), ("5, 1-2,5", [5, 1, 2])):
        assert doors.seeds_of(text) == seeds
    for text in ("", "-1", "2-1", "0-1000", "0-999,1000", "1,,2", "a", "1.5", "9999999999"):
        with pytest.raises(argparse.ArgumentTypeError, match=r"such as 0-4 or 0,2,5"):
            doors.seeds_of(text)


def test_a_setting_as_a_flag_and_a_flag_given_twice_are_told(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("mine").mkdir()
    Path("mine/cartpole.toml").touch()
    parser = doors.new_parser("train", "")
    doors.add_run_flags(parser)
    for flags, told in (
        ("--seed 1", "did you mean --set seed=VALUE?"),
        ("--lr 1e-3 --ent-coef=0.1", "did you mean --set algorithm.lr=VALUE?"),
        ("env.id=CartPole-v1", "did you mean --set env.id=VALUE?"),
        ("CartPole-v1 --seed=1", "did you mean --set env.id=CartPole-v1?"),
        ("my.games:Chess", "did you mean --set env.id=my.games:Chess?"),
        ("cartpole_pp", "did you mean --config cartpole_ppo?"),
        ("mine/cartpole.toml", "did you mean --config mine/cartpole.toml?"),
        ("--xyzzy 7", "unrecognized arguments: --xyzzy 7"),
        ("xyzzy", "unrecognized arguments: xyzzy"),
        # argparse would drop the first value.
        ("--record a --record=b", "argument --record: is given 2 times"),
        ("--run-dir=", "argument --run-dir: wants a path, got nothing"),
    ):
        with pytest.raises(SystemExit) as end:
            parser.parse_args(flags.split())
        assert end.value.code == 2, flags
        assert capsys.readouterr().err.rstrip().endswith(told), flags


def test_a_key_in_the_environment_that_is_none_is_told_before_anything_starts(monkeypatch):
    monkeypatch.setenv("IMPALA_ASYNC_KEY", "secret")
    with pytest.raises(ConfigError, match="IMPALA_ASYNC_KEY: wants 64 hexadecimal digits"):
        doors.check_learner("tcp://h:5")


def test_where_a_learner_may_be():
    for url in (
        "runs/it-will-be-here",
        "/shared/run",
        "./run",
        "runs/run:1",
        "tcp://h:1",
        "tcp://10.0.0.1:65535",
        "tcp://[::1]:5555",
    ):
        doors.check_learner(url)
    meant = {"h:1": "tcp://h:1", "5555": "tcp://127.0.0.1:5555"}
    meant |= dict.fromkeys(("tcp:/h:1", "h:1/", "tcp://h:1/"), "tcp://h:1")
    nowhere = ("*:5", "a,b:5", "h;h:5", "_h:5", "é:5", "h", "h:0", "h:65536")
    for url in (*meant, *(f"tcp://{each}" for each in nowhere), "*:5", "ipc://x", ""):
        with pytest.raises(ConfigError, match=r"^--learner: wants tcp://HOST:PORT") as caught:
            doors.check_learner(url)
        told = f"; did you mean {meant[url]}?" if url in meant else repr(url)
        assert str(caught.value).endswith(told)


# -------------------- ends


BUG = "error: this is a bug of impala-async; please report it with the lines above"
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a-file")
ENDS = [
    *((getattr(errors, name)("first\nsecond"), code, ["error: first", "error: second"])
      for name, code in EXIT_CODES.items() if code != 0),
    (RunOver("first\nsecond"), 0, ["first", "second"]),
    (KeyboardInterrupt(), 130, ["interrupted"]),
    (Interrupted(signal.SIGTERM), 0, ["terminated"]),
    (FULL, 75, ["error: [Errno 28] No space left on device: 'a-file'"]),
    (zmq.ZMQError(errno.EMFILE), 75, ["error: Too many open files"]),
    (MemoryError("Unable to allocate 4 GiB"), 75, ["error: Unable to allocate 4 GiB"]),
    (MemoryError(), 75, ["error: no memory is left"]),
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.\nSee the docs"), 75,
     ["error: CUDA out of memory. Tried to allocate 1 GiB. See the docs"]),
    (RuntimeError("CUDA error: out of memory"), 75, ["error: CUDA error: out of memory"]),
    (OSError(errno.ENOMEM, "Cannot allocate memory"), 75,
     ["error: [Errno 12] Cannot allocate memory"]),
    (RuntimeError("can't start new thread"), 75, ["error: can't start new thread"]),
    (ImportError("libtorch_cpu.so: failed to\nmap segment"), 2,
     ["error: a package that this needs cannot be loaded: ImportError: libtorch_cpu.so: failed to "
      "map segment"]),
    (ImportError("cannot import name 'x' from 'impala_async.policy'", name="impala_async.policy"),
     70, [BUG]),
    (ImportError("no 'x' in 'numpy' (/impala_async/.venv/x.py)", name="numpy"), 2,
     ["error: a package that this needs cannot be loaded: ImportError: no 'x' in 'numpy' "
      "(/impala_async/.venv/x.py)"]),
    (KeyError("x"), 70, [BUG]),
    # As the name of a tensor in somebody else's checkpoint may have it.
    (errors.CheckpointError("x.pt: '\x1b[2J\x07'"), 2, [r"error: x.pt: '\x1b[2J\x07'"]),
]  # fmt: skip


@pytest.mark.parametrize(("error", "code", "last"), ENDS)
def test_a_door_ends_with_the_code_and_the_words_of_its_error(error, code, last, capsys):
    def body():
        raise error from ZeroDivisionError("the cause")

    assert doors.run_door(body) == code
    said = capsys.readouterr()
    assert said.out == ""
    lines = said.err.splitlines()
    assert lines[-len(last) :] == last
    # An environment that hangs is no bug of ours. A bug is told with its cause.
    is_bug = code == 70 and not isinstance(error, errors.EnvHangsError)
    assert ("ZeroDivisionError: the cause" in said.err) == ("Traceback" in said.err) == is_bug
    assert is_bug or lines == last


def test_a_door_does_not_open_in_another_thread_than_the_main_one(capsys):
    with ThreadPoolExecutor() as pool:
        assert pool.submit(doors.run_door, lambda: 0).result() == 2
    assert capsys.readouterr().err == (
        "error: a door opens in a main thread, which hears signals: start a process\n"
    )


def test_a_broken_pipe_is_no_bug_where_nobody_reads_any_more(monkeypatch, capsys):
    def broken():
        raise BrokenPipeError

    reader, writer = os.pipe()
    with open(writer, "w") as stdout:
        monkeypatch.setattr("sys.stdout", stdout)
        assert doors.run_door(broken) == 70
        os.close(reader)
        assert doors.run_door(broken) == 0


def test_an_error_is_told_though_the_streams_were_taken_away(monkeypatch, capsys):
    def take(error):
        sys.stdout = sys.stderr = None
        raise error

    full = OSError(errno.ENOSPC, "No space left on device")
    told = (errors.ConfigError("wrong"), 2), (errors.RunOver("over"), 0), (full, 75)
    for error, code in (*told, (BrokenPipeError(), 70)):
        monkeypatch.setattr("sys.stdout", sys.stdout)
        monkeypatch.setattr("sys.stderr", sys.stderr)
        assert doors.run_door(lambda error=error: take(error)) == code
        monkeypatch.undo()
        assert str(error) in capsys.readouterr().err


def test_the_last_words_go_through_the_stream_that_waits_for_no_reader(monkeypatch):
    first, unhurried = io.StringIO(), io.StringIO()
    monkeypatch.setattr("sys.stderr", first)

    def body():
        sys.stderr = unhurried
        raise errors.ConfigError("wrong")

    assert doors.run_door(body) == 2
    assert (first.getvalue(), unhurried.getvalue()) == ("", "error: wrong\n")


def test_output_that_is_full_does_not_change_the_end(monkeypatch):
    def say():
        print("a word")
        return 75

    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        assert doors.run_door(say) == 75


# -------------------- settings


def test_the_command_and_all_configs_are_packaged_and_found_by_name(tmp_path, monkeypatch, capsys):
    package = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert package["project"]["scripts"] == {"impala-async": "impala_async.__main__:console"}
    build = package["tool"]["hatch"]["build"]
    assert build["targets"]["wheel"]["force-include"] == {"configs": "impala_async/configs"}
    assert {path.name for path in doors.packaged_configs().values()} == {
        path.name for path in ROOT.glob("configs/*.toml")
    }
    monkeypatch.chdir(tmp_path)
    assert parse("--config", "cartpole_ppo").config == doors.packaged_configs()["cartpole_ppo"]
    Path("cartpole_ppo").touch()
    assert parse("--config", "cartpole_ppo").config == Path("cartpole_ppo")
    for name in ("cartpol", "configs/cartpole.toml"):
        with pytest.raises(SystemExit):
            parse("--config", name)
        assert f"no file {name}; did you mean cartpole?" in capsys.readouterr().err
    # It may be meant to be there: whoever reads it says that it is not.
    assert parse("--config", "nosuch.toml").config == Path("nosuch.toml")
    assert parse("--config", 300 * "n").config == Path(300 * "n")  # nor can it be looked for


def test_without_a_config_an_env_gets_generic_settings(tmp_path, monkeypatch):
    flags = given("--set", "env.id=Acrobot-v1", "--run-dir", str(tmp_path / "run"))
    config, folder = check_run(flags)
    assert config == RunConfig.model_validate({"env": {"id": "Acrobot-v1"}})
    assert folder.path == tmp_path / "run"
    assert not folder.path.exists()
    config, folder = check_run(given("--config", "cartpole", "--set", "seed=7"))
    assert config == load_config(doors.packaged_configs()["cartpole"], ["seed=7"])
    assert folder.path.parent == Path("runs")
    # A home folder is found behind an equals sign, too.
    monkeypatch.setenv("HOME", str(tmp_path))
    assert parse("--run-dir=~/run").run_dir == tmp_path / "run"
    assert parse("--run-dir=~nobody-at-all/run").run_dir == Path("~nobody-at-all/run")


def test_the_flags_of_a_run_say_whether_it_goes_on_and_who_decides_that():
    assert given() == RunFlags()
    assert given("--resume") == RunFlags(is_resumed=True)
    assert given("--resume", "auto") == RunFlags(is_auto=True)
    assert given("--record", "x").record == Path("x")


# -------------------- this start


@pytest.fixture
def at_once(monkeypatch):
    """Waits are told of at once."""
    monkeypatch.setattr("impala_async.output.LOOK_EVERY_S", 0.001)
    monkeypatch.setattr("impala_async.output.Wait", functools.partial(Wait, after_s=0.0))


def test_an_actor_is_told_its_number_and_says_where_it_is_asked_that_the_run_is_over(monkeypatch):
    done = []

    class FakeService:
        is_finished = True

        def __init__(self, learner, *, start, **more):
            done.append((learner, start))

        def run(self):
            return 0

    monkeypatch.setattr("impala_async.actor.service.ActorService", FakeService)
    url, over = "tcp://127.0.0.1:9", os.eventfd(0, os.EFD_NONBLOCK)
    flags = ["--learner", url, "--over-fd", str(over)]
    assert actor_door.main(flags[:2]) == 0
    assert actor_door.main([*flags, "--start", "7", "2", "3"]) == 0
    assert done == [(url, (-1, 0, 0)), (url, (7, 2, 3))]
    assert os.eventfd_read(over) == 1
    monkeypatch.setattr(FakeService, "is_finished", False)
    assert actor_door.main(flags) == 0
    with pytest.raises(BlockingIOError):
        os.eventfd_read(over)
    os.close(over)


def test_an_actor_imports_all_anew_for_another_run(monkeypatch, tmp_path):
    """Its code may be another by now. It lies where the actor was started."""
    begun = []

    class FakeService:
        is_told, exit_code = False, 130

        def __init__(self, url, **more):
            pass

        @property
        def is_told_to_end(self):
            begun.append("looked")
            return self.is_told

        def run(self):
            os.chdir("/")
            raise NewRun

    def begin(program, command):
        begun.append((program, command, Path.cwd()))
        raise SystemExit  # no program goes on behind it

    monkeypatch.setattr("impala_async.actor.service.ActorService", FakeService)
    monkeypatch.setattr(os, "execv", begin)
    monkeypatch.setattr(processes, "answer_requests", lambda _: begun.append("answered"))
    monkeypatch.chdir(tmp_path)
    flags = ["--learner", "tcp://127.0.0.1:9", "--connect-s", "inf"]
    with pytest.raises(SystemExit):
        actor_door.main(flags)
    command = [sys.executable, "-m", "impala_async.actor", *flags]
    # No signal is lost on the way: it is looked for behind the moment from which it ends this.
    assert begun[-3:] == ["answered", "looked", (sys.executable, command, tmp_path)]
    begun.clear()
    monkeypatch.setattr(FakeService, "is_told", True)
    assert actor_door.main(flags) == 130
    assert begun[-2:] == ["answered", "looked"]


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_start_is_told_of_by_one_of_us(monkeypatch, at_once, is_ours):
    """A learner of `train` says nothing of it, because `train` does."""
    if is_ours:
        monkeypatch.setenv(processes.VARIABLE, "3")
    else:
        monkeypatch.delenv(processes.VARIABLE, raising=False)
    is_told = threading.Event()
    with doors.start_told_of("torch is loaded", lambda line: is_told.set()):
        assert is_told.wait(0.2 if is_ours else 20.0) == (not is_ours)
