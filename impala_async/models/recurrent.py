"""The recurrent core: an LSTM or a GRU between torso and heads, and what its state is.

The state is zero before an episode's first row; no gradient crosses such a reset. Each row's state
is one vector per column, so the state that a trajectory began with can travel with it.

B columns, S observation rows, H features in, K numbers of a state
"""

from typing import Literal

import torch
from torch import Tensor, nn

from impala_async.spec import recurrent_state

State = tuple[Tensor, ...]
"""One tensor `[B, K]` per entry of `specs`."""


class Core(nn.Module):
    """One recurrent layer with K units."""

    def __init__(self, kind: Literal["lstm", "gru"], num_in: int, size: int) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(num_in, size) if kind == "lstm" else nn.GRUCell(num_in, size)
        for weight in (self.cell.weight_ih, self.cell.weight_hh):
            nn.init.orthogonal_(weight)
        for bias in (self.cell.bias_ih, self.cell.bias_hh):
            nn.init.zeros_(bias)
        self.num_out = size
        self.specs = recurrent_state(kind, size)

    def step(self, features_BH: Tensor, state: State) -> State:
        """One row further; the first tensor of the new state is the output."""
        if len(state) == 1:
            return (self.cell(features_BH, state[0]),)
        hidden_BK, cell_BK = self.cell(features_BH, state)
        return hidden_BK, cell_BK

    def forward(self, features_SBH: Tensor, state: State, is_first_SB: Tensor) -> Tensor:
        """`[S, B, K]` outputs from the state before row 0; reset before rows that are first."""
        outputs = []
        keeps_SB1 = (~is_first_SB).unsqueeze(-1)
        for features_BH, keeps_B1 in zip(features_SBH, keeps_SB1, strict=True):
            # A `where`, so that no gradient and no NaN crosses a reset.
            state = tuple(torch.where(keeps_B1, part, 0.0) for part in state)
            state = self.step(features_BH, state)
            outputs.append(state[0])
        return torch.stack(outputs)
