"""What each sampler is made of, and what does not fit."""

from typing import Any

import pytest
import torch

from impala_async.actor.samplers import stage as stage_module
from impala_async.actor.samplers.alternating import AlternatingSampler
from impala_async.actor.samplers.direct import DirectSampler
from impala_async.actor.samplers.stage import Stage, count_workers, pick_device, set_stage
from impala_async.actor.workers import WorkerEnvs
from impala_async.config.actor import ActorSection, SamplerName
from impala_async.envs.vector import SerialEnvs, VectorEnvs
from impala_async.errors import EnvError, MismatchError
from impala_async.spec import Schema
from tests.actor.fakes import FakeBuffers, FakePolicy, NoNews
from tests.actor.worlds import section

POLE = section("CartPole-v1")


def set_for(sampler: SamplerName, num_envs: int = 4, env: Any = POLE, **actor: Any) -> Stage:
    return set_stage(sampler, ActorSection(sampler=sampler, **actor), env, num_envs)


@pytest.mark.parametrize(
    ("sampler", "kind", "widths", "has_two_groups"),
    [
        ("serial", SerialEnvs, [4], False),
        ("vector", VectorEnvs, [4], False),
        ("auto", VectorEnvs, [4], False),
        ("parallel", WorkerEnvs, [4], False),
        ("alternating", WorkerEnvs, [2, 2], True),
    ],
)
def test_each_name_has_its_environments_and_its_loop(
    sampler: SamplerName, kind: type, widths: list[int], has_two_groups: bool
) -> None:
    stage = set_for(sampler)
    assert all(type(envs) is kind for envs in stage.groups)
    assert [envs.num_envs for envs in stage.groups] == widths
    assert (stage.columns_per_message, stage.num_streams) == (widths[0], len(widths))
    assert stage.name == ("vector" if sampler == "auto" else sampler)
    assert stage.device == "cpu"
    assert str(stage) == stage.name
    schema = Schema(stage.obs_spec, stage.action_spec, 4)
    made = stage.build_sampler(
        schema, FakePolicy(), None, buffers=FakeBuffers(schema), newest=NoNews(), seed=0
    )
    assert isinstance(made, AlternatingSampler if has_two_groups else DirectSampler)
    calls = 4 * len(widths) + len(widths) - 1
    messages = [message for _ in range(calls) for message in made.step()]
    assert [message.buffer.num_columns for message in messages] == widths
    made.close()


@pytest.mark.parametrize("sampler", ["auto", "serial", "vector", "parallel", "alternating"])
def test_any_sampler_acts_on_the_device_that_is_named(
    sampler: SamplerName, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_module, "count_gpus", lambda: 2)
    stage = set_for(sampler, device="cuda:1")
    assert stage.device == "cuda:1"
    assert str(stage) == f"{stage.name} on cuda:1"
    stage.close()


def test_columns_that_reset_in_their_step_travel_alone() -> None:
    stage = set_for("alternating", env=section("short_poles"))
    assert (stage.columns_per_message, stage.num_streams) == (1, 4)
    stage.close()


def test_all_groups_are_closed_and_the_first_fault_is_told() -> None:
    stage = set_for("alternating", env=section("BadEnd"))
    with pytest.raises(EnvError, match="BadEnd failed in close"):
        stage.close()


@pytest.mark.parametrize(
    ("sampler", "wanted", "num_envs", "num_cores", "expected"),
    [
        ("parallel", None, 8, 4, 4),
        ("parallel", None, 3, 4, 3),
        ("parallel", None, 8, 1, 1),
        ("parallel", 6, 8, 2, 6),
        ("parallel", None, 8, 5, 5),
        ("alternating", None, 8, 5, 4),
        ("alternating", None, 8, 1, 2),
        ("alternating", None, 2, 16, 2),
    ],
)
def test_a_worker_for_each_core_unless_the_config_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
    sampler: SamplerName,
    wanted: int | None,
    num_envs: int,
    num_cores: int,
    expected: int,
) -> None:
    monkeypatch.setattr(stage_module, "count_cores", lambda: num_cores)
    assert count_workers(sampler, wanted, num_envs) == expected


def test_an_actors_own_number_of_environments_must_fit() -> None:
    with pytest.raises(MismatchError, match=r"--num-envs: actor\.num_workers is 4.*got 3"):
        count_workers("parallel", 4, 3)
    with pytest.raises(MismatchError, match=r"--num-envs: .*alternating.*got 5: .*even number"):
        count_workers("alternating", None, 5)


def test_a_device_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
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
