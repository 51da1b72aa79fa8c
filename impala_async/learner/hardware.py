"""What the learner computes on: what was asked for, or what is there.

Runs on: event loop, once; each thread that computes says where
"""

import torch

from impala_async.errors import ConfigError


def pick_device(name: str) -> torch.device:
    """The device that a config names; `auto` is a GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"learner.device: {name!r} is not on this machine, which has "
            f"{torch.cuda.device_count()} GPUs; wants cpu or auto"
        )
    return device


def make_current(device: torch.device) -> None:
    """What this thread does from now on, it does there: every thread begins with the first GPU."""
    # Without a number a device is the current one already, and torch refuses it here.
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
