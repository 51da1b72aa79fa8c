"""The policy acts and evaluates alike, from weights that a seed or a buffer decides."""

import numpy as np
import pytest
import torch

from impala_async.config import ModelSection
from impala_async.policy import Policy
from impala_async.spec import ActionPart, ActionSpec, ArraySpec, ObsSpec, Schema
from impala_async.weights import NO_VERSION, Version, Weights

SECTION = ModelSection(hidden_sizes=(16, 16))
PLAIN = Schema(
    ObsSpec((ArraySpec("", (3,), "float32"),)),
    ActionSpec((ActionPart("", "discrete", (4,)),)),
    rows=5,
)
COMPOSITE = Schema(
    ObsSpec((ArraySpec("near", (2, 2), "uint8"), ArraySpec("far", (), "float32"))),
    ActionSpec((ActionPart("move", "discrete", (3,)), ActionPart("look", "discrete", (2,)))),
    rows=5,
)


def make_policy(schema=PLAIN, seed=0, sharpen=100.0):
    """A policy whose probabilities differ clearly: the initial head is nearly uniform."""
    policy = Policy(schema, SECTION, seed=seed)
    with torch.no_grad():
        policy.model.policy_head.weight.mul_(sharpen)
    return policy


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def random_obs(schema, *leading, seed=0):
    rng = np.random.default_rng(seed)
    return {
        leaf.name: (rng.normal(size=(*leading, *leaf.shape)) * 3).astype(leaf.dtype)
        for leaf in schema.obs.leaves
    }


def to_torch(arrays):
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def test_one_seed_gives_bit_equal_weights_whatever_the_global_generator_holds():
    torch.manual_seed(1)
    first = Policy(PLAIN, SECTION, seed=7)
    torch.manual_seed(2)
    second, other = Policy(PLAIN, SECTION, seed=7), Policy(PLAIN, SECTION, seed=8)
    assert all(torch.equal(a, b) for a, b in zip(first.tensors, second.tensors, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first.tensors, other.tensors, strict=True))


def test_building_and_acting_leave_the_global_generator_alone():
    before = torch.get_rng_state()
    Policy(PLAIN, SECTION, seed=7).act(random_obs(PLAIN, 2), generator())
    assert torch.equal(torch.get_rng_state(), before)


def test_the_layout_is_the_state_dict_in_its_order():
    policy = make_policy()
    state = policy.model.state_dict()
    assert [array.name for array in policy.layout.arrays] == list(state)
    assert [array.shape for array in policy.layout.arrays] == [
        tuple(v.shape) for v in state.values()
    ]
    assert {array.dtype for array in policy.layout.arrays} == {"float32"}
    assert policy.layout.digest == Policy(PLAIN, SECTION, seed=99).layout.digest


