"""The learner's door: a start with too few descriptors, the child that describes the environment,
and an end beneath a thread at work."""

import errno
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest
import zmq
from gymnasium.spaces import Discrete

from bench.probes import Counting
from impala_async.envs.saved_spaces import load_spaces
from impala_async.errors import ConfigError, EnvError, Exit
from impala_async.learner import __main__ as door
from impala_async.runs.folder import RunFolder
from impala_async.runs.summary import summarise
from impala_async.schema import policy_leaf, recurrent_state
from impala_async.wire import connections
from tests.columns import flat_schema
from tests.e2e.harness import is_alive, wait_until
from tests.learner.columns import small_schema
from tests.learner.server_harness import config_of
from tests.runs.test_summary import REPORT

ROOT = Path(door.__file__).parents[2]
# An interpreter that ends beneath such a thread is aborted by torch.
DIES_AT_WORK = """
import runpy, sys, threading, time, torch
from impala_async import doors
from impala_async.__main__ import console

def compute():
    weights = torch.ones(800, 800, requires_grad=True)
    while True:
        (weights @ weights).relu().sum().backward()

def run_door(body):
    threading.Thread(target=compute, daemon=True).start()
    time.sleep(0.3)
    print("last words", end="")
    return 70

doors.run_door = run_door
"""
DOORS = (
    'runpy.run_module("impala_async.learner", run_name="__main__")',
    "sys.argv[1:] = ['learner']\nconsole()",
)
NEEDS = "a learner needs 64 and two for each actor: raise ulimit -n"
WIDE = "a learner and each actor need 1048576: raise ulimit -v"


