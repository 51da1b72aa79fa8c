"""Gymnasium spaces to our spec: what a batch of environments needs to know of both its spaces."""

from typing import Any, NamedTuple

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Dict

from impala_async.envs.actions import ActionAdapter, action_parts
from impala_async.envs.observations import ObsLeaf, obs_leaves, short
from impala_async.errors import EnvError
from impala_async.spec import ActionPart, ActionSpec, ObsSpec


class SpaceOptions(NamedTuple):
    """How spaces are read: the settings of `env` that matter here."""

    mask_key: str | None = "action_mask"
    is_mask_required: bool = False
    is_squashed: bool = False


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
        self.obs_spec = ObsSpec(tuple(leaf.spec for leaf in self.leaves))
        parts = action_parts(action_space, is_squashed=options.is_squashed)
        self.action_spec = ActionSpec(parts, self._legal(observation_space, parts, options))
        self._action_space = action_space
        self._is_squashed = options.is_squashed

    def adapter(self, num_envs: int) -> ActionAdapter:
        """From our actions to those of so many environments."""
        return ActionAdapter(self._action_space, num_envs, is_squashed=self._is_squashed)

    def _legal(
        self, space: Space[Any], parts: tuple[ActionPart, ...], options: SpaceOptions
    ) -> str | None:
        """The leaf that masks illegal actions: under the usual key only if it fits."""
        key = options.mask_key
        if key is None:
            return None
        leaf = next((leaf for leaf in self.leaves if leaf.spec.name == key), None)
        num_choices = sum(sum(part.choices) for part in parts)
        fits = leaf is not None and _is_mask(leaf, num_choices) and len(self.leaves) > 1
        if fits and isinstance(space, Dict):
            return key
        if options.is_mask_required:
            found = "is not there" if leaf is None else f"has shape {leaf.spec.shape}"
            raise EnvError(
                f"env.action_mask_key: {key!r} must be a key of a Dict observation with a flag "
                f"for each of {num_choices} discrete actions; in {short(space)} it {found}"
            )
        return None


def _is_mask(leaf: ObsLeaf, num_choices: int) -> bool:
    is_flag = leaf.dtype.kind in "biu" and not leaf.spec.choices
    return is_flag and num_choices > 0 and int(np.prod(leaf.spec.shape)) == num_choices
