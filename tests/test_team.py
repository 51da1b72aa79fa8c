"""A team acts as its members do, each for the columns that it plays."""

from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from impala_async.config.model import ModelSection
from impala_async.config.policies import ONE_POLICY, PoliciesSection
from impala_async.errors import ConfigError, EnvError, SpacesError
from impala_async.models.flat import Snapshot
from impala_async.policy import Policy, Team, build_policy, check_defaults, member_seed_of
from impala_async.schema import (
    ActionPart,
    ActionSpec,
    ArraySpec,
    ObsSpec,
    Schema,
    policy_leaf,
    recurrent_state,
)
from impala_async.weights import NO_VERSION, Version, Weights
from tests.training.conftest import are_equal as are_alike

TRIO = PoliciesSection(
    names=("main", "past", "other"), copies={"past": "main"}, copy_every_updates=3
)
C = 7
PLAYERS = np.array([2, 0, 1, 1, 0, 2, 2], np.uint8)


def schema_of(core):
    leaves = ArraySpec("sight", (3,), "float32"), ArraySpec("legal", (4,), "int8")
    return Schema(
        obs=ObsSpec((*leaves, policy_leaf(TRIO.names))),
        action=ActionSpec(
            (ActionPart("go", "discrete", (4,)), ActionPart("push", "continuous", (), (2,))),
            legal="legal",
        ),
        rows=5,
        state=recurrent_state(core, 6),
        policies=TRIO.names,
    )


def model_of(core):
    return ModelSection(hidden_sizes=(8,), **({"core": core, "core_size": 6} if core else {}))


def make_team(core=None, seed=0):
    return Team(schema_of(core), model_of(core), TRIO, seed=seed)


def inputs(team, seed=0):
    rng = np.random.default_rng(seed)
    legal = np.ones((C, 4), np.int8)
    legal[:, 1:3] = rng.integers(0, 2, (C, 2))
    obs = {"sight": rng.normal(size=(C, 3)).astype(np.float32), "legal": legal, "policy": PLAYERS}
    state = {
        name: rng.normal(size=part.shape).astype(np.float32)
        for name, part in team.first_state(C).items()
    }
    return obs, state


def columns_of(arrays, columns):
    return {name: array[columns] for name, array in arrays.items()}


def are_equal(mine, theirs):
    return mine.keys() == theirs.keys() and all(np.array_equal(mine[k], theirs[k]) for k in mine)


@pytest.mark.parametrize("seed", [3, None])
@pytest.mark.parametrize("core", [None, "lstm", "gru"])
def test_each_column_is_acted_for_by_its_member_alone(core, seed):
    team = make_team(core)
    obs, state = inputs(team)

    def source():
        return None if seed is None else torch.Generator().manual_seed(seed)

    chosen, one = team.act(obs, state, source()), source()
    for number, member in enumerate(team.members.values()):
        columns = np.flatnonzero(number == PLAYERS)
        alone = member.act(columns_of(obs, columns), columns_of(state, columns), one)
        assert are_equal(columns_of(chosen.actions, columns), alone.actions)
        assert np.array_equal(chosen.log_probs[columns], alone.log_probs)
        assert are_equal(columns_of(chosen.state, columns), alone.state)
    assert chosen.log_probs.dtype == np.float32
    assert [a.dtype for a in chosen.actions.values()] == [np.int32, np.float32]
    # A sampler writes to it.
    assert all(part.flags.writeable for part in chosen.state.values())
    assert obs["legal"][np.arange(C), chosen.actions["go"]].all()


def test_members_begin_different_and_a_copy_as_its_source():
    first, again, other = make_team(), make_team(), make_team(seed=1)
    weights = {
        name: torch.cat([tensor.flatten() for tensor in member.tensors])
        for name, member in first.members.items()
    }
    assert torch.equal(weights["main"], weights["past"])
    assert not torch.equal(weights["main"], weights["other"])
    assert are_alike(first.tensors, again.tensors)
    assert not are_alike(first.tensors, other.tensors)
    assert len({member_seed_of(run, number) for run in range(5) for number in range(5)}) == 25


