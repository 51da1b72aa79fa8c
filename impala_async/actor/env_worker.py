"""An env worker: a process that steps some of an actor's environments, in memory that both share.

    python -m impala_async.actor.env_worker COMMANDS REPLIES MEMORY

It inherits the descriptors: a pipe of commands, one of replies, the memory. It gets an order, which
environments to make, answers with what they look like, and is told its place in the memory. From
then on a command and its reply are a byte each: RESET (with a seed behind it) or STEP, answered by
the bits of what that brought. FAULT, with the reason behind it, is its last word.

Runs on: env worker; `SharedColumns` on the sampler thread too
"""

import contextlib
import faulthandler
import json
import mmap
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from impala_async import processes
from impala_async.config.env import EnvSection
from impala_async.config.policies import PoliciesSection
from impala_async.envs.batch import Step
from impala_async.envs.describe import look_of
from impala_async.envs.faults import RUNNING
from impala_async.envs.make import build_envs
from impala_async.errors import EnvError, Exit
from impala_async.schema import ActionSpec, ArraySpec, ObsSpec, aligned

STEP, RESET = b"s", b"r"
# All replies below it are bits.
FAULT = 0xFF
REPLIES = [bytes([bits]) for bits in range(FAULT)]
# A fault must fit into a pipe, so that nobody needs to read it for the worker to end: 64 KiB, of
# which a character takes up to twelve bytes, and the error has some, too.
MAX_TRACEBACK = 3_000
# Asks it for its stacks: heard even where an environment holds the interpreter's lock.
TELL_STACKS = signal.SIGUSR1
ALIGNMENT = 64
OTHERS = (
    *(ArraySpec(name, (), "bool") for name in ("terminated", "truncated", "idle", "untrained")),
    *(ArraySpec("rewards", (), "float32"), ArraySpec("place", (), "int32")),
)


class SharedColumns:
    """Typed views of the memory, or of some columns in it: an actor writes their actions, a worker
    the step that these came to, in its own columns alone. The memory has no name: the kernel frees
    it with the last process that has it."""

    def __init__(self, *groups: dict[str, NDArray[Any]]) -> None:
        """Observations, final observations, actions, and what has a number for each column."""
        self._groups = groups
        self.obs, final_obs, self.actions, others = groups
        self._places_C = others["place"]
        arrays = {name: others[name] for name in Step._fields if name in others}
        self._step = Step(obs=self.obs, final_obs=final_obs, **arrays)

    @staticmethod
    def over(memory: int, obs: ObsSpec, action: ActionSpec, num_columns: int) -> "SharedColumns":
        """Give the memory its size, and map it."""
        groups = (obs.leaves, obs.leaves, tuple(part.array for part in action.parts), OTHERS)
        sizes = [aligned(num_columns * spec.num_bytes, ALIGNMENT) for spec in chain(*groups)]
        *offsets, num_bytes = accumulate(sizes, initial=0)
        os.ftruncate(memory, num_bytes)
        buffer, places = mmap.mmap(memory, num_bytes), iter(offsets)

        def view(spec: ArraySpec) -> NDArray[Any]:
            return np.ndarray((num_columns, *spec.shape), spec.dtype, buffer, next(places))

        return SharedColumns(*({spec.name: view(spec) for spec in group} for group in groups))

    @property
    def place(self) -> memoryview:
        """Where the worker of these columns says which environment it is in: `Running.place`."""
        return self._places_C[:1].data

    def columns(self, first: int, last: int) -> "SharedColumns":
        return SharedColumns(
            *({name: array[first:last] for name, array in group.items()} for group in self._groups)
        )

    def write(self, parts: Sequence[Any]) -> int:
        """Store a step, or its first parts; a bit for each one that is there."""
        brought = 0
        mine: Any
        for number, (mine, part) in enumerate(zip(self._step, parts, strict=False)):
            if part is None:
                if isinstance(mine, np.ndarray):
                    # Another worker may bring it.
                    mine.fill(False)
                continue
            brought |= 1 << number
            if isinstance(part, dict):
                for name, array in mine.items():
                    array[...] = part[name]
            else:
                mine[...] = part
        return brought

    def read(self, brought: int) -> Step:
        parts: list[Any] = [
            part if brought & 1 << number else None for number, part in enumerate(self._step)
        ]
        return Step(*parts)


def as_line(value: Any) -> bytes:
    return json.dumps(value).encode() + b"\n"


def write(fd: int, message: bytes) -> None:
    """All of it, though a pipe may take less at once."""
    while message:
        message = message[os.write(fd, message) :]


def read_json(fd: int) -> Any:
    """The value of a line; EOFError when the other side is gone."""
    line = bytearray()
    while not line.endswith(b"\n"):
        # Behind it there may be what is not of this line.
        if not (byte := os.read(fd, 1)):
            raise EOFError
        line += byte
    return json.loads(line)


def main() -> int:
    """Serve until the actor closes the pipe; a fault of the environment is told and ends it."""
    processes.begin()
    # The actor decides what they mean. Its environments' processes would inherit SIG_IGN.
    processes.answer_requests(lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, processes.CTRL_C)
    faulthandler.register(TELL_STACKS, all_threads=True)
    processes.hold()
    commands, replies, memory = fds = [int(text) for text in sys.argv[1:]]
    for fd in fds:
        # A process that an environment starts must not keep the pipes open.
        os.set_inheritable(fd, False)
    try:
        _work(commands, replies, memory)
    except EnvError as error:
        text = "".join(traceback.format_exception(error.__cause__ or error))
        fault = {"error": str(error), "traceback": text[-MAX_TRACEBACK:]}
        write(replies, bytes([FAULT]) + as_line(fault))
        return Exit.CONFIG
    except (EOFError, BrokenPipeError):
        pass  # the actor is gone
    os.close(replies)
    return Exit.DONE


def _work(commands: int, replies: int, memory: int) -> None:
    order = read_json(commands)
    section = EnvSection.model_validate(order["env"])
    policies = PoliciesSection.model_validate(order["policies"])
    envs = build_envs("parallel", section, order["num_envs"], policies)
    try:
        look = {"name": envs.name, "autoreset": envs.autoreset.value, "spaces": look_of(envs)}
        write(replies, REPLIES[0] + as_line(look))
        num_columns, first = read_json(commands)
        shared = SharedColumns.over(memory, envs.obs_spec, envs.action_spec, num_columns)
        os.close(memory)
        mine = shared.columns(first, first + envs.num_envs)
        RUNNING.place = mine.place
        while command := os.read(commands, 1):
            if command == STEP:
                brought = mine.write(envs.step(mine.actions))
            else:
                brought = mine.write([envs.reset(read_json(commands), order["first_env"])])
            os.write(replies, REPLIES[brought])
    except (EnvError, EOFError, BrokenPipeError):
        # Nor must a fault in close hide why they are closed.
        with contextlib.suppress(EnvError):
            envs.close()
        raise
    envs.close()


if __name__ == "__main__":
    processes.leave(main())
