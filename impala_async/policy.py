"""A policy: one model and its distributions, acting for actors and evaluated by the learner. A
team: a policy for each of several names, and each column is played by the one that its leaf says.

Both sides build it from the same schema, config section and seed, and its `layout` lets them see
that they did. With `coarse_layout` weights of torsos travel in bfloat16, where these compute in it.

    C columns of an actor, B columns of a batch, T action rows, S = T+1 observation rows
    N rows of any kind, P parameters of all action parts
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from impala_async.algo.distributions import DrawsAhead, Joint, joint_of, sample_by_numpy
from impala_async.config.model import ModelSection
from impala_async.config.policies import PoliciesSection
from impala_async.errors import EnvError, SpacesError
from impala_async.models.actor_critic import ActorCritic
from impala_async.models.flat import unflatten
from impala_async.models.leaves import Normalizer
from impala_async.models.torso import TORSOS, Net, by_numpy
from impala_async.schema import POLICY, ArraySpec, Schema
from impala_async.weights import NO_VERSION, Weights, WeightsLayout

Arrays = Mapping[str, NDArray[Any]]
# How torch says that something is too large for the memory, or for any.
TOO_LARGE = re.compile("memory|overflow", re.IGNORECASE)


class Action(NamedTuple):
    """The choice of a policy, and the state before the next row."""

    actions: dict[str, NDArray[Any]]
    log_probs: NDArray[np.float32]
    state: dict[str, NDArray[np.float32]]


class Evaluation(NamedTuple):
    """The current weights' evaluation of a batch, with gradients."""

    log_probs_TB: Tensor
    entropies_TB: Tensor
    values_SB: Tensor
    joint_BT: Joint


