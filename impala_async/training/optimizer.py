"""The optimizer: how it is built, its schedules, its steps, its state as tensors.

A resumed run goes on with the state that it has of each parameter, but not with its options: they
follow from the settings, which may have changed, and from this machine.
"""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer, RMSprop

from impala_async.config.algorithm import AlgorithmSection
from impala_async.errors import CheckpointError
from impala_async.training.checkpoint import check_alike, entry

# The square of a larger gradient, which optimizers remember, would overflow.
MAX_NORM = 1e19
# The state of each parameter that had a gradient, by the class of the optimizer.
KEPT = {
    "Adam": {"step", "exp_avg", "exp_avg_sq"},
    "AdamW": {"step", "exp_avg", "exp_avg_sq"},
    "RMSprop": {"step", "square_avg"},
    "RMSPropTF": {"square_avg"},
}
# torch keeps its compiler away from these, and imports it for that at the first call, which takes
# nearly as long as to import torch. Nothing here compiles an optimizer: they are marked as done.
for _name in ("add_param_group", "load_state_dict", "state_dict", "zero_grad"):
    if (_plain := getattr(getattr(Optimizer, _name), "__wrapped__", None)) is not None:
        _plain.__dynamo_disable = _plain


class RMSPropTF(Optimizer):
    """RMSProp as TensorFlow 1 had it, with which IMPALA (arXiv 1802.01561) was published.

    ms  = decay ms + (1 - decay) g^2          starting at 1, where torch starts at 0
    mom = momentum mom + lr g / sqrt(ms + eps)        torch: / (sqrt(ms) + eps)
    w   = w - mom                             so a rate enters when its gradient does
    """

    def __init__(
        self, params: Iterable[Tensor], *, lr: float, decay: float, eps: float, momentum: float
    ) -> None:
        super().__init__(params, {"lr": lr, "decay": decay, "eps": eps, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        parameters = [p for p in group["params"] if p.grad is not None]
        gradients = gradients_of(parameters)
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


def build_optimizer(parameters: Iterable[nn.Parameter], section: AlgorithmSection) -> Optimizer:
    """The section's, at the schedule's first rate."""
    lr, eps = section.lr, section.epsilon
    options = section.optimizer_options
    decay, momentum = options.decay, options.momentum
    # Measured on a CPU: fused takes a third of the time of the foreach and plain forms.
    if section.optimizer == "adam":
        return Adam(parameters, lr=lr, eps=eps, fused=True)
    if section.optimizer == "adamw":
        return AdamW(parameters, lr=lr, eps=eps, weight_decay=options.weight_decay, fused=True)
    if section.optimizer == "rmsprop":
        return RMSprop(parameters, lr=lr, alpha=decay, eps=eps, momentum=momentum)
    return RMSPropTF(parameters, lr=lr, decay=decay, eps=eps, momentum=momentum)


def global_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    norms = torch._foreach_norm(gradients_of(parameters))
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm


def gradients_of(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def take_step(
    optimizer: Optimizer, norm: float, clip: float | None, by: Literal["norm", "value"] = "norm"
) -> None:
    """Make a step along gradients of global norm `norm`, scaled down where that is above the clip,
    or with each entry within it.

    Without what torch wraps around that for its profiler, hooks and compiler: on a CPU a quarter
    of the step of a small model.
    """
    with torch.no_grad():
        # No entry is larger than the norm.
        if clip is not None and norm > clip:
            (group,) = optimizer.param_groups
            gradients = gradients_of(group["params"])
            if by == "norm":
                torch._foreach_mul_(gradients, clip / norm)
            else:
                torch._foreach_clamp_min_(gradients, -clip)
                torch._foreach_clamp_max_(gradients, clip)
        if type(optimizer) is not Adam or not _take_fused_step(optimizer):
            inspect.unwrap(type(optimizer).step)(optimizer)


def _take_fused_step(optimizer: Adam) -> bool:
    """The one kernel of a step, without what chooses it, which takes longer; whether all states are
    there, as they are from the second step on."""
    (group,) = optimizer.param_groups
    parameters = [p for p in group["params"] if p.grad is not None]
    states = [optimizer.state[p] for p in parameters]
    if not all(states):
        return False
    steps, firsts, seconds = (
        [state[key] for state in states] for key in ("step", "exp_avg", "exp_avg_sq")
    )
    torch._foreach_add_(steps, 1)
    torch._fused_adam_(
        *(parameters, [p.grad for p in parameters], firsts, seconds, [], steps),
        lr=group["lr"],
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=0.0,
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
    )
    return True


def scheduled(
    start: float, end: float | None, horizon: int | None, env_steps_trained: int
) -> float:
    """A value that goes from `start` to `end` in `horizon` env steps trained, if there are both."""
    if end is None or horizon is None:
        return start
    fraction = env_steps_trained / horizon
    # At the horizon exactly `end`: start + (end - start) may miss it by a rounding.
    return end if fraction >= 1 else start + (end - start) * fraction


def flatten_optimizer(optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Its state as named tensors, which are the live ones, and its kind as JSON."""
    tensors = {
        f"{index}.{key}": tensor
        for index, entries in optimizer.state_dict()["state"].items()
        for key, tensor in entries.items()
    }
    return tensors, {"kind": type(optimizer).__name__}


def restore_optimizer(
    optimizer: Optimizer, tensors: Mapping[str, Tensor], options: Mapping[str, Any]
) -> None:
    """Undo `flatten_optimizer`; CheckpointError if it is of another optimizer."""
    kind, wanted = entry(options, "kind", str), type(optimizer).__name__
    if kind != wanted:
        raise CheckpointError(f"state of {kind} does not fit {wanted}")
    (group,) = optimizer.param_groups
    parameters = {str(number): each for number, each in enumerate(group["params"])}
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        index, _, key = name.partition(".")
        if index not in parameters:
            raise CheckpointError(f"{name} is the state of a parameter that does not exist")
        # torch itself notices a wrong shape only at the next step. A count has no dimensions.
        check_alike({name: tensor}, {name: parameters[index] if tensor.dim() else torch.zeros(())})
        # torch keeps what it is given: without a copy two optimizers could share a state.
        state.setdefault(int(index), {})[key] = tensor.clone()
    for number, kept in state.items():
        # torch itself notices it only at the next step.
        if lacking := KEPT[wanted] - kept.keys():
            raise CheckpointError(f"it has no '{number}.{min(lacking)}'")
        # Momentum that begins in a resumed run begins at 0: torch would miss it at the first step.
        if group.get("momentum"):
            kept.setdefault("momentum_buffer", torch.zeros_like(group["params"][number]))
        else:
            kept.pop("momentum_buffer", None)
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