def test_weights_of_all_members_travel_as_one():
    source, target = make_team(seed=1), make_team()
    assert target.layout.arrays[0].name.startswith("main/")
    assert target.layout.digest == source.layout.digest
    assert len(target.layout.arrays) == 3 * len(target.members["main"].layout.arrays)
    assert target.version == NO_VERSION
    target.load(Snapshot(source.layout, source.tensors).take(Version(2, 5)))
    assert target.version == Version(2, 5)
    assert are_alike(target.tensors, source.tensors)
    obs, state = inputs(target)
    assert are_equal(target.act(obs, state).actions, source.act(obs, state).actions)
    # Coarse ones too.
    weights = Snapshot(source.coarse_layout, source.tensors).take(Version(2, 6))
    assert weights.buffer.nbytes < source.layout.num_bytes
    target.load(weights)
    for name, tensor in target.named_tensors().items():
        sent = source.named_tensors()[name]
        assert torch.equal(tensor, sent.bfloat16().float() if "torso" in name else sent)
    # By their names they can be put back.
    target.load_tensors({name: tensor.clone() for name, tensor in source.named_tensors().items()})
    assert are_alike(target.tensors, source.tensors)
    with pytest.raises(RuntimeError, match="Missing key"):
        target.load_tensors({})


def test_a_config_has_one_policy_or_a_team():
    schema, model = schema_of(None), model_of(None)
    assert isinstance(build_policy(schema, model, TRIO, seed=0), Team)
    alone = replace(schema, policies=())
    assert isinstance(build_policy(alone, model, ONE_POLICY, seed=0), Policy)
    with pytest.raises(
        SpacesError, match=r"policies.names: \(\) here, \('main', 'past', 'other'\)"
    ):
        build_policy(schema, model, ONE_POLICY, seed=0)


def test_a_team_in_bfloat16_is_one_of_all_its_members():
    team = make_team(None)
    team.act_in(torch.bfloat16)
    for member in team.members.values():
        assert member.model.policy_torso.layers[0].weight.dtype == torch.bfloat16
    # Not those of before: what is loaded is written to these.
    team.load(Weights(Version(1, 1), np.zeros(team.layout.num_bytes, np.uint8)))
    assert not any(tensor.any() for tensor in team.tensors)


def test_members_that_see_images_act_by_the_weights_that_came_last():
    sight = ArraySpec("sight", (4, 84, 84), "uint8")
    obs = ObsSpec((sight, policy_leaf(TRIO.names)))
    go = ActionSpec((ActionPart("go", "discrete", (4,)),))
    schema, model = Schema(obs, go, 5, policies=TRIO.names), ModelSection(name="nature_cnn")
    actor, plain = (Team(schema, model, TRIO, seed=0) for _ in range(2))
    actor.act_in(torch.bfloat16)
    plain.compute_in(torch.bfloat16)
    pixels = np.random.default_rng(0).integers(0, 256, (C, 4, 84, 84), np.uint8)
    for seed in (1, 2):
        learner = Team(schema, model, TRIO, seed=seed)
        weights = Snapshot(learner.layout, learner.tensors).take(Version(1, seed))
        chosen = []
        for team in (actor, plain):
            team.load(weights)
            generator = torch.Generator().manual_seed(0)
            chosen.append(team.act({"sight": pixels, "policy": PLAYERS}, {}, generator))
        assert np.array_equal(chosen[0].log_probs, chosen[1].log_probs)


@pytest.mark.parametrize("size", [2**62, 10**30])
def test_a_network_too_large_for_any_memory_is_told_in_one_line(size):
    model = ModelSection(hidden_sizes=(size,))
    with pytest.raises(ConfigError, match=r"^model: there is no memory here .*[Oo]verflow") as told:
        build_policy(schema_of(None), model, TRIO, seed=0)
    assert "\n" not in str(told.value)


def test_what_is_no_matter_of_memory_is_raised_as_it_is(monkeypatch):
    schema = replace(schema_of(None), policies=())
    for error, kind in (
        (MemoryError(), SpacesError),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 160 GB\nat"), SpacesError),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB"), SpacesError),
        (RuntimeError("a bug"), RuntimeError),
    ):
        monkeypatch.setattr("impala_async.policy.ActorCritic", Mock(side_effect=error))
        with pytest.raises(kind) as caught:
            build_policy(schema, model_of(None), ONE_POLICY, seed=0)
        assert type(caught.value) is kind, error


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_an_environment_that_changes_the_default_dtype_is_named(dtype):
    check_defaults("Fine-v0")
    torch.set_default_dtype(dtype)
    try:
        with pytest.raises(EnvError, match=f"^Wide-v0 has called .*{dtype}.*make its tensors with"):
            check_defaults("Wide-v0")
    finally:
        torch.set_default_dtype(torch.float32)


def test_an_environment_that_changes_the_default_device_is_named():
    torch.set_default_device("meta")
    try:
        with pytest.raises(
            EnvError, match=r"^Far-v0 has called .*_device\('meta'\), .* with device="
        ):
            check_defaults("Far-v0")
    finally:
        torch.set_default_device(None)