def ended(*command, **how):
    """How a command ends, and what it says."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, **how)
    return done.returncode, done.stdout, done.stderr


def start(path):
    return door.main(["--run-dir", str(path), "--set", "env.id=CartPole-v1"])


def test_a_limit_that_is_too_low_is_one_line_and_leaves_nothing(tmp_path):
    """A real limit, which no process may raise again."""
    start = f"exec {sys.executable} -m impala_async.learner --run-dir run"
    for limit, says in (
        ("-n 48", f"only 48 files and sockets may be open in this process; {NEEDS}"),
        ("-v 550000", f"the address space of this process is limited to 550000 KB; {WIDE}"),
    ):
        command = f"ulimit {limit}; {start} --set env.id=CartPole-v1"
        assert ended("sh", "-c", command, cwd=tmp_path) == (2, "", f"error: {says}\n")
        assert os.listdir(tmp_path) == []


def test_more_ranks_than_gpus_end_before_they_meet(tmp_path):
    """The first of 99 says so, though it might have one itself."""
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "99"}
    meets = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "none"}
    settings = "env.id=CartPole-v1", "env.probe=actor", "learner.device=cuda"
    told = [part for each in (*settings, "learner.num_passes=8") for part in ("--set", each)]
    command = sys.executable, "-m", "impala_async.learner", "--run-dir", "run", *told
    env = {**os.environ, "PYTHONPATH": str(ROOT), **ranks, **meets}
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    says = "error: rank 0: learner.device: 'cuda' is not on this machine, which has"
    assert (done.returncode, says in done.stderr) == (2, True), done.stderr
    assert os.listdir(tmp_path) == []


def test_a_start_that_dies_leaves_nothing_and_is_one_line_where_it_lacks_descriptors(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(connections, "most_descriptors", lambda: 64)
    for error, code in (
        (OSError(errno.EMFILE, "Too many open files"), 2),
        (OSError(errno.ENFILE, "Too many open files in system"), 2),
        (zmq.ZMQError(errno.EMFILE), 2),
        (OSError(errno.EIO, "Input/output error"), 70),
        (MemoryError("of a tensor"), 75),
    ):
        monkeypatch.setattr(door, "begin_probe", Mock(side_effect=error))
        assert start(tmp_path / "run") == code, error
        said = capsys.readouterr().err
        if code == 2:
            assert said == f"error: no more files and sockets can be opened ({error}); {NEEDS}\n"
        assert str(error) in said
        assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("door", DOORS)
def test_a_run_that_dies_in_the_middle_of_an_update_keeps_its_exit_code(door):
    assert ended(sys.executable, "-c", DIES_AT_WORK + door) == (70, "last words", "")


PROBES = "bench.probes"


def begin(env_id, *, rows=7, kwargs=None, keep=lambda spaces: None, **sections):
    config = config_of(small_schema(), env={"id": env_id, "kwargs": kwargs or {}}, **sections)
    # More of them than a config allows, too.
    config = config.model_copy(update={"trajectory": SimpleNamespace(rows=rows)})
    return door.begin_probe(config, keep)


@pytest.fixture
def children(monkeypatch):
    """The children that are started, real ones."""
    started, start = [], subprocess.Popen
    noted = lambda *args, **how: started.append(start(*args, **how)) or started[-1]  # noqa: E731
    monkeypatch.setattr(door.subprocess, "Popen", noted)
    return started


def test_the_child_describes_the_spaces_and_ends(children):
    num_open, kept = len(os.listdir("/proc/self/fd")), []
    schema = begin(f"{PROBES}:ActionReward", kwargs={"num_actions": 5}, keep=kept.append)()
    assert len(os.listdir("/proc/self/fd")) == num_open
    assert schema == flat_schema(1, 5, rows=7)
    assert [load_spaces(each)[1] for each in kept] == [Discrete(5)]
    assert [child.poll() for child in children] == [0]
    assert "gymnasium" not in children[0].args


class Daemon(Counting):
    """Making it starts one that lives on, as a simulator may: forked twice, and no new program."""

    def __init__(self):
        super().__init__()
        if os.fork() == 0:
            if (daemon := os.fork()) == 0:
                time.sleep(60)
            os.write(2, b"daemon %d\n" % daemon)
            os._exit(0)
        os.wait()


def test_an_environment_whose_daemon_lives_on_is_described(monkeypatch, capfd):
    """It holds what its parent answers to, and the answer counts."""
    monkeypatch.setattr(door, "PROBE_TIMEOUT_S", 45.0)
    try:
        assert begin(f"{__name__}:Daemon")().rows == 7
    finally:
        daemons = re.findall(r"daemon (\d+)", capfd.readouterr().err)
        for daemon in map(int, daemons):
            os.kill(daemon, signal.SIGKILL)
    assert daemons


HEAVY = {"gymnasium", "torch", "zmq"}
BEGIN = """
import sys, time
from impala_async.config.run import RunConfig
from impala_async.learner.__main__ import begin_probe
config = RunConfig.model_validate({{"env": {{"id": "{env}"}}, "model": {{"core": "gru"}}}})
wait = begin_probe(config, print)
"""


def test_the_environment_is_never_imported_here():
    """It looks in a process of its own, where no other test has imported anything."""
    code = BEGIN.format(env=f"{PROBES}:Counting")
    code += f"wait()\nassert not {HEAVY} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_an_environment_that_cannot_be_made_is_one_line():
    with pytest.raises(EnvError, match="num_acts") as error:
        begin(f"{PROBES}:ActionReward", kwargs={"num_acts": 5})()
    assert "\n" not in str(error.value)
    with pytest.raises(EnvError, match=r"env\.id: .*: a column of .* lower trajectory\.rows"):
        begin(f"{PROBES}:ActionReward", rows=10**9)()


def test_a_child_whose_learner_is_interrupted_says_nothing(children, capfd):
    """It hears of it as well."""
    begin(f"{PROBES}:Counting")
    (child,) = children
    child.send_signal(signal.SIGINT)
    assert child.wait(30) == -signal.SIGINT
    assert capfd.readouterr().err == ""


THREADED = """
import threading, time
from bench.probes import Counting

class Env(Counting):
    def __init__(self):
        super().__init__()
        threading.Thread(target=time.sleep, args=(1e6,), name="physics").start()
