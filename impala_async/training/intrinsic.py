"""An intrinsic reward of the user's own: a module that says how new or how odd each row is, and
that learns by a loss of its own beside the policy. Only the learner knows of it: its rewards enter
returns in the loss, never those that are reported. docs/models.md has the rules.

    B columns of a batch, T action rows, S = T+1 observation rows, N = B * S
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from impala_async.config.algorithm import AlgorithmSection
from impala_async.errors import ConfigError
from impala_async.policy import Policy
from impala_async.training.batch import Batch, only_read
from impala_async.user_code import UserCode, import_callable

KEY = "algorithm.intrinsic_reward"


class Intrinsic(NamedTuple):
    """A batch as the module sees it, or a part of one."""

    rewards_BT: Tensor
    """Without gradient, and 0 where masked."""
    loss: Tensor


class IntrinsicReward:
    """The module, and how it is asked."""

    def __init__(self, module: nn.Module, policy: Policy, section: AlgorithmSection) -> None:
        self.module, self._policy = module.to(policy.device), policy
        self._what, self._reduction = f"{KEY}: {section.intrinsic_reward}", section.reduction

    def prepare(self, batch: Batch) -> None:
        """Try it on a batch of zeros, as columns hold that never came."""
        # A number there that is not finite would make all gradients so, though the rows are masked.
        if not all(each.isfinite().all() for each in self._ask(batch.rows_of_obs(), batch)):
            raise ConfigError(
                f"{self._what} must give finite rewards_BT and losses_BT for observations and "
                "actions of zeros too, as masked rows may hold them"
            )

    def __call__(self, rows_BS: Mapping[str, Tensor], batch: Batch) -> Intrinsic:
        """For a batch, and its observations row by row."""
        mask_BT = batch.mask_BT
        rewards_BT, losses_BT = self._ask(rows_BS, batch)
        loss = torch.where(mask_BT, losses_BT, 0.0).sum()
        if self._reduction == "mean":
            loss = loss / mask_BT.sum().clamp(min=1)
        return Intrinsic(torch.where(mask_BT, rewards_BT.detach(), 0.0), loss)

    def _ask(self, rows_BS: Mapping[str, Tensor], batch: Batch) -> tuple[Tensor, Tensor]:
        """The module's rewards and losses `[B, T]`, whatever masked rows have."""
        names = [leaf.name for leaf in self._policy.obs_spec.leaves]
        with torch.no_grad():
            seen_N = self._policy.model.normal({k: rows_BS[k].flatten(0, 1) for k in names})
        obs_BS = {k: seen_N[k].unflatten(0, (len(batch.mask_BT), -1)) for k in names}
        actions_BT = dict(batch.actions)
        kept = {f"obs_BS[{k!r}]": leaf_BS for k, leaf_BS in obs_BS.items()}
        kept |= {f"actions_BT[{k!r}]": leaf_BT for k, leaf_BT in actions_BT.items()}
        kept |= {f"its buffer {k}": buffer for k, buffer in self.module.named_buffers()}
        with only_read(self._what, kept), UserCode(self._what, "to make rewards"):
            found = self.module(obs_BS, actions_BT)
        told, wanted = _described(found), f"float32 of {list(batch.mask_BT.shape)}"
        if told != f"{wanted} and {wanted}":
            raise ConfigError(
                f"{self._what} must give rewards_BT and losses_BT, each {wanted}, not {told}"
            )
        rewards_BT, losses_BT = found
        return rewards_BT, losses_BT


def make_intrinsic(policy: Policy, section: AlgorithmSection, seed: int) -> IntrinsicReward | None:
    """The one that the section names, if it does; raises ConfigError where it cannot be made."""
    name = section.intrinsic_reward
    if name is None:
        return None
    what = f"{KEY}: {name}"
    make = import_callable(what, name)
    with torch.random.fork_rng(devices=[]), UserCode(what, "when it was made"):
        torch.default_generator.manual_seed(seed)
        module = make(policy.obs_spec, policy.action_spec)
    if not isinstance(module, nn.Module):
        raise ConfigError(f"{what} must make a torch.nn.Module, not {type(module).__name__}")
    return IntrinsicReward(module, policy, section)


def _described(found: Any) -> str:
    """Dtypes and shapes of a tuple of tensors, in words; or the type of anything else."""
    return " and ".join(
        f"{each.dtype} of {list(each.shape)}".removeprefix("torch.")
        if isinstance(each, Tensor)
        else type(each).__name__
        for each in (found if isinstance(found, tuple) and len(found) > 1 else [found])
    )
