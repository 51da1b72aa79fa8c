"""The parts of each sampler, and the settings that do not fit it."""

import os

import psutil
import pytest
import torch

from impala_async.actor import setup as making
from impala_async.actor import unroll
from impala_async.actor.setup import (
    Measured,
    Trials,
    make_setup,
    measure,
    pick_device,
)
from impala_async.config.actor import ActorSection
from impala_async.envs.make import build_envs
from impala_async.envs.vector import SerialEnvs, VectorEnvs
from impala_async.errors import EnvError, MismatchError
from impala_async.metrics.host import Memory
from impala_async.schema import Schema
from tests.actor.fakes import FakePolicy
from tests.actor.scripted import settings_of
from tests.actor.worlds import section


def schema_for(envs):
    return Schema(envs.obs_spec, envs.action_spec, 4)


POLE = section("CartPole-v1")


def set_for(sampler, num_envs=4, env=POLE, local=0, **actor):
    return make_setup(ActorSection(sampler=sampler, **actor), env, num_envs, local=local)


@pytest.mark.parametrize(
    ("sampler", "name", "kind"),
    [
        ("serial", "serial", SerialEnvs),
        ("vector", "vector", VectorEnvs),
        ("auto", "vector", VectorEnvs),
    ],
)
def test_each_name_has_its_environments_and_any_device(monkeypatch, sampler, name, kind):
    monkeypatch.setattr(making, "count_gpus", lambda: 2)
    for device, shown in (("auto", name), ("cuda:1", f"{name} on cuda:1")):
        setup = set_for(sampler, device=device)
        assert type(setup.envs) is kind
        assert setup.envs.num_envs == setup.columns_per_message == 4
        assert (setup.name, str(setup)) == (name, shown)
        setup.envs.close()


@pytest.mark.parametrize(
    ("wanted", "num_envs", "num_cores", "expected"),
    [(None, 8, 4, 4), (None, 3, 4, 3), (None, 8, 1, 1), (6, 8, 2, 6), (6, 4, 2, 4)],
)
def test_a_worker_for_each_core_unless_the_config_says_otherwise(
    monkeypatch, wanted, num_envs, num_cores, expected
):
    monkeypatch.setattr(making, "count_cores", lambda: num_cores)
    monkeypatch.setattr(making, "WorkerEnvs", lambda env, num_envs, num_workers, *_: num_workers)
    assert set_for("parallel", num_envs, num_workers=wanted).envs == expected


def test_a_device_that_is_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    names = ("auto", "cpu", "cuda", "cuda:0", "cuda:1")
    assert [pick_device(name) for name in names] == ["cpu", "cpu", "cuda:0", "cuda:0", "cuda:1"]
    # The actors of a host share out its GPUs, unless a number says which.
    assert [pick_device("cuda", local) for local in range(4)] == ["cuda:0", "cuda:1"] * 2
    assert [pick_device(name, 3) for name in names] == ["cpu", "cpu", "cuda:1", "cuda:0", "cuda:1"]
    with pytest.raises(MismatchError, match=r"actor\.device: cuda:2 .* has 2 GPUs"):
        pick_device("cuda:2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto") == pick_device("cpu") == "cpu"
    with pytest.raises(MismatchError, match=r"cuda is not on this machine, which has 0 GPUs"):
        pick_device("cuda")


def test_workers_keep_to_the_cores_that_somebody_gave_the_actor():
    given, others = os.sched_getaffinity(0), {*psutil.Process().children()}
    core = {max(given)}
    os.sched_setaffinity(0, core)
    try:
        envs = set_for("parallel").envs
    finally:
        os.sched_setaffinity(0, given)
    (worker,) = {*psutil.Process().children()} - others
    assert os.sched_getaffinity(worker.pid) == core
    envs.close()


SLOW = section("bench.probes:Slow", kwargs={"step_s": 0.01})


def policy_for(envs):
    return FakePolicy(envs.action_spec.parts[0].choices[0])