class Policy:
    """Built equal, bit for bit, from equal arguments. `tensors` are its weights, always current."""

    def __init__(
        self, schema: Schema, model: ModelSection, *, seed: int, device: torch.device | str = "cpu"
    ) -> None:
        self.device = torch.device(device)
        self.obs_spec, self.action_spec = schema.inputs, schema.action
        self._section, self._seed = model, seed
        self.model = self._new_model()
        self.model.check_state(schema)
        self.version = NO_VERSION
        self._parts, self._legal = schema.action.parts, schema.action.legal
        self._input_names = [leaf.name for leaf in schema.inputs.leaves]
        self._state_names = [array.name for array in schema.state]
        # A user's torso may use its weights in any way, even if it is built from one of ours.
        self.torso_name = self.model.torso_name
        self.is_torso_ours = self.torso_name in TORSOS
        is_one_part = len(self._parts) == 1 and self._legal is None
        self.only_part = self._parts[0] if is_one_part else None
        """The action's one part, where it has no more and all of it is legal."""
        self._quick = self._by_numpy()
        state = self.named_tensors()
        self.tensors = tuple(state.values())
        self.layout = layout_of(state)
        # In bfloat16, torsos round their weights to it before they do anything with them.
        torsos = ("policy_torso.", "value_torso.") if self.is_torso_ours else ()
        self.coarse_layout = self.layout.coarse(name for name in state if name.startswith(torsos))

    def _by_numpy(self) -> Net | None:
        """A faster way to act, over the memory of the weights, where there is one."""
        is_one_choice = self.only_part is not None and self.only_part.is_one_choice
        is_plain = self.is_torso_ours and not self._state_names and self.device.type == "cpu"
        # Where an environment has numpy raise (`np.seterr`), a number that is too small to be told
        # from 0 would be an error here; to torch it is none.
        if not (is_one_choice and is_plain) or "raise" in np.geterr().values():
            return None
        first = next(iter(self.model.normalizers), None)
        normal = first.by_numpy() if isinstance(first, Normalizer) else None
        return by_numpy(self.model.policy_torso, self.model.policy_head, normal)

    def _new_model(self) -> ActorCritic:
        # Initialisation draws from the default CPU generator: lend it, seeded, then give it back.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self._seed)
            return ActorCritic(self._section, self.obs_spec, self.action_spec).to(self.device)

    def copy_model(self) -> ActorCritic:
        """The model as it is now, in memory of its own."""
        # A deepcopy fails where a torso keeps what it has computed, as weight_norm does.
        model = self._new_model()
        model.load_state_dict(self.model.state_dict())
        model.precision = self.model.precision
        return model

    def __getstate__(self) -> dict[str, Any]:
        """By value: to hand tensors to another process torch moves them to memory that both share,
        and frees the one over which this acts by numpy."""
        kept = {key: value for key, value in vars(self).items() if key not in ("model", "tensors")}
        weights = {name: each.numpy(force=True) for name, each in self.named_tensors().items()}
        more = {"_quick": self._quick is not None, "weights": weights}
        return {**kept, **more, "precision": self.model.precision}

    def __setstate__(self, state: dict[str, Any]) -> None:
        weights, precision = state.pop("weights"), state.pop("precision")
        vars(self).update(state)
        self.model = self._new_model()
        self.compute_in(precision)
        self.load_tensors({name: torch.from_numpy(each) for name, each in weights.items()})
        self.tensors = tuple(self.named_tensors().values())
        self._quick = self._by_numpy() if state["_quick"] else None

    @property
    def members(self) -> Mapping[str, "Policy"]:
        """One policy alone is its own member."""
        return {"": self}

    def load(self, weights: Weights) -> None:
        """Take over weights of either layout; raises ValueError when they have neither."""
        unflatten(weights, (self.layout, self.coarse_layout), self.tensors)
        self.version = weights.version

    def named_tensors(self) -> dict[str, Tensor]:
        return dict(self.model.state_dict())

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises RuntimeError when they do not fit."""
        self.model.load_state_dict(dict(tensors))

    def compute_in(self, precision: torch.dtype) -> None:
        """Evaluate and act with torsos in this precision; weights and losses stay float32."""
        self.model.precision = precision

    def act_in(self, precision: torch.dtype) -> None:
        """Serve acting alone from now on, with torsos in this precision."""
        if precision == torch.float32:
            return
        self.compute_in(precision)
        if self.is_torso_ours:
            self.model.act_alone(precision)
        self.tensors = tuple(self.named_tensors().values())
        self._quick = None

    def act(self, obs: Arrays, state: Arrays, generator: torch.Generator | None = None) -> Action:
        """An action for each of `[C, ...]` observations, in writable arrays, and their states.

        It is sampled with a generator on the policy's device, or without one the likeliest.
        """
        if self._quick is not None and generator is not None:
            choices, log_probs = sample_by_numpy(self._quick(obs), generator)
            return Action({self._parts[0].name: choices.astype(np.int32)}, log_probs, {})
        with torch.inference_mode():
            leaves, before = self._tensors(obs), self._tensors(state)
            # Only inputs are passed on: a user's torso may use every leaf that it is given.
            parameters_CP, after = self.model.act(
                {name: leaves[name] for name in self._input_names},
                tuple(before[name] for name in self._state_names),
            )
            legal_CP = None if self._legal is None else leaves[self._legal].flatten(1)
            joint = joint_of(self._parts, parameters_CP, legal_CP)
            chosen = joint.mode() if generator is None else joint.sample(generator)
            return Action(
                {p.name: chosen[p.name].cpu().numpy().astype(p.array.dtype) for p in self._parts},
                joint.log_prob(chosen).cpu().numpy(),
                {n: part.cpu().numpy() for n, part in zip(self._state_names, after, strict=True)},
            )

    def new_generator(self) -> torch.Generator:
        """For a sampler, each of whose acts has the same number of columns."""
        return DrawsAhead(self.device)

    def first_state(self, num_columns: int) -> dict[str, NDArray[np.float32]]:
        """The state before an episode's first row."""
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
        model: ActorCritic | None = None,
    ) -> Evaluation:
        """One forward over all rows of `[B, S, ...]` observations and their `[B, T]` actions.

        Columns may lie apart in memory, as in a slot. The bootstrap row gets a value only.
        """
        parameters_NP, values_N = (model or self.model)(
            {name: obs_BS[name].flatten(0, 1) for name in self._input_names},
            tuple(state_B[name] for name in self._state_names),
            # A state is reset before the row after a masked one.
            torch.nn.functional.pad(~mask_BT, (1, 0)) if self._state_names else None,
        )
        parameters_BSP = parameters_NP.view(len(mask_BT), -1, parameters_NP.shape[-1])
        legal_BTP = None if self._legal is None else obs_BS[self._legal][:, :-1].flatten(2)
        joint_BT = joint_of(self._parts, parameters_BSP[:, :-1], legal_BTP)
        return Evaluation(
            log_probs_TB=joint_BT.log_prob(actions_BT).t(),
            entropies_TB=joint_BT.entropy().t(),
            values_SB=values_N.view(len(mask_BT), -1).t(),
            joint_BT=joint_BT,
        )

    def _tensors(self, arrays: Arrays) -> dict[str, Tensor]:
        return {name: torch.from_numpy(array).to(self.device) for name, array in arrays.items()}


