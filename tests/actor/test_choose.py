"""What `auto` takes, and that it says why."""

import time

import psutil
import pytest

from impala_async.actor import choose as choose_module
from impala_async.actor import setup as making
from impala_async.actor.choose import Measured, Play, choose_setup, measure
from impala_async.actor.setup import make_setup
from impala_async.actor.workers import WorkerEnvs
from impala_async.config.actor import ActorSection
from impala_async.envs.vector import SerialEnvs, VectorEnvs
from impala_async.errors import EnvError
from impala_async.schema import Schema
from tests.actor.fakes import FakePolicy
from tests.actor.scripted import settings_of
from tests.actor.worlds import section

SLOW = section("bench.probes:Slow", kwargs={"step_s": 0.01})


def play_of(setup, look_up=lambda: None):
    choices = setup.envs.action_spec.parts[0].choices[0]
    schema = Schema(setup.envs.obs_spec, setup.envs.action_spec, 4)
    return Play(schema, lambda _: (FakePolicy(choices), None), look_up)


def test_steps_that_wait_are_told_from_those_that_compute():
    for env, is_waiting in ((SLOW, True), (section("Busy"), False)):
        setup = make_setup("serial", ActorSection(), env, 2)
        found = measure(setup, play_of(setup))
        setup.envs.close()
        assert found.is_waiting == is_waiting
        assert 0 < found.env_s <= found.round_s
        assert 0 <= found.act_s < found.round_s
        if env is SLOW:
            assert found.env_s >= 0.02


def test_it_ends_after_its_time_or_a_round(monkeypatch):
    setup = make_setup("serial", ActorSection(), section("CartPole-v1"), 1)
    looks = []
    play = play_of(setup, lambda: looks.append(time.monotonic()))
    monkeypatch.setattr(choose_module, "BUDGET_S", 0.05)
    measure(setup, play)
    assert len(looks) > 2
    assert looks[-1] - looks[0] <= 0.05
    monkeypatch.setattr(choose_module, "BUDGET_S", 0.0)
    looks.clear()
    measure(setup, play)
    assert len(looks) == 1
    setup.envs.close()


def workers_running():
    children = psutil.Process().children()
    return [child for child in children if "impala_async.actor.env_worker" in child.cmdline()]


@pytest.fixture
def choose(monkeypatch):
    """`auto` for four environments on two cores; what it gave is closed."""
    made = []

    def run(env, num_cores=2, **actor):
        for module in (choose_module, making):
            monkeypatch.setattr(module, "count_cores", lambda: num_cores)
        usual = make_setup("auto", ActorSection(**actor), env, 4)
        schema = Schema(usual.envs.obs_spec, usual.envs.action_spec, 4)
        choices = usual.envs.action_spec.parts[0].choices[0]
        play = Play(schema, lambda _: (FakePolicy(choices), None), lambda: None)
        settings = settings_of().model_copy(update={"env": env, "actor": ActorSection(**actor)})
        chosen = choose_setup(usual, settings, 4, play)
        made.append(chosen)
        return chosen

    yield run
    for setup in made:
        setup.envs.close()


@pytest.fixture
def told(caplog):
    caplog.set_level("INFO", choose_module.logger.name)
    return lambda: caplog.messages[-1]


def test_small_environments_stay_in_the_actor(choose, told):
    setup = choose(section("CartPole-v1"))
    assert setup.name in ("vector", "serial")
    assert type(setup.envs) in (VectorEnvs, SerialEnvs)
    assert told().startswith(f"actor.sampler auto takes {setup.name}; ms for a step of all 4")
    assert "workers not tried, at best" in told()


def test_slow_environments_get_workers(choose, told):
    setup = choose(SLOW)
    assert setup.name == "parallel"
    assert type(setup.envs) is WorkerEnvs
    assert "columns: serial " in told()
    assert ", parallel " in told()


def test_without_cores_there_are_no_workers(choose, told):
    assert choose(section("Busy"), num_cores=1).name == "serial"
    assert "no workers for want of cores" in told()


