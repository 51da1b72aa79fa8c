"""Heads, core and normalisers around a torso."""

import pytest
import torch

from impala_async.config.model import ModelSection
from impala_async.errors import SpacesError
from impala_async.models.actor_critic import ActorCritic, Core
from impala_async.schema import ActionPart, ActionSpec, ArraySpec, ObsSpec, recurrent_state

PLAIN_OBS = ObsSpec((ArraySpec("", (3,), "float32"),))
PLAIN_ACTION = ActionSpec((ActionPart("", "discrete", (4,)),))
MIXED_ACTION = ActionSpec(
    (
        ActionPart("push", "continuous", (), (2,)),
        ActionPart("move", "discrete", (2, 3), (2,)),
        ActionPart("turn", "squashed"),
    )
)


def build(obs=PLAIN_OBS, action=PLAIN_ACTION, **settings):
    section = ModelSection(**{"hidden_sizes": (8, 8), **settings})
    return ActorCritic(section, obs, action)


def rows(num=5):
    return {"": torch.randn(num, 3)}


# -------------------- heads


@pytest.mark.parametrize("settings", [{}, {"shared_torso": True}, {"normalize_obs": True}])
def test_outputs_one_value_and_all_parameters_per_row_and_acting_has_the_same(settings):
    model, obs = build(action=MIXED_ACTION, **settings), rows(7)
    output = model(obs)
    assert output[0].shape == (7, 4 + 5 + 2)
    assert output[1].shape == (7,)
    parameters_NP, state = model.act(obs, ())
    assert torch.equal(parameters_NP, output[0])
    assert state == model.state == ()


def test_a_shared_torso_feeds_both_heads_and_own_torsos_only_their_own():
    shared, separate = build(shared_torso=True), build(shared_torso=False)
    shared(rows())[1].sum().backward()
    separate(rows())[1].sum().backward()
    assert shared.policy_torso.layers[0].weight.grad is not None
    assert shared.value_torso is None
    assert separate.policy_torso.layers[0].weight.grad is None
    assert separate.value_torso.layers[0].weight.grad is not None


def test_the_first_policy_is_nearly_uniform_and_the_first_value_is_not_tiny():
    model = build()
    logits_NA = model(rows(100))[0]
    assert (logits_NA.softmax(-1) - 0.25).abs().max() < 0.02
    torch.testing.assert_close(model.value_head.weight.norm(), torch.tensor(1.0))


def test_a_deviation_is_a_parameter_of_its_own_behind_the_means():
    model = build(action=MIXED_ACTION)
    head = model.policy_head
    model(rows())[0][:, [2, 3, 10]].sum().backward()
    assert [log_std.grad.tolist() for log_std in head.log_stds] == [[5.0, 5.0], [5.0]]
    assert "policy_head.log_stds.0" in model.state_dict()
    with torch.no_grad():
        head.weight.zero_()
        head.bias.copy_(torch.arange(8))
        head.log_stds[0].copy_(torch.tensor([-1.0, -2.0]))
        head.log_stds[1].fill_(-3.0)
    expected = [0, 1, -1, -2, *(2, 3, 4, 5, 6), 7, -3]
    assert model(rows(2))[0].tolist() == [expected] * 2


@pytest.mark.parametrize("is_from_state", [False, True])
@pytest.mark.parametrize("std", [1.0, 0.25])
def test_exploring_begins_with_the_deviation_that_is_asked_for(is_from_state, std):
    model = build(action=MIXED_ACTION, state_dependent_std=is_from_state, initial_std=std)
    assert len(model.policy_head.log_stds) == (0 if is_from_state else 2)
    push, move, turn = model(rows(50))[0].split([4, 5, 2], -1)
    # The head begins small, so what a state changes is small too.
    for log_stds in (push[:, 2:], turn[:, 1:]):
        assert torch.allclose(log_stds.exp(), torch.tensor(std), rtol=0.2)
        assert (log_stds.std(0) > 0).all() == is_from_state
    for others in (push[:, :2], move, turn[:, :1]):
        assert others.abs().max() < 0.2


def test_a_deviation_without_numbers_is_refused():
    for key, value in (("state_dependent_std", True), ("initial_std", 0.5)):
        with pytest.raises(SpacesError, match=rf"model\.{key}.* no continuous numbers"):
            build(**{key: value})


# -------------------- normalisers

OBS = ObsSpec(
    (
        ArraySpec("speed", (2, 2), "float64"),
        ArraySpec("stock", (2,), "int64"),
        ArraySpec("flag", (), "bool"),
        ArraySpec("lamp", (2,), "int64", (9, 9)),
        ArraySpec("height", (), "float32"),
        ArraySpec("depth", (4, 4, 1), "float32"),
    )
)


@pytest.mark.parametrize("wants", [True, "auto"])
def test_vectors_of_numbers_are_normalised_in_their_own_shapes_and_nothing_else(wants):
    model = build(OBS, normalize_obs=wants)
    obs = {
        "speed": torch.randn(6, 2, 2, dtype=torch.float64) * 3 + 5,
        "stock": torch.randint(0, 1000, (6, 2)),
        "flag": torch.tensor([True, False, True, True, False, True]),
        "lamp": torch.randint(0, 9, (6, 2)),
        "height": torch.randn(6) * 100,
        "depth": torch.rand(6, 4, 4, 1),
    }
    # One column; the last of its rows is masked, and the bootstrap row never counts.
    column = {name: torch.cat([leaf, leaf[:1]]).unsqueeze(0) for name, leaf in obs.items()}
    model.update_statistics(column, torch.tensor([[True] * 5 + [False]]))
    seen = []
    model.policy_torso.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(obs)
    (leaves,) = seen
    for name in ("speed", "stock", "flag", "height"):
        values, shown = obs[name], leaves[name]
        assert (shown.shape, shown.dtype) == (values.shape, torch.float32)
        unit = float(not values.is_floating_point())
        values = values.double()
        mean, variance = values[:5].mean(0), values[:5].var(0, correction=0)
        deviation = (variance + unit).sqrt()
        expected = ((values - mean) / deviation).clamp(-10, 10).float()
        torch.testing.assert_close(shown, expected, rtol=1e-3, atol=1e-3)
    assert leaves["lamp"] is obs["lamp"]
    assert leaves["depth"] is obs["depth"]