def test_steps_that_wait_are_told_from_those_that_compute():
    for env, is_waiting in ((SLOW, True), (section("Busy"), False)):
        setup = set_for("serial", 2, env)
        schema, policy = schema_for(setup.envs), policy_for(setup.envs)
        found = measure(setup, schema, policy, lambda: None)
        setup.envs.close()
        assert found.is_waiting == is_waiting
        assert 0 < found.env_s <= found.round_s
        assert 0 <= found.act_s < found.round_s
        if env is SLOW:
            assert found.env_s >= 0.02


@pytest.fixture
def choose(monkeypatch):
    """`auto` for four environments on two cores, in the second actor; what it gave is closed."""
    made = []

    def run(env, num_cores=2, most=0, **actor):
        monkeypatch.setattr(making, "count_cores", lambda: num_cores)
        usual = set_for(**{"sampler": "auto", "num_envs": 4, "env": env, "local": 1} | actor)
        settings = settings_of().model_copy(update={"env": env, "actor": ActorSection(**actor)})
        schema, policy = schema_for(usual.envs), policy_for(usual.envs)
        trials = Trials(usual, settings, schema, lambda _: policy, lambda: None, most, local=1)
        chosen = trials.choose(4)
        made.append(chosen)
        return chosen

    yield run
    for setup in made:
        setup.envs.close()


@pytest.fixture
def told(caplog):
    caplog.set_level("INFO", making.logger.name)
    return lambda: caplog.messages[-1]


def test_steps_that_wait_get_more_workers_than_cores(choose, told, monkeypatch):
    made = []

    def workers(env, num_envs, num_workers, *rest):
        made.append(num_workers)
        raise EnvError("enough")

    monkeypatch.setattr(making, "WorkerEnvs", workers)
    choose(SLOW, num_cores=1)
    choose(SLOW, num_workers=2)
    assert made == [4, 2]
    choose(section("Busy"))
    assert made == [4, 2, 2]
    assert "wait more than they compute" not in told()


def test_no_buffer_is_made_where_all_do_not_fit_into_memory(choose, caplog, monkeypatch):
    def has(total, *free):
        left = [*free]
        found = lambda: Memory(total, left.pop(0))  # noqa: E731
        monkeypatch.setattr(unroll, "find_memory", found)

    monkeypatch.setattr(making, "measure", lambda *_: Measured(1e-3, 1e-4, 1e-4))
    for total, error in ((0, MismatchError), (1 << 40, MemoryError)):
        has(total, 0)
        with pytest.raises(error, match=r"wants 0\.0 GiB of memory"):
            choose(POLE)
    # More columns may want too much, where fewer do not.
    has(1 << 40, 1 << 40, 0)
    assert choose(POLE, most=64).envs.num_envs == 4
    assert "no other setup is tried: what this actor has under way wants" in caplog.text


class FakeWorkers:
    num_open, num_envs = 0, 4

    def __init__(self, env, *_):
        FakeWorkers.num_open += 1
        alike = build_envs("serial", env, 1)
        self.obs_spec, self.action_spec = alike.obs_spec, alike.action_spec
        self.autoreset = alike.autoreset

    def close(self):
        FakeWorkers.num_open -= 1


HERE, SLOW_ACT = Measured(1.0, 0.8, 0.0005), Measured(1.0, 0.1, 0.9)


