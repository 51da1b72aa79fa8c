"""All that this package raises on purpose, and the exit code that each ends a process with."""

import signal
from enum import IntEnum

# A shell adds this to the number of the signal that ended a process.
SHELL_SIGNAL = 128


class Exit(IntEnum):
    """The exit codes of a process of ours."""

    DONE = 0
    CONFIG = 2
    BUG = 70
    TRY_AGAIN = 75
    NOT_ALLOWED = 77
    MISMATCH = 78
    INTERRUPTED = 130


def how_it_ended(code: int) -> str:
    """Say what the exit code of a child tells. A signal has a negative one, or as in a shell."""
    if code == Exit.INTERRUPTED:
        return "was interrupted (SIGINT)"
    if code > SHELL_SIGNAL:
        code = SHELL_SIGNAL - code
    if code == -signal.SIGKILL:
        by = "by hand, or by the system when memory or a limit of processor time ran out"
        return f"was killed (SIGKILL), {by}"
    if code < 0:
        known = code in [-number for number in signal.Signals]
        return f"died of {signal.Signals(-code).name if known else f'signal {-code}'}"
    return f"ended with exit code {code}"


class ImpalaAsyncError(Exception):
    """A bug of ours, unless a class below says otherwise, by the exit code that it has."""

    exit_code = Exit.BUG

    def __init_subclass__(cls, code: Exit | None = None) -> None:
        cls.exit_code = cls.exit_code if code is None else code


class ConfigError(ImpalaAsyncError, code=Exit.CONFIG):
    """It names the field, what it got and what it wants."""


class SpacesError(ConfigError):
    """Nothing can be built for the spaces. A learner refuses an actor that told of them."""


class EnvError(ImpalaAsyncError, code=Exit.CONFIG):
    """The environment cannot be made, or broke its contract; `is_death`: its process has died."""

    def __init__(self, text: str = "", *, is_death: bool = False) -> None:
        super().__init__(text)
        self.is_death = is_death


class EnvHangsError(ImpalaAsyncError):
    """A call of the environment took longer than env.step_timeout_s."""


class CheckpointError(ImpalaAsyncError, code=Exit.CONFIG):
    """A checkpoint is missing, damaged, or belongs to another run."""


class RecordingError(ImpalaAsyncError, code=Exit.CONFIG):
    """A recording is missing, damaged, or cannot be played as asked."""


class RunOver(ImpalaAsyncError, code=Exit.DONE):
    """A run that is to be resumed has reached its end already."""


class ProtocolError(ImpalaAsyncError):
    """One peer misbehaved: counted by its `reason` and dropped, the learner lives."""

    def __init__(self, reason: str, text: str = "") -> None:
        super().__init__(text or reason)
        self.reason = reason


class MismatchError(ImpalaAsyncError, code=Exit.MISMATCH):
    """This actor does not fit this learner: do not retry."""


class NotAllowedError(ImpalaAsyncError, code=Exit.NOT_ALLOWED):
    """The learner does not admit this actor."""


class UnreachableError(ImpalaAsyncError, code=Exit.TRY_AGAIN):
    """No learner answered in time: try again later."""


class RankError(ImpalaAsyncError, code=Exit.TRY_AGAIN):
    """Another rank of this learner has ended, or does not answer: all start again."""


class InUseError(ImpalaAsyncError, code=Exit.TRY_AGAIN):
    """A run is to go on whose folder another learner still has: try again later."""


class StartError(ImpalaAsyncError, code=Exit.TRY_AGAIN):
    """The system gives no process, or nothing that it wants: try again later."""


class ServiceError(ImpalaAsyncError):
    """A task or thread died: everything stops, the cause is kept."""


def plain(text: str) -> str:
    """Return what somebody else wrote as one line without control characters."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
