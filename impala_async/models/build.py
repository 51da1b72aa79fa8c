"""From a config section and the specs to a model."""

import importlib
from collections.abc import Callable
from typing import Any, cast

from torch import nn

from impala_async.config import ModelSection
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
    make = TORSOS.get(section.name) or _import_torso(section.name)

    def torso() -> Torso:
        made = make(obs, section)
        if isinstance(made, nn.Module) and isinstance(made.num_out, int):
            return cast(Torso, made)
        raise ValueError(
            f"model.name: {section.name} must make an nn.Module with a number num_out, as "
            "impala_async/models/torso.py says"
        )

    return ActorCritic(section, obs, action, torso)


def _import_torso(name: str) -> Callable[..., Any]:
    module_name, _, class_name = name.partition(":")
    try:
        made = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"model.name: cannot import {name}: {error}") from error
    if not callable(made):
        raise ValueError(f"model.name: {name} is a {type(made).__name__}, which makes no model")
    return made  # type: ignore[no-any-return]
