"""What `auto` takes, and that it says why."""

import time

import pytest

from impala_async.actor import choose as choose_module
from impala_async.actor import setup as making
from impala_async.actor.choose import Measured, Play, choose_setup, measure
from impala_async.actor.setup import make_setup
from impala_async.actor.workers import WorkerEnvs
from impala_async.config.actor import ActorSection
from impala_async.envs.vector import SerialEnvs
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


def test_small_environments_stay_in_the_actor_and_slow_ones_get_workers(choose, told):
    setup = choose(section("CartPole-v1"))
    assert setup.name == "vector"
    assert told().startswith("actor.sampler auto takes vector; ms for a step of all 4 columns: vec")
    assert "workers not tried, at best" in told()
    setup = choose(SLOW)
    assert (setup.name, type(setup.envs)) == ("parallel", WorkerEnvs)
    assert "columns: serial " in told()
    assert ", parallel " in told()
    assert choose(section("bench.probes:Failing", kwargs={"after": 0})).name == "serial"
    assert "takes serial" in told()
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


class FakeWorkers:
    num_open = 0

    def __init__(self, *_):
        FakeWorkers.num_open += 1

    def close(self):
        FakeWorkers.num_open -= 1


HERE, SLOW_ACT = Measured(1.0, 0.8, 0.0005), Measured(1.0, 0.1, 0.9)


@pytest.mark.parametrize(
    ("times", "keys", "taken"),
    [
        # Of equals the simpler one.
        ({"serial": HERE, "parallel": Measured(0.91, 0.8, 0.1)}, {}, "serial"),
        ({"serial": HERE, "parallel": Measured(0.89, 0.8, 0.1)}, {}, "parallel"),
        # What workers cannot win is not tried.
        ({"serial": Measured(1.0, 0.2, 0.75)}, {"device": "cpu"}, "serial"),
        # Slow acting may move to a GPU, if it gains by it, and nobody named a device.
        (
            {
                "serial": SLOW_ACT,
                "serial on cuda": Measured(0.2, 0.1, 0.1),
                "parallel on cuda": Measured(0.15, 0.05, 0.1),
            },
            {},
            "parallel on cuda",
        ),
        ({"serial": SLOW_ACT, "serial on cuda": SLOW_ACT}, {}, "serial"),
        ({"serial": HERE, "parallel": Measured(0.5, 0.4, 0.1)}, {"device": "cpu"}, "parallel"),
        (
            {"serial on cuda": HERE, "parallel on cuda": Measured(0.5, 0.4, 0.1)},
            {"device": "cuda"},
            "parallel on cuda",
        ),
        # Those that fail are not taken.
        ({"serial": HERE, "parallel": EnvError("a worker died")}, {"device": "cpu"}, "serial"),
        ({"serial": HERE, "parallel": KeyboardInterrupt()}, {"device": "cpu"}, None),
    ],
)
def test_the_fastest_is_taken(choose, told, monkeypatch, times, keys, taken):
    asked, closed = [], []

    def measure(setup, play):
        asked.append(str(setup))
        found = times[str(setup)]
        if isinstance(found, BaseException):
            raise found
        return found

    for module in (choose_module, making):
        monkeypatch.setattr(module, "count_gpus", lambda: 1)
    monkeypatch.setattr(choose_module, "measure", measure)
    monkeypatch.setattr(choose_module, "WorkerEnvs", FakeWorkers)
    monkeypatch.setattr(SerialEnvs, "close", lambda self: closed.append(self))
    monkeypatch.setattr(FakeWorkers, "num_open", 0)
    if taken is None:
        with pytest.raises(KeyboardInterrupt):
            choose(SLOW, **keys)
    else:
        assert str(choose(SLOW, **keys)) == taken
        assert f"takes {taken}; " in told()
    assert asked == list(times)
    is_parallel = taken is not None and taken.startswith("parallel")
    assert FakeWorkers.num_open == is_parallel
    assert len(closed) == (is_parallel or taken is None)
