"""The actor-critic: observation leaves in, parameters of each action part and a value out.

    leaves ─► normaliser ─► torso ─► core, if there is one ─► heads

N rows, B columns, S observation rows, H hidden features, K numbers of a state of the core,
P parameters of all action parts
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

from impala_async.config.model import ModelSection
from impala_async.errors import ConfigError, SpacesError
from impala_async.models.leaves import Normalizer, as_exact, normal_leaves
from impala_async.models.packed import PackedTorso, packed
from impala_async.models.torso import (
    TORSOS,
    choose_torso,
    draw_orthogonal,
    make_torso,
    orthogonal,
)
from impala_async.schema import ActionPart, ActionSpec, ObsSpec, Schema, recurrent_state
from impala_async.user_code import UserCode

# Small, so that the first policy is nearly uniform and no action starts ahead.
POLICY_GAIN = 0.01

State = tuple[Tensor, ...]
"""One tensor `[B, K]` per entry of `ActorCritic.state`."""


class ActorCritic(nn.Module):
    """A policy and a value over one shared torso or over one each, freshly initialised."""

    def __init__(self, section: ModelSection, obs: ObsSpec, action: ActionSpec) -> None:
        super().__init__()
        section = choose_torso(section, obs)
        self.section, self.torso_name = section, section.name
        # An error of a torso of the user's own is told as that.
        own = UserCode(f"model.name: {section.name}", "to make features", SpacesError)
        self._calling = nullcontext() if section.name in TORSOS else own
        # Torsos compute in this precision. Weights, core, heads and all after them stay float32.
        self.precision = torch.float32
        self._normal_leaves = normal_leaves(section, obs)
        self.normalizers = nn.ModuleList(
            Normalizer(leaf.num_items, is_whole=not leaf.is_float) for leaf in self._normal_leaves
        )
        self.policy_torso = make_torso(section, obs)
        self.value_torso = None if section.has_shared_torso else make_torso(section, obs)
        self._packed: PackedTorso | None = None
        num_hidden: Any = self.policy_torso.num_out
        self.core = None
        if section.core:
            self.core = Core(section.core, num_hidden, section.core_size)
            num_hidden = section.core_size
        self.state = recurrent_state(section.core, section.core_size)
        """The specs of the state that the core carries from row to row, for one column."""
        self.policy_head = PolicyHead(num_hidden, action.parts, section)
        self.value_head = orthogonal(nn.Linear(num_hidden, 1), gain=1.0)

    def check_state(self, schema: Schema) -> None:
        """Raise SpacesError if the schema's state is not that of the core."""
        if self.state != schema.state:
            core = f"{self.section.core} of {self.section.core_size}"
            raise SpacesError(f"model.core: {core} here, the schema has {schema.state}")

    def act_alone(self, precision: torch.dtype) -> None:
        """From now on do nothing but act, with the torso in this precision."""
        # To cast the weights at every step would cost what the step gains.
        self.policy_torso.to(precision)
        self._packed = packed(self.policy_torso)

    def act(self, obs: dict[str, Tensor], state: State) -> tuple[Tensor, State]:
        """Parameters of `[N, ...]` leaves and the next state; no value is computed."""
        features_NH = self._features(self._packed or self.policy_torso, self.normal(obs))
        if self.core is None:
            return self.policy_head(features_NH), state
        state = self.core.step(features_NH, state)
        return self.policy_head(state[0]), state

    def forward(
        self, obs: dict[str, Tensor], state: State = (), is_first_BS: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Parameters `[N, P]` and values `[N]`; with a core of N = B * S rows, column by column."""
        obs = self.normal(obs)
        policy_NH = self._features(self.policy_torso, obs)
        if self.core is not None:
            assert is_first_BS is not None, "a core must know where episodes begin"
            features_BSH = policy_NH.reshape(*is_first_BS.shape, -1)
            outputs_SBH = self.core(features_BSH.transpose(0, 1), state, is_first_BS.t())
            policy_NH = outputs_SBH.transpose(0, 1).flatten(0, 1)
        torso = self.value_torso
        value_NH = policy_NH if torso is None else self._features(torso, obs)
        return self.policy_head(policy_NH), self.value_head(value_NH).squeeze(-1)

    def update_statistics(
        self,
        obs_BS: dict[str, Tensor],
        mask_BT: Tensor,
        sum_up: Callable[[Tensor], Tensor] = lambda sums: sums,
    ) -> None:
        """Show the normalisers the valid rows of `[B, S, ...]` leaves. Where other ranks have more
        of them, `sum_up` adds their sums."""
        for leaf, normalizer in zip(self._normal_leaves, self.normalizers, strict=True):
            assert isinstance(normalizer, Normalizer)
            rows = obs_BS[leaf.name][:, :-1].flatten(0, 1)
            normalizer.update(as_exact(leaf, rows), mask_BT.flatten(), sum_up)

    def _features(
        self, torso: Callable[[dict[str, Tensor]], Tensor], obs: dict[str, Tensor]
    ) -> Tensor:
        obs = dict(obs)  # what a torso stores in it is not for the other one
        with self._calling:
            if self.precision == torch.float32:
                return torso(obs)
            with torch.autocast(self.value_head.weight.device.type, self.precision):
                return torso(obs).float()

    def normal(self, obs: dict[str, Tensor]) -> dict[str, Tensor]:
        """The leaves as torsos are given them."""
        normal = {}
        for leaf, normalizer in zip(self._normal_leaves, self.normalizers, strict=True):
            values = obs[leaf.name]
            normal[leaf.name] = normalizer(as_exact(leaf, values)).view(values.shape)
        return {**obs, **normal}


class Core(nn.Module):
    """One recurrent layer, an LSTM or a GRU with K units."""

    def __init__(self, kind: Literal["lstm", "gru"], num_in: int, size: int) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(num_in, size) if kind == "lstm" else nn.GRUCell(num_in, size)
        for weight in (self.cell.weight_ih, self.cell.weight_hh):
            draw_orthogonal(weight)
        for bias in (self.cell.bias_ih, self.cell.bias_hh):
            nn.init.zeros_(bias)

    def step(self, features_BH: Tensor, state: State) -> State:
        """One row further; the first tensor of the new state is the output."""
        if len(state) == 1:
            return (self.cell(features_BH, state[0]),)
        return tuple(self.cell(features_BH, state))

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


class PolicyHead(nn.Linear):
    """Serves all action parts; a deviation that is not from the state is a parameter of its own."""

    def __init__(
        self, num_hidden: int, parts: tuple[ActionPart, ...], section: ModelSection
    ) -> None:
        is_from_state = section.state_dependent_std
        is_about_numbers = is_from_state or section.initial_std != 1.0
        if is_about_numbers and all(part.kind == "discrete" for part in parts):
            keys = "model.state_dependent_std, model.initial_std"
            raise SpacesError(f"{keys}: the action has no continuous numbers")
        are_free = [part.kind != "discrete" and not is_from_state for part in parts]
        sizes = [
            part.array.num_items if is_free else part.num_parameters
            for part, is_free in zip(parts, are_free, strict=True)
        ]
        super().__init__(num_hidden, sum(sizes))
        orthogonal(self, POLICY_GAIN)
        self._sizes, self._are_free = sizes, are_free
        self.log_stds = nn.ParameterList()
        log_std = math.log(section.initial_std)
        for part, bias in zip(parts, self.bias.detach().split(sizes), strict=True):
            if part.kind != "discrete" and is_from_state:
                bias[part.array.num_items :] = log_std
            elif part.kind != "discrete":
                self.log_stds.append(torch.full((part.array.num_items,), log_std))

    def forward(self, features_NH: Tensor) -> Tensor:
        outputs_NP = super().forward(features_NH)
        if not len(self.log_stds):
            return outputs_NP
        log_stds = iter(self.log_stds)
        parts: list[Tensor] = []
        for outputs, is_free in zip(outputs_NP.split(self._sizes, -1), self._are_free, strict=True):
            parts.append(outputs)
            if is_free:
                parts.append(next(log_stds).expand_as(outputs))
        return torch.cat(parts, -1)


def shape_of(section: ModelSection, obs: ObsSpec, action: ActionSpec) -> ActorCritic | None:
    """A network of which no memory is taken, as `meta` tensors only have a shape; None where one of
    the user's own asks for values."""
    try:
        with torch.device("meta"):
            return ActorCritic(section, obs, action)
    except (RuntimeError, TypeError, ConfigError):
        if section.name in TORSOS:
            raise
        return None