class Team:
    """Acts, loads and is published as a single policy does. Who learns is no business of it.

    Its weights are those of all its members, one after the other, under names that begin with the
    member's. Members begin with different weights, but for copies, which begin as what they copy.
    """

    def __init__(
        self,
        schema: Schema,
        model: ModelSection,
        policies: PoliciesSection,
        *,
        seed: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.version = NO_VERSION
        self.members: dict[str, Policy] = {}
        for name in policies.names:
            number = policies.names.index(policies.copies.get(name, name))
            member_seed = member_seed_of(seed, number)
            self.members[name] = Policy(schema, model, seed=member_seed, device=device)
        self.torso_name = self.members[policies.names[0]].torso_name
        self.tensors = tuple(self.named_tensors().values())
        self.layout = layout_of(self.named_tensors())
        self.coarse_layout = self.layout.coarse(
            f"{name}/{key}"
            for name, member in self.members.items()
            for key in member.coarse_layout.rounded
        )
        self._parts = schema.action.parts

    def load(self, weights: Weights) -> None:
        unflatten(weights, (self.layout, self.coarse_layout), self.tensors)
        self.version = weights.version

    def named_tensors(self) -> dict[str, Tensor]:
        return {
            f"{name}/{key}": tensor
            for name, member in self.members.items()
            for key, tensor in member.named_tensors().items()
        }

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        for name, member in self.members.items():
            member.load_tensors(split_off(tensors, name))

    def compute_in(self, precision: torch.dtype) -> None:
        for member in self.members.values():
            member.compute_in(precision)

    def act_in(self, precision: torch.dtype) -> None:
        for member in self.members.values():
            member.act_in(precision)
        self.tensors = tuple(self.named_tensors().values())

    def act(self, obs: Arrays, state: Arrays, generator: torch.Generator | None = None) -> Action:
        num_columns = len(obs[POLICY])
        action = Action(
            {p.name: np.zeros((num_columns, *p.shape), p.array.dtype) for p in self._parts},
            np.zeros(num_columns, np.float32),
            self.first_state(num_columns),
        )
        for number, member in enumerate(self.members.values()):
            columns = np.flatnonzero(obs[POLICY] == number)
            if not len(columns):
                continue
            own_obs, own_state = (
                {name: array[columns] for name, array in arrays.items()} for arrays in (obs, state)
            )
            chosen = member.act(own_obs, own_state, generator)
            action.log_probs[columns] = chosen.log_probs
            for into, arrays in ((action.actions, chosen.actions), (action.state, chosen.state)):
                for name, array in arrays.items():
                    into[name][columns] = array
        return action

    def new_generator(self) -> torch.Generator:
        # A member's acts are of as many columns as it plays now.
        return torch.Generator(next(iter(self.members.values())).device)

    def first_state(self, num_columns: int) -> dict[str, NDArray[np.float32]]:
        return next(iter(self.members.values())).first_state(num_columns)


AnyPolicy: TypeAlias = Policy | Team


def build_policy(
    schema: Schema,
    model: ModelSection,
    policies: PoliciesSection,
    *,
    seed: int,
    device: torch.device | str = "cpu",
) -> AnyPolicy:
    """The one policy of a run, or its team; SpacesError if there is no memory for it."""
    if schema.policies != policies.names:
        raise SpacesError(f"policies.names: {policies.names} here, {schema.policies} in the schema")
    try:
        if policies.names:
            return Team(schema, model, policies, seed=seed, device=device)
        return Policy(schema, model, seed=seed, device=device)
    except (MemoryError, RuntimeError, TypeError) as error:
        what = str(error).partition("\n")[0]
        if not isinstance(error, MemoryError) and TOO_LARGE.search(what) is None:
            raise
        raise SpacesError(f"model: there is no memory here for its network: {what}") from error


def check_log_probs(log_probs_C: NDArray[np.float32]) -> None:
    """SpacesError where a network came to no number: the action that it chose means nothing."""
    if np.isnan(log_probs_C).any():
        raise SpacesError("the policy comes to NaN: are its weights and its torso as they were?")


def check_defaults(env_id: str) -> None:
    """EnvError if an environment of this process has changed what all tensors are made of."""
    found, device = torch.get_default_dtype(), torch.get_default_device()
    if found != torch.float32:
        raise EnvError(
            f"{env_id} has called torch.set_default_dtype({found}), and policies act in "
            "torch.float32: make its tensors with dtype=..., or set the default back"
        )
    if device.type != "cpu":
        raise EnvError(
            f"{env_id} has called torch.set_default_device({str(device)!r}), and a policy has a "
            "device of its own: make its tensors with device=..., or set the default back"
        )


def layout_of(state: Mapping[str, Tensor]) -> WeightsLayout:
    return WeightsLayout(
        tuple(
            ArraySpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for name, tensor in state.items()
        )
    )


def member_seed_of(seed: int, number: int) -> int:
    return int(np.random.SeedSequence((seed, number)).generate_state(1)[0])


def split_off(tensors: Mapping[str, Tensor], member: str) -> dict[str, Tensor]:
    """Those of one member, under their own names."""
    prefix = f"{member}/"
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
