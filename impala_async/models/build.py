"""From a config section and the specs to a model."""

from impala_async.config import ModelSection
from impala_async.models.actor_critic import ActorCritic
from impala_async.spec import ActionSpec, ObsSpec


def build_model(section: ModelSection, obs: ObsSpec, action: ActionSpec) -> ActorCritic:
    """A freshly initialised model; its random numbers come from torch's default generator."""
    return ActorCritic(section, obs, action)
