"""The policy acts and evaluates alike, from weights that a seed or a buffer decides."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from impala_async.config.model import ModelSection
from impala_async.errors import SpacesError
from impala_async.models.flat import Snapshot
from impala_async.models.torso import MLPTorso
from impala_async.policy import Policy
from impala_async.schema import (
    ActionPart,
    ActionSpec,
    ArraySpec,
    ObsSpec,
    Schema,
    recurrent_state,
)
from impala_async.weights import Version, Weights
from tests.training.conftest import are_equal

SECTION = ModelSection(hidden_sizes=(16, 16))
VECTOR = ObsSpec((ArraySpec("", (3,), "float32"),))
PLAIN = Schema(VECTOR, ActionSpec((ActionPart("", "discrete", (4,)),)), rows=5)
COMPOSITE = Schema(
    ObsSpec((ArraySpec("near", (2, 2), "uint8"), ArraySpec("far", (), "float32"))),
    ActionSpec(
        (
            ActionPart("move", "discrete", (3,)),
            ActionPart("push", "continuous", (), (2,)),
            ActionPart("look", "discrete", (2, 4), (2,)),
            ActionPart("turn", "squashed"),
        )
    ),
    rows=5,
)
MASKED = replace(
    COMPOSITE,
    obs=ObsSpec((ArraySpec("legal", (9,), "int8"), *COMPOSITE.obs.leaves)),
    action=replace(COMPOSITE.action, legal="legal"),
)
SCHEMAS = {
    "discrete": PLAIN,
    "composite": COMPOSITE,
    "masked": MASKED,
    **{
        part.kind + str(part.shape): Schema(VECTOR, ActionSpec((part,)), rows=5)
        for part in (
            ActionPart("", "discrete", (2, 3, 2), (3,)),
            ActionPart("", "continuous"),
            ActionPart("", "continuous", (), (2, 3)),
            ActionPart("", "squashed", (), (4,)),
        )
    },
}
each_kind = pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS.keys())
LSTM = ModelSection(core="lstm", core_size=4)
MEMORY = replace(PLAIN, state=recurrent_state("lstm", 4))


def make_policy(schema=PLAIN, seed=0, sharpen=100.0, section=SECTION):
    """A policy whose probabilities differ clearly: the initial head is nearly uniform."""
    policy = Policy(schema, section, seed=seed)
    with torch.no_grad():
        policy.model.policy_head.weight.mul_(sharpen)
    return policy


def remembering(core, schema=PLAIN):
    sizes = {"core_size": 12} if core else {}
    section = ModelSection(hidden_sizes=(16,), core=core, **sizes)
    return make_policy(replace(schema, rows=T, state=recurrent_state(core, 12)), section=section)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def random_obs(schema, *leading, seed=0):
    rng = np.random.default_rng(seed)
    obs = {
        leaf.name: (rng.normal(size=(*leading, *leaf.shape)) * 3).astype(leaf.dtype)
        for leaf in schema.obs.leaves
    }
    if (legal := schema.action.legal) is not None:
        obs[legal] = rng.integers(0, 2, obs[legal].shape, np.int8)
    return obs


def to_torch(arrays):
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


# -------------------- weights


def test_one_seed_gives_bit_equal_weights_whatever_the_global_generator_holds():
    torch.manual_seed(1)
    first = Policy(PLAIN, SECTION, seed=7)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    second, other = Policy(PLAIN, SECTION, seed=7), Policy(PLAIN, SECTION, seed=8)
    assert are_equal(first.tensors, second.tensors)
    assert not are_equal(first.tensors, other.tensors)
    second.act(random_obs(PLAIN, 2), {}, generator())
    assert torch.equal(torch.get_rng_state(), before)


def test_acting_follows_the_weights_that_training_changes_in_place():
    policy, obs = make_policy(), random_obs(PLAIN, 3)
    before = policy.act(obs, {}).actions[""]
    with torch.no_grad():
        policy.model.policy_head.weight.zero_()
        policy.model.policy_head.bias.copy_(torch.eye(4)[(before[0] + 1) % 4])
    assert policy.act(obs, {}).actions[""].tolist() == [(before[0] + 1) % 4] * 3
    assert any((tensor == 0).all() for tensor in policy.tensors)


def test_a_state_that_is_not_the_cores_is_refused():
    for section, state, text in (
        (SECTION, recurrent_state("gru", 4), "model.core: None of 256 here, the schema has"),
        (ModelSection(core="gru"), (), r"model.core: gru of 256 here, the schema has \(\)"),
        (ModelSection(core="gru"), recurrent_state("lstm", 256), "model.core: gru"),
        (ModelSection(core="gru"), recurrent_state("gru", 4), "model.core: gru"),
    ):
        with pytest.raises(SpacesError, match=text):
            Policy(replace(PLAIN, state=state), section, seed=0)


# -------------------- acting


@each_kind
def test_act_gives_an_array_per_part_and_one_log_probability_per_column(schema):
    action = make_policy(schema).act(random_obs(schema, 8), {}, generator())
    assert list(action.actions) == [part.name for part in schema.action.parts]
    for part in schema.action.parts:
        chosen = action.actions[part.name]
        assert (chosen.dtype, chosen.shape) == (part.array.dtype, (8, *part.shape))
        if part.choices:
            assert chosen.min() >= 0
            assert (chosen.reshape(8, -1) < np.array(part.choices)).all()
    assert (action.log_probs.dtype, action.log_probs.shape) == (np.float32, (8,))
    assert action.state == {}


@pytest.mark.parametrize("core", ["lstm", "gru"])
def test_acting_leaves_the_state_that_it_was_given_alone(core):
    policy = remembering(core)
    state, obs = policy.first_state(5), random_obs(PLAIN, 5)
    after, greedy_after = (policy.act(obs, state, chosen).state for chosen in (generator(), None))
    assert not any(part.any() for part in state.values())
    assert list(state) == [array.name for array in policy.model.state]
    for name, part in after.items():
        assert (part.dtype, part.shape) == (np.float32, (5, 12))
        assert part.any()
        assert part.flags.writeable
        assert part.tolist() == greedy_after[name].tolist()


# -------------------- evaluating

T = 7
# False: a masked row. The row after it is an episode's first.
MASKS = torch.tensor(
    [
        [1, 1, 1, 1, 1, 1, 1],
        [1, 1, 0, 1, 1, 1, 1],
        [0, 1, 1, 1, 0, 1, 1],
        [1, 0, 1, 0, 1, 0, 1],
        # The bootstrap row begins an episode.
        [1, 1, 1, 1, 1, 1, 0],
        # Padding, as of a column that has no more rows.
        [1, 1, 0, 0, 0, 0, 0],
    ],
    dtype=torch.bool,
)
B = len(MASKS)


def act_through(policy, schema, obs_BS, state):
    """Act as a sampler does; the trajectory's actions, log-probabilities, and the state after."""
    source, rows, log_probs = generator(), [], []
    for row in range(T):
        obs = {name: np.ascontiguousarray(leaf[:, row]) for name, leaf in obs_BS.items()}
        action = policy.act(obs, state, source)
        rows.append(action.actions)
        log_probs.append(action.log_probs)
        state = action.state
        for part in state.values():
            part[~MASKS[:, row].numpy()] = 0
    actions_BT = {
        part.name: torch.from_numpy(np.stack([row[part.name] for row in rows], 1))
        for part in schema.action.parts
    }
    return actions_BT, np.stack(log_probs), state


