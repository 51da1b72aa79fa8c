"""The policy: one model and its distributions, acting for actors and evaluated by the learner.

Owns the model and the version of the weights in it. Both sides build it from the same schema,
config section and seed, and `layout` is what lets them see that they did.

    C columns of an actor, B columns of a batch, T action rows, S = T+1 observation rows
    A choices of one action part
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from impala_async.algo.distributions import Categorical
from impala_async.config import ModelSection
from impala_async.models.actor_critic import ActorCritic
from impala_async.models.build import build_model
from impala_async.spec import ArraySpec, Schema
from impala_async.weights import NO_VERSION, Weights, WeightsLayout


class Action(NamedTuple):
    """What a policy chose: one array of actions per part, and the log-probability of them all."""

    actions: dict[str, NDArray[np.int32]]
    log_probs: NDArray[np.float32]


class Evaluation(NamedTuple):
    """What the current weights make of a batch, with gradients."""

    log_probs_TB: Tensor
    entropies_TB: Tensor
    values_SB: Tensor


class Policy:
    """Built equal, bit for bit, from equal arguments, whatever torch's own generators hold."""

    def __init__(
        self, schema: Schema, model: ModelSection, *, seed: int, device: torch.device | str = "cpu"
    ) -> None:
        if schema.state:
            raise ValueError(f"the {model.name} model has no recurrent state, the schema has")
        self.device = torch.device(device)
        self.model = _build_seeded(schema, model, seed).to(self.device)
        self.version = NO_VERSION
        self._part_names = [part.name for part in schema.action.parts]
        state = self.model.state_dict()
        # They share memory with the model's own, so they stay current.
        self.tensors: tuple[Tensor, ...] = tuple(state.values())
        self.layout = WeightsLayout(
            tuple(
                ArraySpec(name, tuple(tensor.shape), _dtype_name(tensor))
                for name, tensor in state.items()
            )
        )

    def load(self, weights: Weights) -> None:
        """Take over the weights; raises ValueError when they are not of this layout's size."""
        if weights.buffer.nbytes != self.layout.num_bytes:
            raise ValueError(
                f"weights of {weights.buffer.nbytes} bytes do not fit a model of "
                f"{self.layout.num_bytes}"
            )
        # A copy because a received buffer may be read-only, which torch cannot view.
        views = self.layout.views(weights.buffer.copy())
        with torch.no_grad():
            for tensor, (_, view) in zip(self.tensors, views, strict=True):
                tensor.copy_(torch.from_numpy(view))
        self.version = weights.version

    def act(self, obs: dict[str, NDArray[Any]], generator: torch.Generator) -> Action:
        """Sample an action for each of `[C, ...]` observations.

        The generator lives on the policy's device. The arrays must be writable, as torch wants.
        """
        with torch.inference_mode():
            actions: dict[str, NDArray[np.int32]] = {}
            log_probs: list[Tensor] = []
            for name, distribution in self._distributions(obs):
                choices_C = distribution.sample(generator)
                log_probs.append(distribution.log_prob(choices_C))
                actions[name] = choices_C.cpu().numpy().astype(np.int32)
            return Action(actions, _total(log_probs).cpu().numpy())

    def act_greedy(self, obs: dict[str, NDArray[Any]]) -> dict[str, NDArray[np.int32]]:
        """The likeliest action for each of `[C, ...]` observations."""
        with torch.inference_mode():
            return {
                name: distribution.mode().cpu().numpy().astype(np.int32)
                for name, distribution in self._distributions(obs)
            }

    def evaluate(self, obs_BS: dict[str, Tensor], actions_BT: dict[str, Tensor]) -> Evaluation:
        """One forward over all rows of `[B, S, ...]` observations and their `[B, T]` actions.

        Columns may lie apart in memory, as in a slot. The bootstrap row gets a value only.
        """
        num_columns, num_rows = next(iter(obs_BS.values())).shape[:2]
        output = self.model(
            {name: leaf.reshape(-1, *leaf.shape[2:]) for name, leaf in obs_BS.items()}
        )
        log_probs: list[Tensor] = []
        entropies: list[Tensor] = []
        for name, logits_NA in zip(self._part_names, output.logits, strict=True):
            logits_BSA = logits_NA.view(num_columns, num_rows, -1)
            distribution = Categorical(logits_BSA[:, :-1])
            log_probs.append(distribution.log_prob(actions_BT[name]))
            entropies.append(distribution.entropy())
        return Evaluation(
            log_probs_TB=_total(log_probs).t(),
            entropies_TB=_total(entropies).t(),
            values_SB=output.values_N.view(num_columns, num_rows).t(),
        )

    def _distributions(self, obs: dict[str, NDArray[Any]]) -> list[tuple[str, Categorical]]:
        leaves = {name: torch.from_numpy(leaf).to(self.device) for name, leaf in obs.items()}
        return [
            (name, Categorical(logits_CA))
            for name, logits_CA in zip(self._part_names, self.model.logits(leaves), strict=True)
        ]


def _build_seeded(schema: Schema, section: ModelSection, seed: int) -> ActorCritic:
    # Initialisation draws from the default CPU generator: lend it, seeded, then give it back.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return build_model(section, schema.obs, schema.action)


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _total(parts: list[Tensor]) -> Tensor:
    """Parts of an action are independent: their log-probabilities and entropies add up."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
