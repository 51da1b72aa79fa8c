"""A batch as tensors, and what is taken of it.

They view the memory of a slot until a part is taken.

    B columns of a batch, T action rows, S = T+1 observation rows, N columns or rows of a part,
    F frames, K frames of a stack
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from impala_async.errors import ConfigError
from impala_async.files import write_whole
from impala_async.schema import Bytes2D, Schema
from impala_async.training.checkpoint import copies_of
from impala_async.trajectory import fields_of

# Columns that alone stay below these do so together too: a norm overflows at 1e19, a loss at 1e38.
GOOD_NORM, GOOD_LOSS = 1e15, 1e30


@dataclass(frozen=True)
class Batch:
    """The columns of a slot as tensors, as they lie there: the fields are those of `Columns`, and
    what was computed of them before."""

    obs: dict[str, Tensor]
    actions: dict[str, Tensor]
    state: dict[str, Tensor]
    rewards_BT: Tensor
    log_probs_BT: Tensor
    terminated_BT: Tensor
    truncated_BT: Tensor
    mask_BT: Tensor
    windows: dict[str, Tensor] = field(default_factory=dict)
    known: dict[str, Tensor] = field(default_factory=dict)
    """Returns, `targets_BT` and `advantages_BT`, where they were computed before."""
    before: dict[str, Tensor] = field(default_factory=dict)
    """`log_probs_BT` of the actions by the policy from before the batch, where they are wanted."""

    @staticmethod
    def in_planes(schema: Schema, obs: Tensor | Bytes2D, small: Tensor | Bytes2D) -> "Batch":
        """View the planes of columns, on any device; nothing is copied."""
        planes = torch.as_tensor(obs), torch.as_tensor(small)
        return Batch(*fields_of(schema.layout.views(*planes, dtype_of=partial(getattr, torch))))

    def tensors(self) -> dict[str, Tensor]:
        """All of them, a leaf's named `field/leaf`, in an order that a schema's batches share."""
        named: dict[str, Tensor] = {}
        for name, part in vars(self).items():
            is_one = isinstance(part, Tensor)
            named |= {name: part} if is_one else {f"{name}/{k}": part[k] for k in part}
        return named

    def rows_of_obs(self) -> dict[str, Tensor]:
        """The leaves as `[B, S, ...]`; of a stack, each row's window over its column's frames."""
        shown = {name: _through(window, self.obs[name]) for name, window in self.windows.items()}
        return {**self.obs, **shown}

    def living(self, alive_B: Tensor) -> "Batch":
        """This batch, in which the columns that are not alive, a tensor on the CPU, are masked."""
        if alive_B.all():
            return self
        alive_B1 = alive_B.to(self.mask_BT.device, non_blocking=True).unsqueeze(-1)
        return replace(self, mask_BT=self.mask_BT & alive_B1)

    def take(self, columns_N: Tensor) -> "Batch":
        """Copy the columns with these numbers, a tensor on the CPU."""
        columns_N = columns_N.to(self.mask_BT.device)
        # `part[columns_N]` takes bytes one by one.
        return self._made(lambda _, part: part.index_select(0, columns_N))

    def in_one_column(self, known: Mapping[str, Tensor]) -> "Batch":
        """All its rows in one column, one column's behind the other's, for `rows` to take from.
        Observations have the bootstrap rows between them: so what is contiguous is not copied."""
        num_columns = len(self.mask_BT)
        columns_B11 = torch.arange(num_columns, device=self.mask_BT.device)[:, None, None]

        def strung(name: str, part: Tensor) -> Tensor:
            field_name, _, leaf = name.partition("/")
            if field_name == "windows":  # it counts frames from the first one of its column
                part = part + columns_B11 * self.obs[leaf].shape[1]
            return part.flatten(0, 1).unsqueeze(0)

        return replace(self, known=dict(known))._made(strung)

    def rows(self, numbers_N: Tensor, per_column: int) -> "Batch":
        """Copy these rows of `in_one_column`, by their numbers, a tensor on the CPU: so many are
        of one column."""
        numbers_N = numbers_N.to(self.mask_BT.device)
        seen_N = numbers_N + numbers_N // per_column
        # As their returns are known, nobody looks at the row behind the last one.
        seen_S = torch.cat([seen_N, seen_N[:1]])

        def taken(name: str, part: Tensor) -> Tensor:
            field_name, _, leaf = name.partition("/")
            if field_name == "obs" and leaf in self.windows:
                return part
            return part.index_select(1, seen_S if field_name in ("obs", "windows") else numbers_N)

        return self._made(taken)

    def _made(self, make: Callable[[str, Tensor], Tensor]) -> "Batch":
        """A batch of what this makes of each tensor and its name, as in `tensors`."""
        made: dict[str, Any] = {
            name: make(name, part)
            if isinstance(part, Tensor)
            else {k: make(f"{name}/{k}", each) for k, each in part.items()}
            for name, part in vars(self).items()
        }
        return Batch(**made)

    def keep(self, path: Path, about: dict[str, str], **others: Tensor) -> str:
        """Write it for a look at it; return, in words, where it is, or why it is nowhere.

        `safetensors.torch.load_file` reads it. The names are those of the fields and of `others`,
        and `about` becomes its metadata.
        """
        try:
            write_whole(path, save(copies_of({**others, **self.tensors()}), about))
        except OSError as error:
            return f"the last batch cannot be kept in {path}: {error.strerror}"
        return f"the last batch is kept in {path}"


@contextmanager
def only_read(what: str, kept: Mapping[str, Tensor]) -> Iterator[None]:
    """Somebody's code may not change these in place, by their names: ConfigError if it did."""
    # Every change in place increases a tensor's version.
    versions = {name: tensor._version for name, tensor in kept.items()}
    yield
    changed = [name for name, tensor in kept.items() if tensor._version != versions[name]]
    if changed:
        raise ConfigError(
            f"{what} changes {changed[0]} in place, which other passes over the batch read too: it "
            "must make a new tensor"
        )


def _through(window_BSK: Tensor, frames_BF: Tensor) -> Tensor:
    """[B, S, K, ...]: the frames of each column with these numbers."""
    num_columns, num_frames = frames_BF.shape[:2]
    starts_B = torch.arange(num_columns, device=frames_BF.device) * num_frames
    places = (window_BSK + starts_B[:, None, None]).flatten()
    flat = frames_BF.reshape(-1, *frames_BF.shape[2:])
    return flat.index_select(0, places).view(*window_BSK.shape, *flat.shape[1:])
