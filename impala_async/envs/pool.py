"""EnvPool's environments, which run in C++ threads, as a gymnasium vector.

A pool is seeded when it is made, not when it is reset: here each reset makes one.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

Transitions = tuple[Any, NDArray[np.float32], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]


class PoolVector(VectorEnv[Any, Any, Any]):
    """The task that EnvPool knows by a name; `kwargs` are EnvPool's own."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(self, task: str, num_envs: int, **kwargs: Any) -> None:
        import envpool

        self.num_envs = num_envs
        self._make = partial(envpool.make, task, env_type="gymnasium", num_envs=num_envs, **kwargs)
        with _without_warnings():
            spec = envpool.make_spec(task, num_envs=num_envs, **kwargs)
            self.single_observation_space = spec.gymnasium_observation_space
            self.single_action_space = spec.gymnasium_action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._pool: Any = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        self._end()
        with _without_warnings():
            self._pool = self._make() if seed is None else self._make(seed=seed)
            return self._pool.reset()  # type: ignore[no-any-return]

    def step(self, actions: Any) -> Transitions:
        return self._pool.step(actions)  # type: ignore[no-any-return]

    def close_extras(self, **kwargs: Any) -> None:
        self._end()

    def _end(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None


@contextmanager
def _without_warnings() -> Iterator[None]:
    """EnvPool writes the bounds of its float32 spaces in float64, which gymnasium tells of."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*precision lowered", UserWarning)
        yield