@pytest.mark.parametrize("core", [None, "lstm", "gru"])
@each_kind
def test_acting_row_by_row_is_evaluating_at_once(core, schema):
    policy = remembering(core, schema)
    rng = np.random.default_rng(0)
    # Trajectories that are cut in mid-episode: they begin with what came before them.
    state = {
        name: rng.normal(size=part.shape).astype(np.float32)
        for name, part in policy.first_state(B).items()
    }
    last_obs, last_values_B = {}, None
    for seed in (1, 2, 3):
        obs_BS = random_obs(schema, B, T + 1, seed=seed)
        # The bootstrap row is row 0 of the next trajectory.
        for name, leaf in last_obs.items():
            obs_BS[name][:, 0] = leaf
        last_obs = {name: leaf[:, -1] for name, leaf in obs_BS.items()}
        before = {name: torch.from_numpy(part.copy()) for name, part in state.items()}
        actions_BT, acted_TB, state = act_through(policy, schema, obs_BS, state)
        evaluation = policy.evaluate(to_torch(obs_BS), actions_BT, MASKS, before)
        np.testing.assert_allclose(evaluation.log_probs_TB.detach(), acted_TB, rtol=1e-4, atol=1e-5)
        assert core or acted_TB.std() > 0.1
        assert evaluation.entropies_TB.isfinite().all()
        values_SB = evaluation.values_SB.detach()
        if last_values_B is not None:
            torch.testing.assert_close(values_SB[0], last_values_B, rtol=1e-5, atol=1e-5)
        last_values_B = values_SB[-1]


