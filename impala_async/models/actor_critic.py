"""The actor-critic: observation leaves in, parameters of each action part and a value out.

    leaves ─► normaliser ─► torso ─► core, if there is one ─► heads

What a distribution over the parameters is, and which rows belong together, is `policy`'s business:
rows come flat here, and only the core is told where columns begin.

N rows, B columns, S observation rows, H hidden features, K numbers of a state of the core,
P parameters of all action parts
"""

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from impala_async.config.model import ModelSection
from impala_async.errors import SpacesError
from impala_async.models.leaves import Normalizer, as_vector, is_image
from impala_async.models.mlp import init_orthogonal, orthogonal_linear
from impala_async.models.torso import Torso, blaming, is_own, torso_maker
from impala_async.schema import ActionPart, ActionSpec, ArraySpec, ObsSpec, recurrent_state

# Small, so that the first policy is nearly uniform and no action starts ahead.
POLICY_GAIN = 0.01
VALUE_GAIN = 1.0

State = tuple[Tensor, ...]
"""One tensor `[B, K]` per entry of `specs`."""


class Output(NamedTuple):
    """`parameters_NP` holds those of all action parts, in the order of the action spec."""

    parameters_NP: Tensor
    values_N: Tensor


class ActorCritic(nn.Module):
    """A policy and a value over one shared torso or over one each, freshly initialised."""

    def __init__(self, section: ModelSection, obs: ObsSpec, action: ActionSpec) -> None:
        super().__init__()
        make_torso = torso_maker(section, obs)
        self._calling_own = blaming(section) if is_own(section) else None
        # Torsos compute in this precision. Weights, core, heads and all after them stay float32.
        self.precision = torch.float32
        self._normal_leaves = _normal_leaves(section, obs)
        self.normalizers = nn.ModuleList(Normalizer(leaf.num_items) for leaf in self._normal_leaves)
        self.policy_torso = make_torso()
        self.value_torso = None if section.has_shared_torso else make_torso()
        num_hidden = self.policy_torso.num_out
        self.core = Core(section.core, num_hidden, section.core_size) if section.core else None
        if self.core is not None:
            num_hidden = self.core.num_out
        self.policy_head = PolicyHead(num_hidden, action.parts, section)
        self.value_head = orthogonal_linear(num_hidden, 1, VALUE_GAIN)

    @property
    def is_plain(self) -> bool:
        """Whether its policy is a torso and a linear head, and nothing more."""
        has_more = self.core is not None or self._normal_leaves or len(self.policy_head.log_stds)
        return not has_more

    @property
    def state(self) -> tuple[ArraySpec, ...]:
        """The specs of the state that the core carries from row to row, for one column."""
        return () if self.core is None else self.core.specs

    def act(self, obs: dict[str, Tensor], state: State) -> tuple[Tensor, State]:
        """Parameters of `[N, ...]` leaves and the next state; no value is computed."""
        features_NH = self._features(self.policy_torso, self._normal(obs))
        if self.core is None:
            return self.policy_head(features_NH), state
        state = self.core.step(features_NH, state)
        return self.policy_head(state[0]), state

    def forward(
        self, obs: dict[str, Tensor], state: State = (), is_first_BS: Tensor | None = None
    ) -> Output:
        """Evaluate `[N, ...]` leaves.

        With a core there are N = B * S rows, column by column, and B first states.
        """
        obs = self._normal(obs)
        policy_NH = self._features(self.policy_torso, obs)
        if self.core is not None:
            assert is_first_BS is not None, "a core must know where episodes begin"
            features_BSH = policy_NH.reshape(*is_first_BS.shape, -1)
            outputs_SBH = self.core(features_BSH.transpose(0, 1), state, is_first_BS.t())
            policy_NH = outputs_SBH.transpose(0, 1).flatten(0, 1)
        value_NH = policy_NH
        if self.value_torso is not None:
            value_NH = self._features(self.value_torso, obs)
        return Output(self.policy_head(policy_NH), self.value_head(value_NH).squeeze(-1))

    def update_statistics(self, obs: dict[str, Tensor], is_valid_N: Tensor) -> None:
        """Show the normalisers new rows."""
        for leaf, normalizer in zip(self._normal_leaves, self.normalizers, strict=True):
            assert isinstance(normalizer, Normalizer)
            normalizer.update(as_vector(leaf, obs[leaf.name]), is_valid_N)

    def _features(self, torso: Torso, obs: dict[str, Tensor]) -> Tensor:
        if self.precision == torch.float32:
            return self._call(torso, obs)
        with torch.autocast(self.value_head.weight.device.type, self.precision):
            return self._call(torso, obs).float()

    def _call(self, torso: Torso, obs: dict[str, Tensor]) -> Tensor:
        obs = dict(obs)  # what a torso stores in it is not for the other one
        if self._calling_own is None:
            return torso(obs)
        with self._calling_own:
            return torso(obs)

    def _normal(self, obs: dict[str, Tensor]) -> dict[str, Tensor]:
        """The leaves, those that are normalised in float32 and in their own shapes."""
        if not self._normal_leaves:
            return obs
        normal = {}
        for leaf, normalizer in zip(self._normal_leaves, self.normalizers, strict=True):
            values = obs[leaf.name]
            normal[leaf.name] = normalizer(as_vector(leaf, values)).view(values.shape)
        return {**obs, **normal}


