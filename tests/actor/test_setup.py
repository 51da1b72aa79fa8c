"""What each sampler is made of, and what does not fit."""

import os
from dataclasses import replace

import pytest
import torch

from bench.probes import CountingVector
from impala_async.actor import setup as making
from impala_async.actor.sampler import (
    SameStepSampler,
    Sampler,
)
from impala_async.actor.setup import (
    Setup,
    count_cores,
    count_workers,
    make_setup,
    pick_device,
)
from impala_async.actor.workers import WorkerEnvs
from impala_async.config.actor import ActorSection
from impala_async.config.run import EnvSection
from impala_async.envs.make import build_envs
from impala_async.envs.vector import SerialEnvs, VectorEnvs
from impala_async.errors import EXIT_MISMATCH, MismatchError
from impala_async.schema import Schema
from tests.actor.fakes import sampler_over
from tests.actor.worlds import section


def schema_for(envs, rows=4):
    return Schema(envs.obs_spec, envs.action_spec, rows)


def build(envs, schema):
    return sampler_over(envs, schema)[0]


@pytest.mark.parametrize("sampler", ["serial", "vector", "auto"])
def test_next_step_batches_get_one_message_of_all_columns(sampler):
    envs = build_envs(sampler, EnvSection(id="CartPole-v1"), 3)
    made = build(envs, schema_for(envs))
    assert type(made) is Sampler
    assert Setup("vector", envs).columns_per_message == 3
    (message,) = [message for _ in range(4) for message in made.step()]
    assert message.buffer.num_columns == 3
    envs.close()


def test_same_step_batches_get_a_message_per_column():
    envs = VectorEnvs(CountingVector(3, autoreset="SameStep"))
    made = build(envs, schema_for(envs))
    assert isinstance(made, SameStepSampler)
    assert Setup("vector", envs).columns_per_message == 1
    messages = [message for _ in range(4) for message in made.step()]
    assert {message.buffer.num_columns for message in messages} == {1}


def test_an_environment_that_the_learner_does_not_know_is_a_mismatch():
    envs = build_envs("serial", EnvSection(id="CartPole-v1"), 2)
    other = build_envs("serial", EnvSection(id="Acrobot-v1"), 2)
    with pytest.raises(
        MismatchError, match=r"choices: \(2,\) here, \(3,\) at the learner"
    ) as caught:
        build(envs, schema_for(other))
    assert caught.value.exit_code == EXIT_MISMATCH
    wide = replace(schema_for(envs), obs=other.obs_spec)
    with pytest.raises(MismatchError, match=r"shape: \(4,\) here, \(6,\) at the learner"):
        build(envs, wide)
    envs.close()
    other.close()


POLE = section("CartPole-v1")


def set_for(sampler, num_envs=4, env=POLE, **actor):
    return make_setup(sampler, ActorSection(sampler=sampler, **actor), env, num_envs)


@pytest.mark.parametrize(
    ("sampler", "kind"),
    [
        ("serial", SerialEnvs),
        ("vector", VectorEnvs),
        ("auto", VectorEnvs),
        ("parallel", WorkerEnvs),
    ],
)
def test_each_name_has_its_environments(sampler, kind):
    setup = set_for(sampler)
    assert type(setup.envs) is kind
    assert setup.envs.num_envs == setup.columns_per_message == 4
    assert setup.name == ("vector" if sampler == "auto" else sampler)
    assert setup.device == "cpu"
    assert str(setup) == setup.name
    setup.envs.close()


@pytest.mark.parametrize("sampler", ["auto", "serial", "vector", "parallel"])
def test_any_sampler_acts_on_the_device_that_is_named(sampler, monkeypatch):
    monkeypatch.setattr(making, "count_gpus", lambda: 2)
    setup = set_for(sampler, device="cuda:1")
    assert setup.device == "cuda:1"
    assert str(setup) == f"{setup.name} on cuda:1"
    setup.envs.close()


def test_columns_that_reset_in_their_step_travel_alone():
    setup = set_for("parallel", env=section("short_poles"))
    assert (setup.columns_per_message, setup.envs.num_envs) == (1, 4)
    setup.envs.close()


@pytest.mark.parametrize(
    ("wanted", "num_envs", "num_cores", "expected"),
    [(None, 8, 4, 4), (None, 3, 4, 3), (None, 8, 1, 1), (6, 8, 2, 6), (None, 8, 5, 5)],
)
def test_a_worker_for_each_core_unless_the_config_says_otherwise(
    monkeypatch, wanted, num_envs, num_cores, expected
):
    monkeypatch.setattr(making, "count_cores", lambda: num_cores)
    assert count_workers(wanted, num_envs) == expected


def test_an_actors_own_number_of_environments_must_fit():
    with pytest.raises(MismatchError, match=r"--num-envs: actor\.num_workers is 4.*got 3"):
        count_workers(4, 3)


def test_a_device_that_is_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    names = ("auto", "cpu", "cuda", "cuda:0", "cuda:1")
    assert [pick_device(name) for name in names] == ["cpu", "cpu", "cuda", "cuda:0", "cuda:1"]
    with pytest.raises(MismatchError, match=r"actor\.device: cuda:2 .* has 2 GPUs"):
        pick_device("cuda:2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto") == pick_device("cpu") == "cpu"
    with pytest.raises(MismatchError, match=r"cuda is not on this machine, which has 0 GPUs"):
        pick_device("cuda")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Eight cores, and control groups without a word about them."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(8)})
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(making, "CGROUPS", tmp_path)
    monkeypatch.setattr(making, "OWN_CGROUP", tmp_path / "own")
    (tmp_path / "own").write_text("0::/outer/inner\n")
    (tmp_path / "outer/inner").mkdir(parents=True)
    return tmp_path


def test_those_of_the_affinity(machine):
    assert count_cores() == 8
    (machine / "own").unlink()
    assert count_cores() == 8


@pytest.mark.parametrize("group", [".", "outer", "outer/inner"])
@pytest.mark.parametrize(
    ("text", "expected"),
    [("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1), ("9900000 100000", 8), ("", 8)],
)
def test_no_more_than_the_quota_of_any_group_around_it(machine, group, text, expected):
    (machine / group / "cpu.max").write_text(text + "\n")
    assert count_cores() == expected


def test_this_machine_has_some():
    assert 1 <= count_cores() <= (os.cpu_count() or 1)
