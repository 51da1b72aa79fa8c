"""A team: one policy for each name, and each column is played by the one that its leaf says.

It acts, loads and is published as a single policy does: its weights are those of all its members,
one after the other, under names that begin with the member's. Who learns is no business of it.

    C columns of an actor
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from impala_async.config.model import ModelSection
from impala_async.config.policies import PoliciesSection
from impala_async.errors import ConfigError, EnvError, SpacesError
from impala_async.models.flat import unflatten
from impala_async.policy import Action, AnyPolicy, Arrays, Policy
from impala_async.schema import POLICY, Schema
from impala_async.weights import NO_VERSION, Weights, WeightsLayout

# How torch says that something is too large for the memory, or for any.
TOO_LARGE = re.compile("memory|overflow", re.IGNORECASE)


def build_policy(
    schema: Schema,
    model: ModelSection,
    policies: PoliciesSection,
    *,
    seed: int,
    device: torch.device | str = "cpu",
) -> AnyPolicy:
    """The one policy of a run, or its team; ConfigError if there is no memory for it."""
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
        raise ConfigError(f"model: there is no memory here for its network: {what}") from error


def check_default_dtype(env_id: str) -> None:
    """EnvError if an environment of this process has changed what all tensors are made of."""
    found = torch.get_default_dtype()
    if found != torch.float32:
        raise EnvError(
            f"{env_id} has called torch.set_default_dtype({found}), and policies act in "
            "torch.float32: make its tensors with dtype=..., or set the default back"
        )


class Team:
    """A column is played by the member that its leaf says.

    Members begin with different weights, but for copies, which begin as what they copy.
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
        self.tensors: tuple[Tensor, ...] = tuple(self.named_tensors().values())
        self.layout = WeightsLayout(
            tuple(
                replace(array, name=f"{name}/{array.name}")
                for name, member in self.members.items()
                for array in member.layout.arrays
            )
        )
        self.coarse_layout = self.layout.coarse(
            f"{name}/{key}"
            for name, member in self.members.items()
            for key in member.coarse_layout.rounded
        )
        self._parts = schema.action.parts

    def compute_in(self, precision: torch.dtype) -> None:
        for member in self.members.values():
            member.compute_in(precision)

    def act_in(self, precision: torch.dtype) -> None:
        for member in self.members.values():
            member.act_in(precision)
        self.tensors = tuple(self.named_tensors().values())

    def named_tensors(self) -> dict[str, Tensor]:
        return {
            f"{name}/{key}": tensor
            for name, member in self.members.items()
            for key, tensor in member.named_tensors().items()
        }

    def load(self, weights: Weights) -> None:
        unflatten(weights, (self.layout, self.coarse_layout), self.tensors)
        for member in self.members.values():
            member.version = weights.version
        self.version = weights.version

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        for name, member in self.members.items():
            member.load_tensors(split_off(tensors, name))

    def act(self, obs: Arrays, state: Arrays, generator: torch.Generator | None = None) -> Action:
        num_columns = len(obs[POLICY])
        action = Action(
            {
                part.name: np.zeros((num_columns, *part.shape), part.array.dtype)
                for part in self._parts
            },
            np.zeros(num_columns, np.float32),
            self.first_state(num_columns),
        )
        for number, member in enumerate(self.members.values()):
            columns = np.flatnonzero(obs[POLICY] == number)
            if not len(columns):
                continue
            chosen = member.act(_of(obs, columns), _of(state, columns), generator)
            action.log_probs[columns] = chosen.log_probs
            for into, arrays in ((action.actions, chosen.actions), (action.state, chosen.state)):
                for name, array in arrays.items():
                    into[name][columns] = array
        return action

    def first_state(self, num_columns: int) -> dict[str, NDArray[np.float32]]:
        return next(iter(self.members.values())).first_state(num_columns)


def member_seed_of(seed: int, number: int) -> int:
    """A seed for each member of a run's team."""
    return int(np.random.SeedSequence((seed, number)).generate_state(1)[0])


def split_off(tensors: Mapping[str, Tensor], member: str) -> dict[str, Tensor]:
    """Those of one member, under their own names."""
    prefix = f"{member}/"
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def _of(arrays: Arrays, columns: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    return {name: array[columns] for name, array in arrays.items()}
