"""Rewards as the loss sees them. Reported returns never are: they are made by the actors.

    reward ─► clipped ─► scaled ─► divided by the deviation of the returns ─► loss

T rows of a trajectory, B columns
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from impala_async.config.algorithm import RewardClip
from impala_async.training.checkpoint import entry

# Each new batch has this share in the running moments: about the last hundred batches count.
SHARE = 0.01
# Bounds from below, so that nothing is divided by next to nothing: not the returns of a good
# policy, which are nearly constant, nor the first reward after many batches without any.
SMALLEST_SHARE_OF_MEAN = 0.1
SMALLEST_SCALE = 0.01
# From above too: values that have gone astray make targets, which are in units of the scale, and
# these make the next scale. Beyond this no reward is admitted, and no target is one.
LARGEST_SCALE = 1e15
# Returns so many times as large as those so far count as no larger, or one absurd reward would be
# felt for thousands of batches. They are followed, batch by batch.
MOST_TIMES = 30.0


def clip_rewards(rewards: Tensor, kind: RewardClip) -> Tensor:
    """Clip at a bound, which is 1 as in DQN for Atari (Nature 518), or as IMPALA does for DMLab-30
    (arXiv 1802.01561, figure D.1)."""
    if kind is None:
        return rewards
    if kind != "soft_asymmetric":
        bound = 1.0 if kind == "unit" else kind
        return rewards.clamp(-bound, bound)
    squeezed = rewards.tanh()
    return 0.3 * squeezed.clamp(max=0.0) + 5.0 * squeezed.clamp(min=0.0)


class ReturnScale:
    """The running standard deviation of the return targets, before any division by it.

    Rewards are divided by it rather than values multiplied (PopArt, arXiv 1602.07714), so that the
    model and its weights stay as they are for all who only act with it; the price is that values
    follow a change of scale by learning. So the scale moves slowly: the moments are averages,
    corrected for their start at zero as in Adam, so that early batches count alike.
    """

    def __init__(self) -> None:
        self.weight = self._mean = self._mean_square = 0.0

    @property
    def scale(self) -> float:
        return scale_of((self.weight, self._mean, self._mean_square))

    def add(self, parts: Iterable[Sequence[float]], scale: float) -> None:
        """Take in the sums of parts of a batch, whose rewards were divided by `scale`."""
        count, total, total_square = map(sum, zip((0.0,) * 3, *parts, strict=True))
        if count == 0:
            return
        mean, mean_square = total / count * scale, total_square / count * (scale * scale)
        usual_square = self._mean_square / (self.weight or 1)
        # Before any reward there is next to nothing to compare with.
        if usual_square > SMALLEST_SCALE**2 and mean_square > MOST_TIMES**2 * usual_square:
            shrinkage = MOST_TIMES**2 * usual_square / mean_square
            mean, mean_square = mean * math.sqrt(shrinkage), mean_square * shrinkage
        # That is false of NaN too. The moments stay finite, as all that a checkpoint holds must be.
        if abs(mean) <= LARGEST_SCALE and mean_square <= LARGEST_SCALE**2:
            self._mean += SHARE * (mean - self._mean)
            self._mean_square += SHARE * (mean_square - self._mean_square)
            self.weight += SHARE * (1 - self.weight)

    def state(self) -> dict[str, float]:
        return {"mean": self._mean, "mean_square": self._mean_square, "weight": self.weight}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.weight, self._mean, self._mean_square = (
            float(entry(state, key, float)) for key in ("weight", "mean", "mean_square")
        )


def sums_of(targets_TB: Tensor, mask_TB: Tensor) -> Tensor:
    """Count, sum and sum of squares of valid targets, on their device: those of parts add up."""
    wide_TB = torch.where(mask_TB, targets_TB.double(), 0.0)
    return torch.stack((mask_TB.sum().double(), wide_TB.sum(), wide_TB.square().sum()))


def scale_of(sums: Sequence[float]) -> float:
    """The scale of the targets with these sums alone; 1 without any."""
    count, total, total_square = sums
    if not count:
        return 1.0
    mean, mean_square = total / count, total_square / count
    # Python raises where mean**2 overflows; a product becomes infinite.
    deviation = math.sqrt(max(mean_square - mean * mean, 0.0))
    # NaN comes first, and stays.
    return min(max(deviation, SMALLEST_SHARE_OF_MEAN * abs(mean), SMALLEST_SCALE), LARGEST_SCALE)