@pytest.mark.parametrize("leaf", [OBS.leaves[3], OBS.leaves[5]], ids=["categories", "image"])
def test_nothing_to_normalise_is_refused(leaf):
    with pytest.raises(SpacesError, match=r"model\.normalize_obs: .* no vector of numbers"):
        build(ObsSpec((leaf,)), normalize_obs=True)
    assert not len(build(ObsSpec((leaf,)), normalize_obs="auto").normalizers)


def test_a_torso_sees_whole_numbers_that_are_normalised_and_a_users_own_sees_them_as_they_are():
    for name, is_normal in (("mlp", True), (f"{__name__}:Table", False)):
        model = build(ObsSpec((ArraySpec("", (2,), "int64"),)), name=name)
        assert len(model.normalizers) == is_normal
        assert model({"": torch.tensor([[3, 1], [0, 2]])})[1].isfinite().all()


class Table(torch.nn.Module):
    """Its embedding has a row for each number."""

    num_out = 8

    def __init__(self, obs, section):
        super().__init__()
        self.rows = torch.nn.Embedding(4, 4)

    def forward(self, obs):
        return self.rows(obs[""]).flatten(1)


# -------------------- precision


def test_in_bfloat16_torsos_are_coarse_and_all_else_is_float32():
    model, obs = build(shared_torso=False), rows(64)
    exact = model(obs)
    model.precision = torch.bfloat16
    coarse = model(obs)
    for is_, was in zip(coarse, exact, strict=True):
        assert is_.dtype == torch.float32
        assert not torch.equal(is_, was)
        # Eight bits of mantissa, through two layers.
        assert torch.allclose(is_, was, rtol=0.05, atol=0.05 * float(was.detach().abs().max()))
    assert torch.equal(model.act(obs, ())[0], coarse[0])
    coarse[1].sum().backward()
    gradients = [weight.grad for weight in model.value_torso.parameters()]
    assert all(gradient.dtype == torch.float32 and gradient.any() for gradient in gradients)


# -------------------- the core over many rows is its step row by row

KINDS = pytest.mark.parametrize("kind", ["lstm", "gru"])
S, B, H, K = 7, 3, 4, 5


def inputs(seed=0):
    torch.manual_seed(seed)
    is_first_SB = torch.zeros(S, B, dtype=torch.bool)
    is_first_SB[3, 0] = is_first_SB[0, 1] = is_first_SB[6, 1] = is_first_SB[4, 1] = True
    return torch.randn(S, B, H), is_first_SB


def state_of(kind, size=K):
    return tuple(torch.randn(B, *spec.shape) for spec in recurrent_state(kind, size))


@KINDS
def test_the_cell_is_torchs_own(kind):
    core, (features_SBH, _) = Core(kind, H, K), inputs()
    layer = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}[kind](H, K)
    for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
        parameter = getattr(core.cell, name)
        torch.nn.init.normal_(parameter, std=0.5)
        getattr(layer, f"{name}_l0").data.copy_(parameter.data)
    zeros = tuple(torch.zeros(B, K) for _ in recurrent_state(kind, K))
    expected, _ = layer(features_SBH)
    got = core(features_SBH, zeros, torch.zeros(S, B, dtype=torch.bool))
    torch.testing.assert_close(got, expected)


@KINDS
def test_no_gradient_and_no_nan_crosses_a_reset(kind):
    core, (features_SBH, is_first_SB) = Core(kind, H, K), inputs()
    features_SBH.requires_grad_()
    state = tuple(part.requires_grad_() for part in state_of(kind))
    outputs_SBK = core(features_SBH, state, is_first_SB)
    # Column 0 begins an episode at row 3: what comes from there on knows nothing before it.
    (gradient,) = torch.autograd.grad(outputs_SBK[3:, 0].sum(), features_SBH, retain_graph=True)
    assert not gradient[:3].any()
    assert gradient[3:, 0].any(-1).all()
    # Column 1 begins one at row 0, column 2 none: the state before row 0 counts only there.
    gradients = torch.autograd.grad(outputs_SBK.sum(), state)
    for part in gradients:
        assert not part[1].any()
        assert part[2].any()
    broken = tuple(part.detach().clone() for part in state)
    for part in broken:
        part[1] = torch.nan
    assert core(features_SBH, broken, is_first_SB).isfinite().all()


@KINDS
def test_it_carries_what_the_schema_says_and_begins_orthogonal(kind):
    core = Core(kind, H, 64)
    state = state_of(kind, 64)
    after = core.step(torch.randn(B, H), state)
    assert [part.shape for part in after] == [part.shape for part in state]
    torch.testing.assert_close(core.cell.weight_hh.T @ core.cell.weight_hh, torch.eye(64))
    assert not core.cell.bias_ih.any()
    assert not core.cell.bias_hh.any()
