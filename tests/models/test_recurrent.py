"""The core over many rows is its step row by row, with resets where episodes begin."""

import pytest
import torch

from impala_async.models.recurrent import Core
from impala_async.spec import recurrent_state

KINDS = pytest.mark.parametrize("kind", ["lstm", "gru"])
S, B, H, K = 7, 3, 4, 5


def inputs(seed=0):
    torch.manual_seed(seed)
    is_first_SB = torch.zeros(S, B, dtype=torch.bool)
    is_first_SB[3, 0] = is_first_SB[0, 1] = is_first_SB[6, 1] = is_first_SB[4, 1] = True
    return torch.randn(S, B, H), is_first_SB


def state_of(core):
    return tuple(torch.randn(B, *spec.shape) for spec in core.specs)


@KINDS
def test_forward_is_the_step_row_by_row(kind):
    core, (features_SBH, is_first_SB) = Core(kind, H, K), inputs()
    state = state_of(core)
    outputs_SBK = core(features_SBH, state, is_first_SB)
    assert outputs_SBK.shape == (S, B, core.num_out) == (S, B, K)
    for column in range(B):
        one = tuple(part[column : column + 1] for part in state)
        for row in range(S):
            if is_first_SB[row, column]:
                one = tuple(torch.zeros(1, K) for _ in state)
            one = core.step(features_SBH[row, column : column + 1], one)
            torch.testing.assert_close(outputs_SBK[row, column], one[0][0])


@KINDS
def test_the_cell_is_torchs_own(kind):
    core, (features_SBH, _) = Core(kind, H, K), inputs()
    layer = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}[kind](H, K)
    for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
        parameter = getattr(core.cell, name)
        torch.nn.init.normal_(parameter, std=0.5)
        getattr(layer, f"{name}_l0").data.copy_(parameter.data)
    zeros = tuple(torch.zeros(B, K) for _ in core.specs)
    expected, _ = layer(features_SBH)
    got = core(features_SBH, zeros, torch.zeros(S, B, dtype=torch.bool))
    torch.testing.assert_close(got, expected)


@KINDS
def test_no_gradient_and_no_nan_crosses_a_reset(kind):
    core, (features_SBH, is_first_SB) = Core(kind, H, K), inputs()
    features_SBH.requires_grad_()
    state = tuple(part.requires_grad_() for part in state_of(core))
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
def test_what_it_carries_is_what_the_schema_says(kind):
    core = Core(kind, H, K)
    assert core.specs == recurrent_state(kind, K)
    assert core.specs[0].name == "hidden"
    state = state_of(core)
    after = core.step(torch.randn(B, H), state)
    assert [part.shape for part in after] == [part.shape for part in state]


@KINDS
def test_weights_begin_orthogonal_and_biases_zero(kind):
    core = Core(kind, H, 64)
    torch.testing.assert_close(core.cell.weight_hh.T @ core.cell.weight_hh, torch.eye(64))
    assert not core.cell.bias_ih.any()
    assert not core.cell.bias_hh.any()