def test_steps_that_wait_get_more_workers_than_cores(choose, told, monkeypatch):
    made = []

    def workers(env, num_envs, num_workers, *rest):
        made.append(num_workers)
        raise EnvError("enough")

    monkeypatch.setattr(choose_module, "WorkerEnvs", workers)
    choose(SLOW, num_cores=1)
    choose(SLOW, num_workers=2)
    assert made == [4, 2]
    choose(section("Busy"))
    assert made == [4, 2, 2]
    assert "wait more than they compute" not in told()


def test_what_cannot_be_measured_is_what_it_would_be_anyway(choose, told):
    env = section("bench.probes:Failing", kwargs={"after": 0})
    assert choose(env).name == "serial"
    assert "takes serial" in told()


def test_what_is_only_a_vector_is_no_candidate_for_serial(choose):
    assert choose(section("short_poles")).name == "vector"


def test_of_equals_the_simpler_one_is_taken(choose, monkeypatch):
    asked = []

    def measure(setup, play):
        asked.append(setup.name)
        return Measured({"serial": 1.0}.get(setup.name, 0.95), 0.9, 0.05)

    monkeypatch.setattr(choose_module, "measure", measure)
    assert choose(SLOW).name == "serial"
    assert asked == ["serial", "parallel"]


def test_workers_that_fail_are_not_taken_and_are_ended(choose, told, monkeypatch):
    failed = []

    def measure(setup, play):
        if setup.name == "serial":
            return Measured(1.0, 0.9, 0.1)
        failed.append(setup)
        raise EnvError("a worker died")

    monkeypatch.setattr(choose_module, "measure", measure)
    assert choose(SLOW).name == "serial"
    assert told().endswith("serial 1e+03")
    assert len(failed) == 1
    assert not workers_running()


def gpu_takes(times, monkeypatch):
    """A host with a GPU, and what is measured there; which setups were, in this order."""
    asked = []

    def measure(setup, play):
        asked.append(str(setup))
        return times[str(setup)]

    for module in (choose_module, making):
        monkeypatch.setattr(module, "count_gpus", lambda: 1)
    monkeypatch.setattr(choose_module, "measure", measure)
    return asked


def test_slow_acting_may_move_to_a_gpu(choose, told, monkeypatch):
    times = {
        "serial": Measured(1.0, 0.1, 0.9),
        "serial on cuda": Measured(0.2, 0.1, 0.1),
        "parallel on cuda": Measured(0.15, 0.05, 0.1),
    }
    asked = gpu_takes(times, monkeypatch)
    setup = choose(SLOW)
    assert (setup.name, setup.device) == ("parallel", "cuda")
    assert asked == list(times)
    assert "takes parallel on cuda; " in told()
    assert "serial 1e+03, serial on cuda 200" in told()


@pytest.mark.parametrize("act_s", [0.0005, 0.9])
def test_acting_stays_where_a_gpu_gains_nothing(choose, monkeypatch, act_s):
    slow = Measured(1.0, 0.1, act_s)
    times = {name: slow for name in ("serial", "serial on cuda", "parallel")}
    asked = gpu_takes(times, monkeypatch)
    setup = choose(SLOW)
    assert (setup.name, setup.device) == ("serial", "cpu")
    assert ("serial on cuda" in asked) == (act_s > 0.001)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_device_that_is_named_is_the_only_one(choose, monkeypatch, device):
    on = " on cuda" if device == "cuda" else ""
    times = {f"serial{on}": Measured(1.0, 0.8, 0.2), f"parallel{on}": Measured(0.5, 0.4, 0.2)}
    asked = gpu_takes(times, monkeypatch)
    setup = choose(SLOW, device=device)
    assert (setup.name, setup.device) == ("parallel", device)
    assert asked == list(times)


def test_an_end_that_comes_while_it_measures_leaves_nothing_open(choose, monkeypatch):
    seen = []

    def measure(setup, play):
        seen.append(setup)
        if setup.name == "parallel":
            raise KeyboardInterrupt
        return Measured(1.0, 0.9, 0.1)

    closed = []
    monkeypatch.setattr(choose_module, "measure", measure)
    monkeypatch.setattr(SerialEnvs, "close", lambda self: closed.append("serial"))
    with pytest.raises(KeyboardInterrupt):
        choose(SLOW)
    assert [setup.name for setup in seen] == ["serial", "parallel"]
    assert closed == ["serial"]
    assert not workers_running()
