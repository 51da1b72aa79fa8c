"""A batch as tensors, which view the memory of a slot.

B columns of a batch, T action rows, S = T+1 observation rows, F frames, K frames of a stack
"""

from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from impala_async.trajectory import Columns


@dataclass(frozen=True)
class Batch:
    """The columns of a slot as tensors, column by column as they lie there."""

    obs: dict[str, Tensor]
    actions: dict[str, Tensor]
    state: dict[str, Tensor]
    rewards_BT: Tensor
    log_probs_BT: Tensor
    terminated_BT: Tensor
    truncated_BT: Tensor
    mask_BT: Tensor
    windows: dict[str, Tensor] = field(default_factory=dict)

    @staticmethod
    def over(columns: Columns) -> "Batch":
        """View the columns' memory; nothing is copied."""
        return Batch(
            obs={name: torch.from_numpy(leaf) for name, leaf in columns.obs.items()},
            actions={name: torch.from_numpy(part) for name, part in columns.actions.items()},
            state={name: torch.from_numpy(part) for name, part in columns.state.items()},
            rewards_BT=torch.from_numpy(columns.rewards_CT),
            log_probs_BT=torch.from_numpy(columns.log_probs_CT),
            terminated_BT=torch.from_numpy(columns.terminated_CT),
            truncated_BT=torch.from_numpy(columns.truncated_CT),
            mask_BT=torch.from_numpy(columns.mask_CT),
            windows={name: torch.from_numpy(part) for name, part in columns.windows.items()},
        )

    def rows_of_obs(self) -> dict[str, Tensor]:
        """The leaves as `[B, S, ...]`; of a stack, each row's window over its column's frames."""
        shown = {name: _through(window, self.obs[name]) for name, window in self.windows.items()}
        return {**self.obs, **shown}

    def take(self, columns_N: Tensor) -> "Batch":
        """Copy the columns with these numbers."""
        taken: dict[str, Any] = {}
        for item in fields(self):
            part = getattr(self, item.name)
            if isinstance(part, Tensor):
                taken[item.name] = part[columns_N]
            else:
                taken[item.name] = {name: leaf[columns_N] for name, leaf in part.items()}
        return Batch(**taken)


def _through(window_BSK: Tensor, frames_BF: Tensor) -> Tensor:
    """[B, S, K, ...]: the frames of each column with these numbers."""
    num_columns, num_frames = frames_BF.shape[:2]
    starts_B = torch.arange(num_columns, device=frames_BF.device) * num_frames
    places = (window_BSK + starts_B[:, None, None]).flatten()
    flat = frames_BF.reshape(-1, *frames_BF.shape[2:])
    return flat.index_select(0, places).view(*window_BSK.shape, *flat.shape[1:])
