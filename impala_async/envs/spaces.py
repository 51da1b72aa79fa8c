"""Gymnasium spaces to our spec: what a batch of environments needs to know of both its spaces."""

import logging
from dataclasses import replace
from typing import Any, NamedTuple

from gymnasium import Space
from gymnasium.spaces import Dict

from impala_async.envs.actions import ActionAdapter, action_parts
from impala_async.envs.observations import ObsLeaf, obs_leaves, short
from impala_async.errors import EnvError
from impala_async.spec import ActionPart, ActionSpec, ObsSpec

logger = logging.getLogger(__name__)


AUTO = "auto"
USUAL_KEY = "action_mask"


class SpaceOptions(NamedTuple):
    """How spaces are read: the settings of `env` that matter here."""

    mask_key: str | None = AUTO
    is_squashed: bool = False
    is_stacked: bool = False


USUAL = SpaceOptions()


class Spaces:
    """Both spaces of one environment; EnvError for those that are not supported."""

    def __init__(
        self,
        observation_space: Space[Any],
        action_space: Space[Any],
        options: SpaceOptions = USUAL,
    ) -> None:
        self.leaves: tuple[ObsLeaf, ...] = obs_leaves(observation_space)
        if options.is_stacked:
            self.leaves = tuple(_as_stack(leaf) for leaf in self.leaves)
            if not any(leaf.spec.is_stack for leaf in self.leaves):
                raise EnvError(
                    f"env.frame_stack: observation space {short(observation_space)} has no stack "
                    "of images, bytes of three dimensions or more: set it to off"
                )
        self.obs_spec = ObsSpec(tuple(leaf.spec for leaf in self.leaves))
        parts = action_parts(action_space, is_squashed=options.is_squashed)
        self.action_spec = ActionSpec(parts, self._legal(observation_space, parts, options))
        self._action_space = action_space
        self._is_squashed = options.is_squashed

    def adapter(self) -> ActionAdapter:
        """From our actions to those of the environment."""
        return ActionAdapter(self._action_space, is_squashed=self._is_squashed)

    def _legal(
        self, space: Space[Any], parts: tuple[ActionPart, ...], options: SpaceOptions
    ) -> str | None:
        """The leaf that masks illegal actions: under the usual key only if it fits."""
        if options.mask_key is None:
            return None
        key = USUAL_KEY if options.mask_key == AUTO else options.mask_key
        num_choices = sum(sum(part.choices) for part in parts)
        why_not = self._why_no_mask(space, key, num_choices)
        if why_not is None:
            return key
        if options.mask_key != AUTO and not num_choices:
            raise EnvError(f"env.action_mask_key: {key!r} can mask nothing, {why_not}: drop it")
        if options.mask_key != AUTO:
            raise EnvError(
                f"env.action_mask_key: {key!r} must be a key of a Dict observation with integers "
                f"or bools of shape ({num_choices},), one for each discrete action; {why_not}"
            )
        if any(leaf.spec.name == key for leaf in self.leaves):
            logger.warning("%r is taken for an input, not for a mask of actions: %s", key, why_not)
        return None

    def _why_no_mask(self, space: Space[Any], key: str, num_choices: int) -> str | None:
        if num_choices == 0:
            return "there are no discrete actions"
        leaf = next((leaf for leaf in self.leaves if leaf.spec.name == key), None)
        if leaf is None or not isinstance(space, Dict):
            return f"it is no key of {short(space)}"
        if leaf.spec.num_items != num_choices:
            return f"it has shape {leaf.spec.shape}, and there are {num_choices} actions"
        if leaf.dtype.kind not in "biu" or leaf.spec.choices:
            kind = "categories" if leaf.spec.choices else leaf.dtype
            return f"it has shape {leaf.spec.shape}, but of {kind}"
        if len(self.leaves) == 1:
            return "the observation has nothing else"
        return None


def _as_stack(leaf: ObsLeaf) -> ObsLeaf:
    """A leaf of images as a window over frames; any other as it is."""
    spec = leaf.spec
    if spec.dtype != "uint8" or len(spec.shape) < 3 or spec.choices:
        return leaf
    return leaf._replace(spec=replace(spec, is_stack=True))
