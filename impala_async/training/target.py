"""The target network of APPO, which is IMPACT (arXiv 1912.00167), and the weight of its KL.

Owns a copy of the policy that moves towards the live one every so many updates, and the
coefficient that holds the live one near the copy.

    B columns of a batch, T action rows
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from impala_async.config.algorithm import AlgorithmSection
from impala_async.models.actor_critic import ActorCritic
from impala_async.training.state import check_alike, entry

KL_GROWTH, KL_SHRINKAGE = 1.5, 0.5
# Adapting ends there. From 0 and from infinity there would be no way back.
MIN_KL_COEFF, MAX_KL_COEFF = 1e-6, 1e6


class Target:
    """Starts as a copy of the network. `note_update` is called after every update taken."""

    def __init__(self, live: ActorCritic, section: AlgorithmSection) -> None:
        self.model = copy.deepcopy(live)
        self.kl_coeff = section.kl_coeff
        self._section = section
        # The settings that, with the course of the run, determine the coefficient.
        self._kl_settings = [section.kl_coeff, section.kl_target]
        self._age = 0
        self._has_moved = False

    @torch.no_grad()
    def note_update(self, live: ActorCritic, kl: float) -> None:
        """One update further from the target, at a mean KL before it of `kl`.

        The coefficient is adapted when the target moves, by the last KL before: right behind a
        move the two are equal, so that a KL taken there would only ever lower it.
        """
        self._age += 1
        if self._age < self._section.target_update_every_updates:
            return
        self._age = 0
        self.kl_coeff = adapted(self.kl_coeff, kl, self._section.kl_target)
        for weight, goal in zip(self.model.parameters(), live.parameters(), strict=True):
            weight.lerp_(goal, self._section.tau)
        self._has_moved = True
        self._take_statistics(live)

    def end_batch(self, live: ActorCritic) -> None:
        """Follow the statistics of observations that the batch has changed, if it has moved."""
        if self._has_moved:
            self._has_moved = False
            self._take_statistics(live)

    def _take_statistics(self, live: ActorCritic) -> None:
        """They are no weights: the newest are the best."""
        for statistic, newest in zip(self.model.buffers(), live.buffers(), strict=True):
            statistic.copy_(newest)

    def state(self) -> dict[str, Any]:
        """The values that a checkpoint must hold besides the tensors of its model."""
        return {"kl_coeff": self.kl_coeff, "kl_settings": self._kl_settings, "age": self._age}

    def restore(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint; where the settings of the KL have changed, they hold."""
        check_alike(tensors, self.model.state_dict())
        self.model.load_state_dict(dict(tensors))
        if entry(state, "kl_settings", list) == self._kl_settings:
            self.kl_coeff = float(entry(state, "kl_coeff", float))
        self._age = int(entry(state, "age", float))


def adapted(kl_coeff: float, kl: float, kl_target: float | None) -> float:
    """Larger where the policies are too far apart, smaller where they need not be so near.

    One that was set outside of the range of adapting is not brought into it against its way.
    """
    if kl_target is None:
        return kl_coeff
    if kl > 2 * kl_target:
        return max(kl_coeff, min(kl_coeff * KL_GROWTH, MAX_KL_COEFF))
    if kl < 0.5 * kl_target:
        return min(kl_coeff, max(kl_coeff * KL_SHRINKAGE, MIN_KL_COEFF))
    return kl_coeff