# -------------------- bfloat16


def test_the_weights_of_an_actor_in_bfloat16_are_rounded_once_and_only_the_torsos():
    policy = make_policy(MEMORY, section=LSTM)
    policy.act_in(torch.bfloat16)
    for name, tensor in policy.named_tensors().items():
        is_torso = name.startswith("policy_torso")
        assert tensor.dtype == (torch.bfloat16 if is_torso else torch.float32), name
    # The weights that are loaded from now on act.
    policy.load(Weights(Version(1, 1), np.zeros(policy.layout.num_bytes, np.uint8)))
    assert not any(tensor.any() for tensor in policy.named_tensors().values())
    chosen = policy.act(random_obs(PLAIN, 5), policy.first_state(5), generator())
    assert np.allclose(chosen.log_probs, np.log(0.25))
    assert all(part.dtype == np.float32 for part in chosen.state.values())


IMAGE = Schema(ObsSpec((ArraySpec("", (4, 84, 84), "uint8", is_stack=True),)), PLAIN.action, rows=5)
LOSSLESS = [
    (PLAIN, SECTION),
    (PLAIN, ModelSection(hidden_sizes=(7, 5), shared_torso=False)),
    (IMAGE, ModelSection(name="nature_cnn", hidden_sizes=(33,))),
    (MEMORY, LSTM),
]


@pytest.mark.parametrize(("schema", "section"), LOSSLESS)
def test_coarse_weights_act_in_bfloat16_bit_for_bit_as_fine_ones(schema, section):
    learner = make_policy(schema, seed=2, section=section)
    with torch.no_grad():
        for parameter in learner.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator(7)), alpha=0.1)
    obs, parameters = random_obs(schema, 6), []
    for layout in (learner.layout, learner.coarse_layout):
        weights = Snapshot(layout, learner.tensors).take(Version(1, 4))
        # Torsos whose weights are float32, as at the learner, and those whose are not.
        autocast, cast = (make_policy(schema, section=section) for _ in range(2))
        autocast.compute_in(torch.bfloat16)
        cast.act_in(torch.bfloat16)
        for actor in (autocast, cast):
            actor.load(weights)
            leaves = to_torch(obs)
            state = tuple(to_torch(actor.first_state(6)).values())
            with torch.inference_mode():
                parameters.append(actor.model.act(leaves, state)[0])
    first, *others = parameters
    assert all(torch.equal(first, other) for other in others)


def test_images_are_seen_by_the_weights_that_came_last():
    actor, plain = (make_policy(IMAGE, section=ModelSection(name="nature_cnn")) for _ in range(2))
    actor.act_in(torch.bfloat16)
    plain.compute_in(torch.bfloat16)
    obs = random_obs(IMAGE, 6)
    for seed in range(3):
        learner = make_policy(IMAGE, seed=seed, section=ModelSection(name="nature_cnn"))
        for policy in (actor, plain):
            if seed < 2:
                weights = Snapshot(learner.layout, learner.tensors).take(Version(1, seed + 1))
                policy.load(weights)
            else:
                policy.load_tensors(learner.named_tensors())
        found, expected = (each.act(obs, {}, generator()) for each in (actor, plain))
        assert np.array_equal(found.log_probs, expected.log_probs)


class Normed(MLPTorso):
    """One of ours, with a layer that computes in float32 and does not round what it has."""

    def __init__(self, obs, section):
        super().__init__(obs, section)
        self.norm = torch.nn.LayerNorm(self.num_out)

    def forward(self, obs):
        return self.norm(super().forward(obs))


def test_only_torsos_are_in_bfloat16_and_none_that_is_ones_own():
    policy = make_policy(MEMORY, section=LSTM)
    torso = {name for name in policy.named_tensors() if name.startswith("policy_torso.")}
    assert policy.coarse_layout.rounded == torso
    own = Policy(PLAIN, ModelSection(name="tests.test_policy:Normed"), seed=0)
    assert own.coarse_layout == own.layout
    own.act_in(torch.bfloat16)
    kinds = {tensor.dtype for tensor in own.model.policy_torso.state_dict().values()}
    assert kinds == {torch.float32}
    assert np.isfinite(own.act(random_obs(PLAIN, 5), {}, generator()).log_probs).all()
