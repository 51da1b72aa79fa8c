"""What a torso is: from observation leaves to features. A user's own class may be one.

    class MyTorso(nn.Module):
        def __init__(self, obs: ObsSpec, section: ModelSection) -> None:
            super().__init__()
            self.num_out = 64           # how many features come out
            ...

        def forward(self, obs: dict[str, Tensor]) -> Tensor:
            ...                         # leaves of [N, ...] in, [N, num_out] out

`model.name = "package.module:MyTorso"` picks it, and must be importable where the learner and the
actors run. Rows come flat: N may be the columns of an actor or all rows of a batch. Leaves have the
dtypes of the spec, float32 if they are normalised; the mask of legal actions is not among them.
Weights must be float32. docs/models.md says more.

N rows, F features
"""

from typing import Protocol

from torch import Tensor


class Torso(Protocol):
    """An nn.Module that is made from an ObsSpec and the `model` section."""

    num_out: int

    def __call__(self, obs: dict[str, Tensor]) -> Tensor:
        """`[N, ...]` leaves to `[N, num_out]` features."""
        ...
