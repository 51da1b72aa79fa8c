"""All that this package raises on purpose, and the exit code that each ends a process with.

ImpalaAsyncError              70  a bug of ours, unless a branch below says otherwise
├── ConfigError                2  names the field, what it got and what it wants
│   └── SpacesError            2  nothing can be built for these spaces with these settings
├── EnvError                   2  the environment cannot be made, or broke its own contract
├── EnvHangsError             70  a call of it took longer than env.step_timeout_s
├── CheckpointError            2  a checkpoint is missing, damaged, or belongs to another run
├── RecordingError             2  a recording is missing, damaged, or cannot be played as asked
├── RunOver                    0  a run that is to be resumed has reached its end already
├── ProtocolError              -  one peer misbehaved: counted and dropped, the learner lives
├── MismatchError             78  this actor does not fit this learner: do not retry
├── NotAllowedError           77  the learner does not admit this actor
├── UnreachableError          75  no learner answered in time: try again later
└── ServiceError              70  a task or thread died: everything stops, the cause is kept
"""

import signal

EXIT_DONE = 0
EXIT_CONFIG = 2
EXIT_BUG = 70
EXIT_TRY_AGAIN = 75
EXIT_NOT_ALLOWED = 77
EXIT_MISMATCH = 78
EXIT_INTERRUPTED = 130
# A shell adds this to the number of the signal that ended a process.
SHELL_SIGNAL = 128


def how_it_ended(code: int) -> str:
    """Say what the exit code of a child tells; a signal has a negative one."""
    if code == EXIT_INTERRUPTED:
        return "was interrupted (SIGINT)"
    if code == -signal.SIGKILL:
        by = "by hand, or by the system when memory or a limit of processor time ran out"
        return f"was killed (SIGKILL), {by}"
    if code == -signal.SIGXCPU:
        return "reached a limit of processor time (SIGXCPU)"
    if code < 0:
        known = code in [-number for number in signal.Signals]
        return f"died of {signal.Signals(-code).name if known else f'signal {-code}'}"
    return f"ended with exit code {code}"


class ImpalaAsyncError(Exception):
    exit_code = EXIT_BUG


class ConfigError(ImpalaAsyncError):
    exit_code = EXIT_CONFIG


class SpacesError(ConfigError):
    """Nothing can be built for these spaces with these settings, or there is no memory for it.

    Where an actor has told of the spaces, the learner refuses that actor and goes on.
    """


class EnvError(ImpalaAsyncError):
    """`is_death`: its process died, which the next one may not."""

    exit_code = EXIT_CONFIG

    def __init__(self, text: str = "", *, is_death: bool = False) -> None:
        super().__init__(text)
        self.is_death = is_death


class EnvHangsError(ImpalaAsyncError):
    exit_code = EXIT_BUG


class CheckpointError(ImpalaAsyncError):
    exit_code = EXIT_CONFIG


class RecordingError(ImpalaAsyncError):
    exit_code = EXIT_CONFIG


class RunOver(ImpalaAsyncError):
    exit_code = EXIT_DONE


class ProtocolError(ImpalaAsyncError):
    """`reason` is its counter."""

    def __init__(self, reason: str, text: str = "") -> None:
        super().__init__(text or reason)
        self.reason = reason


class MismatchError(ImpalaAsyncError):
    exit_code = EXIT_MISMATCH


class NotAllowedError(ImpalaAsyncError):
    exit_code = EXIT_NOT_ALLOWED


class UnreachableError(ImpalaAsyncError):
    exit_code = EXIT_TRY_AGAIN


class ServiceError(ImpalaAsyncError):
    exit_code = EXIT_BUG
