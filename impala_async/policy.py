"""The policy: one model and its distributions, acting for actors and evaluated by the learner.

Owns the model and the version of the weights in it. Both sides build it from the same schema,
config section and seed, and `layout` is what lets them see that they did. `coarse_layout` is the
same weights as they may travel where torsos compute in bfloat16: those of torsos in it.

    C columns of an actor, B columns of a batch, T action rows, S = T+1 observation rows
    N rows of any kind, P parameters of all action parts
"""

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from impala_async.algo.distributions import Joint, distribution_of, forbid, sample_by_numpy
from impala_async.config.model import ModelSection
from impala_async.errors import SpacesError
from impala_async.models.actor_critic import ActorCritic
from impala_async.models.flat import unflatten
from impala_async.models.mlp import Net, by_numpy
from impala_async.models.torso import TORSOS
from impala_async.schema import ArraySpec, Schema
from impala_async.weights import NO_VERSION, Version, Weights, WeightsLayout

Arrays = Mapping[str, NDArray[Any]]


class Action(NamedTuple):
    """The choice of a policy: one array of actions per part, the log-probability of them all, and
    the state before the next row."""

    actions: dict[str, NDArray[Any]]
    log_probs: NDArray[np.float32]
    state: dict[str, NDArray[np.float32]]


class Evaluation(NamedTuple):
    """The current weights' evaluation of a batch, with gradients."""

    log_probs_TB: Tensor
    entropies_TB: Tensor
    values_SB: Tensor
    joint_BT: Joint


class AnyPolicy(Protocol):
    """One policy, or a team of them: it acts, is evaluated by its members, and is published."""

    version: Version
    """That of the weights."""
    tensors: tuple[Tensor, ...]
    """All weights, in the order of the layout; they stay current."""
    layout: WeightsLayout
    coarse_layout: WeightsLayout

    @property
    def members(self) -> Mapping[str, "Policy"]:
        """Each under its name; one policy alone has none, and is its own member."""

    def load(self, weights: Weights) -> None:
        """Take over weights of either layout; raises ValueError when they have neither."""

    def named_tensors(self) -> dict[str, Tensor]:
        """Those of `tensors`, by their names."""

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Undo `named_tensors`; raises RuntimeError or KeyError when they do not fit."""

    def compute_in(self, precision: torch.dtype) -> None:
        """Evaluate and act with torsos in this precision; weights and losses stay float32."""

    def act_in(self, precision: torch.dtype) -> None:
        """For good: act only, with torsos in this precision."""

    def act(self, obs: Arrays, state: Arrays, generator: torch.Generator | None = None) -> Action:
        """Choose an action for each of `[C, ...]` observations and their states.

        It is sampled with a generator on the policy's device, or without one the likeliest. The
        arrays must be writable, as torch wants.
        """

    def first_state(self, num_columns: int) -> dict[str, NDArray[np.float32]]:
        """The state before an episode's first row."""


def layout_of(state: Mapping[str, Tensor]) -> WeightsLayout:
    """How the parameters of a model lie in a buffer."""
    return WeightsLayout(
        tuple(
            ArraySpec(name, tuple(tensor.shape), _dtype_name(tensor))
            for name, tensor in state.items()
        )
    )


