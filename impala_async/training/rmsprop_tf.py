"""RMSProp as TensorFlow 1 had it, with which IMPALA (arXiv 1802.01561) was published.

    ms  = decay ms + (1 - decay) g^2          starting at 1, where torch starts at 0
    mom = momentum mom + lr g / sqrt(ms + eps)        torch: / (sqrt(ms) + eps)
    w   = w - mom                             so a rate enters when its gradient does

The mean square that starts at 1 makes the first steps small; an epsilon inside the root bounds
1 / sqrt at a larger gradient than the same epsilon outside.
"""

from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim import Optimizer


class RMSPropTF(Optimizer):
    """No weight decay, not centered."""

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        *,
        decay: float = 0.99,
        eps: float = 0.1,
        momentum: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "decay": decay, "eps": eps, "momentum": momentum})

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._step_group(group)
        return loss

    def _step_group(self, group: dict[str, Any]) -> None:
        parameters = [p for p in group["params"] if p.grad is not None]
        if not parameters:
            return
        gradients = [p.grad for p in parameters]
        squares = [self._state_of(p, "square_avg", 1.0) for p in parameters]
        torch._foreach_mul_(squares, group["decay"])
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - group["decay"])
        roots = torch._foreach_add(squares, group["eps"])
        torch._foreach_sqrt_(roots)
        moves = list(torch._foreach_div(gradients, roots))
        torch._foreach_mul_(moves, group["lr"])
        if group["momentum"]:
            buffers = [self._state_of(p, "momentum_buffer", 0.0) for p in parameters]
            torch._foreach_mul_(buffers, group["momentum"])
            torch._foreach_add_(buffers, moves)
            moves = buffers
        torch._foreach_sub_(parameters, moves)

    def _state_of(self, parameter: Tensor, key: str, start: float) -> Tensor:
        state = self.state[parameter]
        if key not in state:
            state[key] = torch.full_like(parameter, start)
        tensor: Tensor = state[key]
        return tensor
