"""The parts around Ray, without Ray: tests/engines/test_ray.py has a real cluster."""

import functools
import json
import signal
import socket
import subprocess
import sys
from concurrent.futures import Future, wait
from pathlib import Path
from types import SimpleNamespace

import pytest

from impala_async.errors import ConfigError, StartError, UnreachableError
from impala_async.launch import local, ray
from impala_async.output import Wait
from tests.e2e.zygote import children
from tests.launch.fake_doors import events, make_doors, signals

SERVES = """
Path("run/.beside").write_text(json.dumps(
    {"data_url": "tcp://10.0.0.1:7001", "weights_url": "tcp://10.0.0.1:7002"}
))
Path("run/.beside").rename("run/service.json")
"""


class Cluster:
    """The words of Ray that are used, answered by the test: a call is a `Future` of its own."""

    class exceptions:  # noqa: N801
        class RayError(Exception): ...

    def __init__(self):
        self.made, self.calls, self.how, self.is_shut = [], [], {}, False

    def remote(self, **how):
        self.how = how
        return lambda kind: SimpleNamespace(remote=lambda *args: self._make(kind, args))

    def _make(self, kind, args):
        self.made.append((kind, args))
        number = args[0]

        def method(name):
            return SimpleNamespace(remote=lambda *args: self._call(number, name, args))

        return SimpleNamespace(place=method("place"), hold=method("hold"))

    def _call(self, number, name, args):
        future = Future()
        self.calls.append((number, name, args, future))
        return future

    def of(self, number, name):
        return next(call[3] for call in self.calls if call[:2] == (number, name))

    def wait(self, futures, *, num_returns=1, timeout=None):
        done, left = wait(futures, timeout)
        return [*done], [*left]

    def get(self, futures):
        return [future.result() for future in futures]

    def shutdown(self):
        self.is_shut = True


@pytest.fixture
def cluster(monkeypatch):
    made = Cluster()
    monkeypatch.setitem(sys.modules, "ray", made)
    return made


# -------------------- a cluster that is there, or not


def test_what_keeps_it_from_a_cluster_is_told_in_a_line(cluster, monkeypatch):
    def init(address, logging_level):
        raise ConnectionError

    cluster.init = init
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigError, match="no Ray cluster on this host: start one by `ray start -"):
        ray.connect()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    with pytest.raises(UnreachableError, match=rf"RAY_ADDRESS \(127.0.0.1:{port}\): .*refused"):
        ray.connect()
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'impala-async\[ray\]'"):
        ray.connect()


# -------------------- a holder


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    """A holder puts the key into its own, as it has a process of its own."""
    monkeypatch.setenv("IMPALA_ASYNC_KEY", "")


def hold(actor):
    Path("here").mkdir()
    make_doors(actor=actor)
    holder = ray.Holder(3, str(Path.cwd()))
    answer = holder.hold("tcp://host:1", "ab" * 32)
    assert children() == []
    return answer


def test_a_holder_starts_its_actor_again_until_the_run_is_over(capsys, caplog):
    actor = """
note(flags=sys.argv[1:], key=os.environ["IMPALA_ASYNC_KEY"])
print("at work", flush=True)
if count("actor") < 2: os.abort()
os.eventfd_write(int(sys.argv[sys.argv.index("--over-fd") + 1]), 1)
"""
    assert hold(actor) == (0, "")
    assert [e["flags"][:2] for e in events("actor")] == [["--learner", "tcp://host:1"]] * 2
    assert {e["key"] for e in events("actor")} == {"ab" * 32}
    assert [e["flags"][e["flags"].index("--start") + 3] for e in events("actor")] == ["0", "0"]
    # The learner gives out the numbers by which actors are told apart.
    assert all("--start -1" in " ".join(e["flags"]) for e in events("actor"))
    assert capsys.readouterr().err.count("actor 3: at work\n") == 2
    assert "actor 3 died of SIGABRT" in caplog.text


def test_the_actors_of_a_host_count_from_0_and_take_what_is_free_again():
    with ray.number_here("tcp://a:1") as first, ray.number_here("tcp://b:1") as of_another:
        with ray.number_here("tcp://a:1") as second:
            assert (first, second, of_another) == (0, 1, 0)
        code = "from impala_async.launch.ray import number_here\n"
        code += "with number_here('tcp://a:1') as number: print(number, flush=True); input()"
        command = [sys.executable, "-c", code]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        for _ in range(2):
            with subprocess.Popen(command, **pipes) as other:
                assert other.stdout.readline() == b"1\n"
                other.kill()


def test_a_holder_says_why_its_actor_cannot_run():
    code, reason = hold("print('error: other spaces', flush=True)\nsys.exit(78)")
    assert code == 78
    assert reason.startswith("actor 3 cannot run: it ended with exit code 78 (other spaces); ")


# -------------------- the actors of a run


@pytest.fixture
def placed(cluster, monkeypatch, caplog):
    """Two actors of a run that has a learner, and the cluster that was asked for them."""
    caplog.set_level("INFO")
    monkeypatch.setattr(ray, "Wait", functools.partial(Wait, after_s=0.0, clock=lambda: 0.0))
    Path("run").mkdir()
    actors = ray.PlacedActors(2, Path("run"))
    actors.look()
    assert cluster.made == []
    service = {"data_url": "tcp://10.0.0.1:7001", "is_encrypted": True}
    Path("run/service.json").write_text(json.dumps(service))
    Path("run/key").write_text("ab" * 32 + "\n")
    actors.look()
    waits = "waiting for Ray to place 2 of 2 actors, each of which wants a CPU (0 s)"
    assert caplog.messages == [waits]
    caplog.clear()
    return actors, cluster