@pytest.mark.parametrize(
    ("times", "keys", "taken"),
    [
        # The simpler of two equals is taken.
        ({"serial": HERE, "parallel": Measured(0.91, 0.8, 0.1)}, {}, "serial"),
        ({"serial": HERE, "parallel": Measured(0.89, 0.8, 0.1)}, {}, "parallel"),
        # A sampler with workers that cannot win is not tried.
        ({"serial": Measured(1.0, 0.2, 0.75)}, {"device": "cpu"}, "serial"),
        # Slow acting may move to a GPU, if it gains by it, and nobody named a device.
        (
            {
                "serial": SLOW_ACT,
                "serial on cuda:1": Measured(0.2, 0.1, 0.1),
                "parallel on cuda:1": Measured(0.15, 0.05, 0.1),
            },
            {},
            "parallel on cuda:1",
        ),
        ({"serial": SLOW_ACT, "serial on cuda:1": SLOW_ACT}, {}, "serial"),
        (
            {"serial on cuda:1": HERE, "parallel on cuda:1": Measured(0.5, 0.4, 0.1)},
            {"device": "cuda"},
            "parallel on cuda:1",
        ),
        # Those that fail are not taken.
        ({"serial": HERE, "parallel": EnvError("a worker died")}, {"device": "cpu"}, "serial"),
        ({"serial": HERE, "parallel": KeyboardInterrupt()}, {"device": "cpu"}, None),
        # No setup helps where no policy can be built.
        ({"serial": MismatchError("no such torso")}, {"device": "cpu"}, None),
    ],
)
def test_the_fastest_is_taken(choose, told, monkeypatch, times, keys, taken):
    asked, closed = [], []

    def measure(setup, *_):
        asked.append(str(setup))
        found = times[str(setup)]
        if isinstance(found, BaseException):
            raise found
        return found

    monkeypatch.setattr(making, "count_gpus", lambda: 2)
    monkeypatch.setattr(making, "measure", measure)
    monkeypatch.setattr(making, "WorkerEnvs", FakeWorkers)
    monkeypatch.setattr(SerialEnvs, "close", lambda self: closed.append(self))
    monkeypatch.setattr(FakeWorkers, "num_open", 0)
    if taken is None:
        with pytest.raises((KeyboardInterrupt, MismatchError)):
            choose(SLOW, **keys)
    else:
        assert str(choose(SLOW, **keys)) == taken
        assert f"takes {taken} with 4 columns; " in told()
    assert asked == list(times)
    is_parallel = taken is not None and taken.startswith("parallel")
    assert FakeWorkers.num_open == is_parallel
    assert len(closed) == (is_parallel or taken is None)


def test_workers_whose_environments_look_other_are_not_taken(choose, told, monkeypatch):
    monkeypatch.setattr(making, "WorkerEnvs", lambda *_: FakeWorkers(POLE))
    assert choose(SLOW).name == "serial"
    assert told().endswith(", parallel looks other")
    assert FakeWorkers.num_open == 0


# Seconds of a round by the number of columns.
ROUNDS = {4: 4e-5, 8: 5e-5, 16: 6e-5, 24: 7e-5, 32: 1.4e-4}


@pytest.mark.parametrize(
    ("rounds", "most", "taken"),
    [
        (ROUNDS, 0, 4),
        # Doubled up to the most that there may be, which is tried too.
        (ROUNDS, 4, 4),
        (ROUNDS, 16, 16),
        (ROUNDS, 24, 24),
        # Each column costs more than with half of them.
        (ROUNDS, 32, 16),
        # A long round would not be shared out by much.
        ({4: 3e-3}, 64, 4),
    ],
)
def test_there_are_as_many_columns_as_pay(choose, monkeypatch, rounds, most, taken):
    monkeypatch.setattr(
        making, "measure", lambda setup, *_: Measured(rounds[setup.envs.num_envs], 1e-5, 1e-5)
    )
    chosen = choose(POLE, num_cores=1, most=most, sampler="serial")
    assert (chosen.name, chosen.envs.num_envs) == ("serial", taken)


def test_steps_that_wait_have_as_many_columns_as_workers(choose, monkeypatch):
    made = []

    def workers(env, num_envs, num_workers, *rest):
        made.append((num_envs, num_workers))
        raise EnvError("enough")

    monkeypatch.setattr(making, "WorkerEnvs", workers)
    for most in (24, 100):
        choose(SLOW, num_cores=1, most=most)
    assert made == [(24, 24), (32, 32)]

    # The promise to so many columns is compared with the time that so many would take here.
    def measure(setup, *_):
        return Measured(*[1e-4 * setup.envs.num_envs] * 2, 0.0, is_waiting=True)

    monkeypatch.setattr(making, "measure", measure)
    choose(POLE, num_cores=1, most=32)
    assert made[2:] == [(32, 32)]
