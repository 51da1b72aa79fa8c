"""From a config section and the specs to a model."""

import importlib
from collections.abc import Callable
from functools import partial
from traceback import walk_tb
from typing import Any, cast

import torch
from torch import nn

from impala_async.config.model import ModelSection
from impala_async.foreign import Foreign, is_of_python, one_line
from impala_async.models.actor_critic import ActorCritic
from impala_async.models.cnn import ImpalaResNet, NatureCNN, SmallCNN
from impala_async.models.mlp import MLPTorso
from impala_async.models.torso import Torso
from impala_async.spec import ActionSpec, ObsSpec

TORSOS: dict[str, Callable[[ObsSpec, ModelSection], Torso]] = {
    "mlp": MLPTorso,
    "nature_cnn": NatureCNN,
    "small_cnn": SmallCNN,
    "impala_resnet": ImpalaResNet,
}


def build_model(section: ModelSection, obs: ObsSpec, action: ActionSpec) -> ActorCritic:
    """A freshly initialised model; its random numbers come from torch's default generator."""
    make = TORSOS.get(section.name)
    if make is not None:
        return ActorCritic(section, obs, action, partial(make, obs, section))
    imported = _import_torso(section.name)

    def make_own() -> Torso:
        with _Blame(section.name, "when it was made"):
            torso = imported(obs, section)
        _check_own(section.name, torso, obs)
        return cast(Torso, torso)

    return ActorCritic(section, obs, action, make_own)


class _Blame(Foreign):
    """A context in which every exception is that of a user's own torso."""

    def __init__(self, name: str, where: str) -> None:
        self._name = name
        self._where = where

    def blame(self, error: BaseException) -> ValueError:
        *_, (frame, line) = walk_tb(error.__traceback__)
        place = f"{frame.f_code.co_filename}:{line}"
        return ValueError(
            f"model.name: {self._name} failed {self._where}, at {place}: {one_line(error)}"
        )


def _import_torso(name: str) -> Callable[..., Any]:
    module_name, _, class_name = name.partition(":")
    try:
        made = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        hint = f"; write {name.replace('.py:', ':')} for that file" if ".py:" in name else ""
        raise ValueError(f"model.name: cannot import {name}: {error}{hint}") from error
    if not callable(made):
        raise ValueError(f"model.name: {name} is of type {type(made).__name__} and makes no torso")
    if is_of_python(made):
        raise ValueError(f"model.name: {name} comes with Python, and makes no torso")
    return made  # type: ignore[no-any-return]


def _check_own(name: str, torso: Any, obs: ObsSpec) -> None:
    """Show it two rows of zeros: what does not fit would fail later, and say less."""
    num_out = getattr(torso, "num_out", None)
    if not isinstance(torso, nn.Module) or not isinstance(num_out, int):
        raise ValueError(
            f"model.name: {name} must make an nn.Module with a whole number num_out, as "
            "impala_async/models/torso.py says"
        )
    rows = {
        leaf.name: torch.zeros(2, *leaf.shape, dtype=getattr(torch, leaf.dtype))
        for leaf in obs.leaves
    }
    with torch.no_grad(), _Blame(name, "on two rows of zeros"):
        features = torso(rows)
    if features.shape != (2, num_out) or features.dtype != torch.float32:
        raise ValueError(
            f"model.name: {name} must give float32 of [N, {num_out}], its num_out; for two rows "
            f"it gave {features.dtype} of {list(features.shape)}"
        )