def test_actors_are_placed_once_and_started_again_by_ray(placed, caplog):
    actors, cluster = placed
    assert cluster.made == [(ray.Holder, (number, str(Path.cwd()))) for number in range(2)]
    assert cluster.how["max_restarts"] == cluster.how["max_task_retries"] == -1
    assert cluster.how["num_cpus"] == 1
    where = [call[2] for call in cluster.calls if call[1] == "hold"]
    assert where == [("tcp://10.0.0.1:7001", "ab" * 32)] * 2
    cluster.of(0, "place").set_result("10.0.0.2")
    actors.look()
    assert caplog.messages == ["Ray has placed an actor on 10.0.0.2"]
    cluster.of(0, "hold").set_result((0, ""))
    actors.look()
    assert actors.verdict is None


def test_one_that_cannot_run_is_the_verdict_and_so_is_what_ray_says(placed):
    actors, cluster = placed
    cluster.of(1, "hold").set_result((78, "actor 1 cannot run"))
    actors.look()
    assert actors.verdict == (78, "actor 1 cannot run")
    cluster.of(0, "hold").set_exception(cluster.exceptions.RayError("it died\nNo module\n"))
    actors.look()
    assert actors.verdict == (75, "Ray cannot run an actor: No module")


def test_at_the_end_they_have_time_to_say_goodbye_and_then_none_is_left(placed):
    actors, cluster = placed
    cluster.of(0, "hold").set_result((0, ""))
    actors.is_ending = True
    actors.look()
    looks = []
    actors.end(60.0, lambda: len(looks.append(cluster.is_shut) or looks) > 3)
    assert looks == [False] * 4
    assert cluster.is_shut


# -------------------- a run


class Idle:
    verdict = None
    is_ending = False

    def __init__(self, *asked): ...

    def look(self): ...

    def end(self, grace_s, is_hurried): ...


def run(learner, monkeypatch):
    monkeypatch.setattr(ray, "PlacedActors", Idle)
    monkeypatch.setattr(ray, "LEARNER_RESTART_S", 0.02)
    make_doors(learner=learner)
    Path("run").mkdir()
    binds = {"data": "tcp://0.0.0.0:*", "weights": "tcp://0.0.0.0:7000"}
    code = ray.RayRun(["--config", "f"], binds, Path("run")).run(1)
    assert children() == []
    return code


def test_a_learner_that_dies_is_started_again_at_its_ports(monkeypatch, caplog):
    # The second ends in good order, and takes its address back.
    learner = f"""
note(flags=sys.argv[1:])
{SERVES}
if count("learner") == 1:
    os.abort()
Path("run/service.json").unlink()
sys.exit(75 if count("learner") == 2 else 0)
"""
    assert run(learner, monkeypatch) == 0
    first, *again = (" ".join(e["flags"][2:]) for e in events("learner"))
    assert first == "--set bind.data=tcp://0.0.0.0:* --set bind.weights=tcp://0.0.0.0:7000"
    same = "--set bind.data=tcp://0.0.0.0:7001 --set bind.weights=tcp://0.0.0.0:7002"
    assert again == [same] * 2
    assert caplog.messages == [
        f"the learner {how}: starting it again in 0 s"
        for how in ("died of SIGABRT", "ended with exit code 75")
    ]


def test_a_learner_for_which_the_system_has_no_process_is_tried_again(monkeypatch, caplog):
    spawn, faults = ray.spawn, [StartError("cannot start a process of the learner: no memory")]

    def fail_once(door, *args, **how):
        if events("learner") and faults:
            raise faults.pop()
        return spawn(door, *args, **how)

    monkeypatch.setattr(ray, "spawn", fail_once)
    assert run("note()\nsys.exit(70 if count('learner') == 1 else 0)", monkeypatch) == 0
    assert caplog.messages[-1].endswith("no memory: trying again in 0 s")


def test_one_that_dies_again_and_again_and_trains_nothing_is_given_up(monkeypatch, caplog):
    # The third trains something, and 75 may pass.
    learner = """
note()
saved = Path("run/last_checkpoint")
saved.write_text(f"ckpt-{count('learner')}-{7 if count('learner') < 3 else 8}")
sys.exit(75 if count("learner") == 5 else 70)
"""
    assert run(learner, monkeypatch) == 70
    assert len(events("learner")) == 2 + 1 + 1 + 5
    assert caplog.messages[-1].startswith("the learner ended with exit code 70, the 6th time since")


@pytest.mark.parametrize("code", [0, 2])
def test_a_learner_that_is_done_or_finds_a_setting_wrong_is_not(code, monkeypatch):
    assert run(f"note()\nsys.exit({code})", monkeypatch) == code
    assert len(events("learner")) == 1


def test_a_learner_that_is_told_to_end_is_not(monkeypatch):
    assert issubclass(ray.RayRun, local.LocalRun)
    learner = "note()\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\nwait_for(lambda: 0)"
    with signals(signal.SIGTERM, when=lambda n: events("learner")):
        assert run(learner, monkeypatch) == 75
    assert len(events("learner")) == 1