def test_load_puts_the_flat_buffer_into_the_model():
    policy = make_policy()
    assert policy.version == NO_VERSION
    numbers = np.arange(policy.layout.num_bytes // 4, dtype=np.float32)
    policy.load(Weights(Version(2, 5), numbers.view(np.uint8)))
    flat = torch.cat([tensor.flatten() for tensor in policy.model.state_dict().values()])
    assert flat.tolist() == numbers.tolist()
    assert policy.version == Version(2, 5)
    assert all(parameter.requires_grad for parameter in policy.model.parameters())


def test_load_takes_a_read_only_buffer_at_any_address_and_keeps_none_of_it():
    policy = make_policy()
    raw = bytes(1) + np.ones(policy.layout.num_bytes // 4, np.float32).tobytes()
    policy.load(Weights(Version(1, 1), np.frombuffer(raw, np.uint8)[1:]))
    assert all((tensor == 1).all() for tensor in policy.tensors)
    mine = np.zeros(policy.layout.num_bytes, np.uint8)
    policy.load(Weights(Version(1, 2), mine))
    mine[:] = 255
    assert not any(tensor.any() for tensor in policy.tensors)


@pytest.mark.parametrize("missing", [-4, 4])
def test_load_refuses_another_size_and_changes_nothing(missing):
    policy = make_policy()
    before = [tensor.clone() for tensor in policy.tensors]
    buffer = np.zeros(policy.layout.num_bytes - missing, np.uint8)
    with pytest.raises(ValueError, match="do not fit"):
        policy.load(Weights(Version(1, 1), buffer))
    assert all(torch.equal(a, b) for a, b in zip(policy.tensors, before, strict=True))
    assert policy.version == NO_VERSION


@pytest.mark.parametrize("schema", [PLAIN, COMPOSITE], ids=["plain", "composite"])
def test_act_gives_an_index_per_part_and_one_log_probability_per_column(schema):
    action = make_policy(schema).act(random_obs(schema, 8), generator())
    assert list(action.actions) == [part.name for part in schema.action.parts]
    for part in schema.action.parts:
        chosen = action.actions[part.name]
        assert (chosen.dtype, chosen.shape) == (np.int32, (8,))
        assert chosen.min() >= 0
        assert chosen.max() < part.choices[0]
    assert (action.log_probs.dtype, action.log_probs.shape) == (np.float32, (8,))


@pytest.mark.parametrize("schema", [PLAIN, COMPOSITE], ids=["plain", "composite"])
def test_the_log_probability_of_acting_is_that_of_evaluating(schema):
    policy, columns = make_policy(schema), 7
    obs_BS = random_obs(schema, columns, schema.rows + 1)
    actions_BT = {
        part.name: np.empty((columns, schema.rows), np.int32) for part in schema.action.parts
    }
    acted_TB = np.empty((schema.rows, columns), np.float32)
    source = generator()
    for row in range(schema.rows):
        obs = {name: np.ascontiguousarray(leaf[:, row]) for name, leaf in obs_BS.items()}
        action = policy.act(obs, source)
        acted_TB[row] = action.log_probs
        for name, chosen in action.actions.items():
            actions_BT[name][:, row] = chosen
    evaluation = policy.evaluate(to_torch(obs_BS), to_torch(actions_BT))
    assert acted_TB.std() > 0.1
    np.testing.assert_allclose(evaluation.log_probs_TB.detach(), acted_TB, rtol=1e-4, atol=1e-5)


def test_actions_come_from_the_given_generator_alone():
    policy, obs = make_policy(), random_obs(PLAIN, 64)
    first = policy.act(obs, generator(1)).actions[""]
    assert first.tolist() == policy.act(obs, generator(1)).actions[""].tolist()
    assert first.tolist() != policy.act(obs, generator(2)).actions[""].tolist()


def test_actions_are_as_frequent_as_their_probabilities_say():
    policy = make_policy()
    one = random_obs(PLAIN, 1)
    action = policy.act({"": np.repeat(one[""], 40_000, axis=0)}, generator())
    logits = policy.model.logits(to_torch(one))[0][0]
    frequencies = np.bincount(action.actions[""], minlength=4) / 40_000
    np.testing.assert_allclose(frequencies, logits.softmax(-1).detach(), atol=0.01)


def test_greedy_takes_the_likeliest_action_of_every_part():
    policy, obs = make_policy(COMPOSITE), random_obs(COMPOSITE, 9)
    greedy = policy.act_greedy(obs)
    parts = policy.model.logits(to_torch(obs))
    for name, logits_CA in zip(("move", "look"), parts, strict=True):
        assert greedy[name].tolist() == logits_CA.argmax(-1).tolist()
        assert greedy[name].dtype == np.int32


def test_evaluation_is_time_major_and_every_row_of_its_own_observation():
    policy = make_policy()
    obs_BS = torch.randn(4, 6, 3)
    actions_BT = torch.randint(0, 4, (4, 5), dtype=torch.int32)
    evaluation = policy.evaluate({"": obs_BS}, {"": actions_BT})
    assert evaluation.values_SB.shape == (6, 4)
    assert evaluation.log_probs_TB.shape == evaluation.entropies_TB.shape == (5, 4)
    for column in range(4):
        for row in range(6):
            output = policy.model({"": obs_BS[column, row][None]})
            torch.testing.assert_close(evaluation.values_SB[row, column], output.values_N[0])
            if row < 5:
                log_probs_A = output.logits[0][0].log_softmax(-1)
                chosen = log_probs_A[actions_BT[column, row].long()]
                torch.testing.assert_close(evaluation.log_probs_TB[row, column], chosen)
                entropy = -(log_probs_A.exp() * log_probs_A).sum()
                torch.testing.assert_close(evaluation.entropies_TB[row, column], entropy)


def test_columns_that_lie_apart_in_memory_are_evaluated_alike():
    policy = make_policy()
    memory = np.full((4, 100), np.nan, np.float32)
    obs_BS = np.ndarray((4, 6, 3), np.float32, buffer=memory.data, strides=(400, 12, 4))
    obs_BS[:] = np.random.default_rng(0).normal(size=obs_BS.shape)
    actions = {"": torch.zeros(4, 5, dtype=torch.int32)}
    apart = policy.evaluate({"": torch.from_numpy(obs_BS)}, actions)
    dense = policy.evaluate({"": torch.from_numpy(obs_BS.copy())}, actions)
    for one, other in zip(apart, dense, strict=True):
        assert torch.equal(one, other)


def test_entropies_and_log_probabilities_add_up_over_parts():
    policy = make_policy(COMPOSITE)
    obs = to_torch(random_obs(COMPOSITE, 2, 6))
    actions = {"move": torch.full((2, 5), 2), "look": torch.ones(2, 5, dtype=torch.int32)}
    evaluation = policy.evaluate(obs, actions)
    move, look = policy.model.logits({name: leaf[1, 3][None] for name, leaf in obs.items()})
    move_A, look_A = move[0].log_softmax(-1), look[0].log_softmax(-1)
    torch.testing.assert_close(evaluation.log_probs_TB[3, 1], move_A[2] + look_A[1])
    entropy = -(move_A.exp() * move_A).sum() - (look_A.exp() * look_A).sum()
    torch.testing.assert_close(evaluation.entropies_TB[3, 1], entropy)


def test_the_bootstrap_row_has_a_value_and_no_say_in_the_policy():
    policy = make_policy()
    obs_BS = torch.randn(2, 6, 3, requires_grad=True)
    evaluation = policy.evaluate({"": obs_BS}, {"": torch.zeros(2, 5, dtype=torch.int32)})
    total = evaluation.log_probs_TB.sum() + evaluation.entropies_TB.sum()
    (policy_grad,) = torch.autograd.grad(total, obs_BS, retain_graph=True)
    (value_grad,) = torch.autograd.grad(evaluation.values_SB[-1].sum(), obs_BS)
    assert not policy_grad[:, -1].any()
    assert policy_grad[:, :-1].any(-1).all()
    assert value_grad[:, -1].any(-1).all()


def test_acting_follows_the_weights_that_training_changes_in_place():
    policy, obs = make_policy(), random_obs(PLAIN, 3)
    before = policy.act_greedy(obs)[""]
    with torch.no_grad():
        policy.model.policy_head.weight.zero_()
        policy.model.policy_head.bias.copy_(torch.eye(4)[(before[0] + 1) % 4])
    assert policy.act_greedy(obs)[""].tolist() == [(before[0] + 1) % 4] * 3
    assert any((tensor == 0).all() for tensor in policy.tensors)


def test_a_schema_with_recurrent_state_is_refused():
    schema = Schema(PLAIN.obs, PLAIN.action, rows=5, state=(ArraySpec("h", (4,), "float32"),))
    with pytest.raises(ValueError, match="state"):
        Policy(schema, SECTION, seed=0)