class Core(nn.Module):
    """One recurrent layer, an LSTM or a GRU with K units.

    The state is zero before an episode's first row; no gradient crosses such a reset.
    """

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


class PolicyHead(nn.Linear):
    """To all action parts; a deviation that is not from the state is a parameter of its own."""

    def __init__(
        self, num_hidden: int, parts: tuple[ActionPart, ...], section: ModelSection
    ) -> None:
        is_std_from_state = section.state_dependent_std
        has_numbers = any(part.kind != "discrete" for part in parts)
        about_numbers = {
            "state_dependent_std": is_std_from_state,
            "initial_std": section.initial_std != 1.0,
        }
        for key, is_set in about_numbers.items():
            if is_set and not has_numbers:
                raise SpacesError(f"model.{key}: the action has no continuous numbers")
        are_free = [part.kind != "discrete" and not is_std_from_state for part in parts]
        sizes = [
            part.num_items if is_free else part.num_parameters
            for part, is_free in zip(parts, are_free, strict=True)
        ]
        super().__init__(num_hidden, sum(sizes))
        init_orthogonal(self, POLICY_GAIN)
        self._sizes, self._are_free, self._has_free = sizes, are_free, any(are_free)
        log_std = math.log(section.initial_std)
        self.log_stds = nn.ParameterList(
            torch.full((size,), log_std)
            for size, is_free in zip(sizes, are_free, strict=True)
            if is_free
        )
        if is_std_from_state:
            # The second half of the parameters of each part of numbers.
            for part, bias in zip(parts, self.bias.detach().split(sizes), strict=True):
                if part.kind != "discrete":
                    bias[part.num_items :] = log_std

    def forward(self, features_NH: Tensor) -> Tensor:
        outputs_NP = torch.nn.functional.linear(features_NH, self.weight, self.bias)
        if not self._has_free:
            return outputs_NP
        log_stds = iter(self.log_stds)
        parts: list[Tensor] = []
        for outputs, is_free in zip(outputs_NP.split(self._sizes, -1), self._are_free, strict=True):
            parts.append(outputs)
            if is_free:
                parts.append(next(log_stds).expand_as(outputs))
        return torch.cat(parts, -1)


def _normal_leaves(section: ModelSection, obs: ObsSpec) -> list[ArraySpec]:
    if not section.normalize_obs:
        return []
    leaves = [leaf for leaf in obs.leaves if leaf.is_float and not is_image(leaf)]
    if not leaves:
        raise SpacesError("model.normalize_obs: the observation has no vector of floats")
    return leaves
