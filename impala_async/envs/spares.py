"""Spare environments: one of them is reset while another one is played.

All columns of an actor step together, so that all of them would wait while one is reset.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any

import gymnasium as gym

Env = gym.Env[Any, Any]
# At the end a reset is hardly waited for, as each column may have one; its environment is closed
# behind it, if there is time.
RESET_GRACE_S = 0.1


class ResetAhead(Env):
    """Several environments that are played in turn, an episode each.

    Who comes next, and with which seeds, does not depend on who is quick.
    """

    def __init__(self, envs: Sequence[Env]) -> None:
        first = envs[0]
        self.observation_space, self.action_space = first.observation_space, first.action_space
        self.metadata, self.render_mode, self.spec = first.metadata, first.render_mode, first.spec
        self._members = [_Member(env) for env in envs]
        self._played: _Member | None = None
        self._ready: deque[tuple[_Member, Future[Any]]] = deque()
        """Those that are reset, or being reset, in the order in which they are played."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        # A `reset` of a user's own may know none.
        more: dict[str, Any] = {} if options is None else {"options": options}
        if self._played is None or seed is not None:
            seeds = self.np_random.integers(2**31, size=len(self._members)).tolist()
            self._ready = deque(
                (member, member.begin("reset", seed=each, **more))
                for member, each in zip(self._members, seeds, strict=True)
            )
        else:
            self._ready.append((self._played, self._played.begin("reset", **more)))
        self._played, begun = self._ready.popleft()
        obs, info = begun.result()
        return obs, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        assert self._played is not None, "reset comes first"
        result: tuple[Any, Any, bool, bool, dict[str, Any]]
        result = self._played.begin("step", action).result()
        return result

    def render(self) -> Any:
        assert self._played is not None, "reset comes first"
        return self._played.begin("render").result()

    def close(self) -> None:
        """Close all of them, and wait for those that are not just being reset."""
        members, self._members, self._played = self._members, [], None
        being_reset = {member for member, begun in self._ready if not begun.done()}
        closed = [member.close() for member in members]
        wait([each for each, of in zip(closed, members, strict=True) if of not in being_reset])
        wait(closed, timeout=RESET_GRACE_S)
        faults = [error for each in closed if each.done() and (error := each.exception())]
        if faults:
            raise faults[0]


class _Member:
    """An environment and its thread, which alone calls it, as some simulators demand.

    A daemon: a reset that hangs holds up nobody's end.
    """

    def __init__(self, env: Env) -> None:
        self._env = env
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]
        self._calls = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="spare", daemon=True)

    def begin(self, name: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Begin a call behind those that have begun."""
        if self._thread.ident is None:
            self._thread.start()
        future: Future[Any] = Future()
        self._calls.put((future, lambda: getattr(self._env, name)(*args, **kwargs)))
        return future

    def close(self) -> Future[Any]:
        closed = self.begin("close")
        self._calls.put(None)
        return closed

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            future, function = call
            try:
                future.set_result(function())
            except BaseException as error:  # handed on: it is for whoever waits
                future.set_exception(error)