class Policy:
    """Built equal, bit for bit, from equal arguments, whatever torch's own generators hold."""

    def __init__(
        self, schema: Schema, model: ModelSection, *, seed: int, device: torch.device | str = "cpu"
    ) -> None:
        self.device = torch.device(device)
        self.model = _build_seeded(schema, model, seed).to(self.device)
        if self.model.state != schema.state:
            raise SpacesError(
                f"model.core: {model.core} of {model.core_size} here, the schema has {schema.state}"
            )
        self._is_host = self.device.type == "cpu"
        # A user's torso may use its weights in any way, even if it is built from one of ours.
        self._is_torso_ours = model.name in TORSOS
        self._quick = self._quick_net()
        self.version = NO_VERSION
        self._parts = schema.action.parts
        self._legal = schema.action.legal
        self._sizes = [part.num_parameters for part in self._parts]
        self._is_one_choice = [(len(part.choices), part.shape) for part in self._parts] == [
            (1, ())
        ] and self._legal is None
        self._dtypes = {part.name: np.dtype(part.array.dtype) for part in self._parts}
        self._input_names = [leaf.name for leaf in schema.inputs.leaves]
        state = self.model.state_dict()
        # They share memory with the model's own, so they stay current.
        self.tensors: tuple[Tensor, ...] = tuple(state.values())
        self.layout = layout_of(state)
        self.coarse_layout = self.layout.coarse(self._names_rounded())
        self._state_names = [array.name for array in schema.state]

    @property
    def members(self) -> Mapping[str, "Policy"]:
        return {"": self}

    def twin(self) -> "Policy":
        """A copy with a memory of its own."""
        twin = copy.copy(self)
        twin.model = copy.deepcopy(self.model)
        # Both share the model's memory: here they must share the memory of the copied model.
        twin.tensors = tuple(twin.model.state_dict().values())
        twin._quick = twin._quick_net()
        return twin

    def load(self, weights: Weights) -> None:
        unflatten(weights, (self.layout, self.coarse_layout), self.tensors)
        self.version = weights.version

    def named_tensors(self) -> dict[str, Tensor]:
        return dict(self.model.state_dict())

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        self.model.load_state_dict(dict(tensors))

    def compute_in(self, precision: torch.dtype) -> None:
        self.model.precision = precision

    def act_in(self, precision: torch.dtype) -> None:
        # A torso of ours holds its weights in it: to cast them at every step would cost what the
        # step gains.
        if precision == torch.float32:
            return
        self.compute_in(precision)
        if self._is_torso_ours:
            self.model.get_submodule("policy_torso").to(precision)
        self.tensors = tuple(self.model.state_dict().values())
        self._quick = None

    def act(self, obs: Arrays, state: Arrays, generator: torch.Generator | None = None) -> Action:
        if self._quick is not None and self._is_one_choice and generator is not None:
            ((name, dtype),) = self._dtypes.items()
            choices, log_probs = sample_by_numpy(self._quick(obs), generator)
            return Action({name: choices.astype(dtype)}, log_probs, {})
        with torch.inference_mode():
            joint, next_state = self._look(obs, state)
            chosen = joint.mode() if generator is None else joint.sample(generator)
            actions = {
                name: chosen[name].cpu().numpy().astype(dtype)
                for name, dtype in self._dtypes.items()
            }
            return Action(actions, joint.log_prob(chosen).cpu().numpy(), next_state)

    def first_state(self, num_columns: int) -> dict[str, NDArray[np.float32]]:
        return {
            array.name: np.zeros((num_columns, *array.shape), np.float32)
            for array in self.model.state
        }

    def evaluate(
        self,
        obs_BS: Mapping[str, Tensor],
        actions_BT: Mapping[str, Tensor],
        mask_BT: Tensor,
        state_B: Mapping[str, Tensor],
    ) -> Evaluation:
        """One forward over all rows of `[B, S, ...]` observations and their `[B, T]` actions.

        Columns may lie apart in memory, as in a slot. The bootstrap row gets a value only.
        """
        output = self.model(
            {name: _rows(obs_BS[name]) for name in self._input_names},
            tuple(state_B[name] for name in self._state_names),
            # A state is reset before the row after a masked one.
            torch.nn.functional.pad(~mask_BT, (1, 0)) if self._state_names else None,
        )
        num_columns = len(mask_BT)
        parameters_BSP = output.parameters_NP.view(num_columns, -1, sum(self._sizes))
        legal_BTP = None if self._legal is None else obs_BS[self._legal][:, :-1].flatten(2)
        joint_BT = self._joint(parameters_BSP[:, :-1], legal_BTP)
        return Evaluation(
            log_probs_TB=joint_BT.log_prob(actions_BT).t(),
            entropies_TB=joint_BT.entropy().t(),
            values_SB=output.values_N.view(num_columns, -1).t(),
            joint_BT=joint_BT,
        )

    def _quick_net(self) -> Net | None:
        if not (self._is_host and self._is_torso_ours and self.model.is_plain):
            return None
        return by_numpy(self.model.policy_torso, self.model.policy_head)

    def _names_rounded(self) -> list[str]:
        """The weights that torsos in bfloat16 round to it before they do anything with them."""
        if not self._is_torso_ours:
            return []
        torsos = ("policy_torso.", "value_torso.")
        return [array.name for array in self.layout.arrays if array.name.startswith(torsos)]

    def _look(self, obs: Arrays, state: Arrays) -> tuple[Joint, dict[str, NDArray[np.float32]]]:
        leaves = self._tensors(obs)
        legal_CP = None if self._legal is None else leaves[self._legal].flatten(1)
        # Only inputs are passed on: a user's torso may use every leaf that it is given.
        inputs = {name: leaves[name] for name in self._input_names}
        if not self._state_names:
            return self._joint(self.model.act(inputs, ())[0], legal_CP), {}
        before = self._tensors(state)
        parameters_CP, after = self.model.act(
            inputs, tuple(before[name] for name in self._state_names)
        )
        next_state = {
            name: part.cpu().numpy() for name, part in zip(self._state_names, after, strict=True)
        }
        return self._joint(parameters_CP, legal_CP), next_state

    def _tensors(self, arrays: Arrays) -> dict[str, Tensor]:
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        if self._is_host:
            return tensors
        return {name: tensor.to(self.device) for name, tensor in tensors.items()}

    def _joint(self, parameters_NP: Tensor, legal_NP: Tensor | None) -> Joint:
        """`legal_NP` has a flag per choice of the discrete parts, one part after the other."""
        parts = {}
        num_choices = 0
        for part, parameters in zip(self._parts, parameters_NP.split(self._sizes, -1), strict=True):
            if legal_NP is not None and part.choices:
                legal = legal_NP[..., num_choices : num_choices + part.num_parameters]
                parameters = forbid(parameters, legal, part.choices)
                num_choices += part.num_parameters
            parts[part.name] = distribution_of(part, parameters)
        return Joint(parts)


def _build_seeded(schema: Schema, section: ModelSection, seed: int) -> ActorCritic:
    # Initialisation draws from the default CPU generator: lend it, seeded, then give it back.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return ActorCritic(section, schema.inputs, schema.action)


def _rows(leaf_BS: Tensor) -> Tensor:
    return leaf_BS.reshape(-1, *leaf_BS.shape[2:])


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
