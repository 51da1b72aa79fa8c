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


@pytest.mark.parametrize(
    ("mode", "kind", "width"), [("NextStep", Sampler, 3), ("SameStep", SameStepSampler, 1)]
)
def test_columns_that_reset_in_their_step_travel_alone(mode, kind, width):
    envs = VectorEnvs(CountingVector(3, autoreset=mode))
    made = build(envs, schema_for(envs))
    assert type(made) is kind
    assert Setup("vector", envs).columns_per_message == width
    messages = [message for _ in range(4) for message in made.step()]
    assert [message.buffer.num_columns for message in messages] == [width] * (3 // width)


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
    ("sampler", "name", "kind"),
    [
        ("serial", "serial", SerialEnvs),
        ("vector", "vector", VectorEnvs),
        ("auto", "vector", VectorEnvs),
        ("parallel", "parallel", WorkerEnvs),
    ],
)
def test_each_name_has_its_environments_and_any_device(monkeypatch, sampler, name, kind):
    monkeypatch.setattr(making, "count_gpus", lambda: 2)
    for device, shown in (("auto", name), ("cuda:1", f"{name} on cuda:1")):
        setup = make_setup(sampler, ActorSection(device=device), section("CartPole-v1"), 4)
        assert type(setup.envs) is kind
        assert setup.envs.num_envs == setup.columns_per_message == 4
        assert (setup.name, str(setup)) == (name, shown)
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
    with pytest.raises(MismatchError, match=r"--num-envs: actor\.num_workers is 9.*got 8"):
        count_workers(9, 8)


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
    monkeypatch.setattr(making, "CGROUPS", tmp_path)
    monkeypatch.setattr(making, "OWN_CGROUP", tmp_path / "own")
    (tmp_path / "own").write_text("0::/outer/inner\n")
    (tmp_path / "outer/inner").mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize("group", [".", "outer", "outer/inner"])
@pytest.mark.parametrize(
    ("text", "expected"),
    [("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1), ("9900000 100000", 8), ("", 8)],
)
def test_no_more_than_the_quota_of_any_group_around_it(machine, group, text, expected):
    assert count_cores() == 8
    (machine / group / "cpu.max").write_text(text + "\n")
    assert count_cores() == expected
    (machine / "own").unlink()
    assert count_cores() == (expected if group == "." else 8)
