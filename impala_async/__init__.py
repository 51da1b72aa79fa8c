"""impala-async: an asyncio IMPALA/APPO learner service with actors anywhere.

A name below is loaded when it is first asked for, so that a process which wants none of them loads
neither torch nor gymnasium.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from impala_async.library.loaded_policy import LoadedPolicy, load_policy
    from impala_async.library.run import Run, run

__version__ = "0.1.0"
__all__ = ["LoadedPolicy", "Run", "__version__", "load_policy", "run"]

_HOMES = {
    "LoadedPolicy": "impala_async.library.loaded_policy",
    "load_policy": "impala_async.library.loaded_policy",
    "Run": "impala_async.library.run",
    "run": "impala_async.library.run",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
