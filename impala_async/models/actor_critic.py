"""The actor-critic: observation leaves in, one set of logits per action part and a value out.

Knows nothing of time or columns: rows come flat. What a distribution over the logits is, and how
rows are ordered, is `policy`'s business.

N rows, F features, H hidden features, A choices of one action part
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from impala_async.config import ModelSection
from impala_async.models.mlp import MLPTorso, orthogonal_linear
from impala_async.spec import ActionSpec, ObsSpec

# Small, so that the first policy is nearly uniform and no action starts ahead.
POLICY_GAIN = 0.01
VALUE_GAIN = 1.0


class Output(NamedTuple):
    """`logits` holds one tensor per action part, in the order of the action spec."""

    logits: tuple[Tensor, ...]
    values_N: Tensor


class ActorCritic(nn.Module):
    """A policy and a value over one shared torso or over one each."""

    def __init__(self, section: ModelSection, obs: ObsSpec, action: ActionSpec) -> None:
        super().__init__()
        self._leaf_names = [leaf.name for leaf in obs.leaves]
        self._num_choices = [part.num_choices for part in action.parts]
        num_features = sum(leaf.num_items for leaf in obs.leaves)

        def torso() -> MLPTorso:
            return MLPTorso(num_features, section.hidden_sizes, section.activation)

        self.policy_torso = torso()
        self.value_torso = None if section.shared_torso else torso()
        num_hidden = self.policy_torso.num_out
        self.policy_head = orthogonal_linear(num_hidden, sum(self._num_choices), POLICY_GAIN)
        self.value_head = orthogonal_linear(num_hidden, 1, VALUE_GAIN)

    def forward(self, obs: dict[str, Tensor]) -> Output:
        """Logits and values of `[N, ...]` leaves."""
        features_NF = self._features(obs)
        policy_NH = self.policy_torso(features_NF)
        value_NH = policy_NH if self.value_torso is None else self.value_torso(features_NF)
        return Output(self._logits(policy_NH), self.value_head(value_NH).squeeze(-1))

    def logits(self, obs: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """What acting needs of `forward`: no value is computed."""
        return self._logits(self.policy_torso(self._features(obs)))

    def _logits(self, policy_NH: Tensor) -> tuple[Tensor, ...]:
        logits: Tensor = self.policy_head(policy_NH)
        return (logits,) if len(self._num_choices) == 1 else logits.split(self._num_choices, -1)

    def _features(self, obs: dict[str, Tensor]) -> Tensor:
        leaves = [_flat_float(obs[name]) for name in self._leaf_names]
        return leaves[0] if len(leaves) == 1 else torch.cat(leaves, -1)


def _flat_float(leaf: Tensor) -> Tensor:
    flat = leaf if leaf.dim() == 2 else leaf.reshape(len(leaf), -1)
    return flat if flat.dtype == torch.float32 else flat.to(torch.float32)