"""


@pytest.mark.parametrize(
    ("text", "timeout_s", "code", "says"),
    [
        ("import time\ntime.sleep(30)", 0.05, -9, "made:Env was not made and tried within 0 s"),
        ("import os\nos.abort()", 60, -6, "the process that made it died of SIGABRT; what it"),
        (THREADED, 60, 0, None),
    ],
    ids=["hangs", "aborts", "leaves a thread"],
)
def test_the_child_ends_however_its_environment_does(
    children, monkeypatch, capfd, tmp_path, text, timeout_s, code, says
):
    (tmp_path / "made.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setattr(door, "PROBE_TIMEOUT_S", timeout_s)
    wait = begin("made:Env")
    if says is None:
        wait()
        assert "without what the environment left running: Thread physics" in capfd.readouterr().err
    else:
        with pytest.raises(EnvError, match=rf"^env\.id: .*{says}"):
            wait()
    assert [child.poll() for child in children] == [code]


class Unclosed(Counting):
    """Its close kills or exits its process, or has no end, perhaps after a fault."""

    def __init__(self, how):
        super().__init__()
        self._how = how
        sys.modules["__main__"].CLOSE_S = 0.1

    def reset(self, **how):
        if self._how == "fails":
            raise ValueError("the true reason")
        return super().reset(**how)

    def close(self):
        if self._how == "exits":
            os._exit(0)
        if self._how == "dies":
            os.kill(os.getpid(), signal.SIGSEGV)
        time.sleep(1e6)


@pytest.mark.parametrize(
    ("how", "code", "says"),
    [
        ("exits", 0, ""),
        ("dies", -signal.SIGSEGV, "the process that tried and closed it died of SIGSEGV"),
        ("hangs", 0, "s so far in close, and is left so"),
    ],
)
def test_a_close_without_an_end_is_no_fault_of_how_it_plays(
    how, code, says, children, capfd, caplog
):
    assert begin(f"{__name__}:Unclosed", kwargs={"how": how})().rows == 7
    assert [child.poll() for child in children] == [code]
    assert says in capfd.readouterr().err + caplog.text


def test_a_close_without_an_end_takes_no_fault_with_it(children):
    with pytest.raises(EnvError, match="the true reason"):
        begin(f"{__name__}:Unclosed", kwargs={"how": "fails"})()


def test_it_ends_with_a_learner_that_is_killed(tmp_path):
    """While the environment is made, and though that learner was nobody's child."""
    (tmp_path / "hanging.py").write_text(
        "import os, time\n\nos.write(2, b'%d\\n' % os.getpid())\ntime.sleep(100)\n"
    )
    code = BEGIN.format(env="hanging:Env") + "time.sleep(100)"
    paths = [str(tmp_path), str(ROOT)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    environment.pop("IMPALA_ASYNC_LIFELINE", None)
    learner = subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE
    )
    child = psutil.Process(int(learner.stderr.readline()))
    learner.kill()
    learner.wait()
    learner.stderr.close()
    wait_until("its end", lambda: not is_alive(child))


def test_the_schema_has_the_names_of_the_policies_and_the_state_of_the_core():
    sections = {"policies": {"names": ("main", "other")}, "model": {"core": "lstm"}}
    schema = begin("tests.envs.test_agents:Lives", **sections)()
    assert schema.policies == ("main", "other")
    assert schema.obs.leaves[-1] == policy_leaf(schema.policies)
    assert schema.state == recurrent_state("lstm", 256)
    # A column for each of its agents.
    with pytest.raises(ConfigError, match="an actor sends a column per environment and agent"):
        begin("tests.envs.test_agents:Lives", actor={"num_envs": 4}, **sections)()


def test_a_rate_that_goes_on_elsewhere_is_told(caplog):
    def told(before, now):
        caplog.clear()
        configs = (config_of(small_schema(), stop={"env_steps": each}) for each in (before, now))
        door.tell_rate(*configs, 1000)
        return caplog.messages

    # The usual rate falls from 1e-3 to 1e-5 until the end of a run.
    for before, now, says in (
        (1000, 1000, None),
        (
            1000,
            2000,
            "goes on at 0.000505, and was 1e-05 at env step 1,000: its schedule ends at 2,000 now",
        ),
        (
            2000,
            None,
            "goes on at 0.001, and was 0.000505 at env step 1,000: it has no schedule now",
        ),
        (None, None, None),
    ):
        assert told(before, now) == ([f"algorithm.lr {says}"] if says else [])


@pytest.mark.parametrize("env_steps", [0, 900])
def test_a_run_that_an_actor_ended_shows_what_it_came_to(env_steps, tmp_path, capsys):
    config = config_of(small_schema(), env={"id": "E"})
    how = {"exit_reason": "actor_failed", "wall_s": 4.0, "env_steps_since": env_steps}
    more = {"lag_histogram": [1], "mean_return": None, "best_evaluated": None, "verdict": "none"}
    summary = summarise(config, REPORT | {"env_steps_trained": env_steps}, **how, **more)
    door._show(summary, RunFolder(tmp_path), config.stop, Exit.CONFIG, is_resumed=False)
    said = capsys.readouterr().out
    # Its supervisor says why it was given up; where nothing was trained there is no more to say.
    assert said.startswith("E: ended (actor_failed)\n") == bool(env_steps)
    assert (f"run folder: {tmp_path}" in said) == bool(env_steps)
