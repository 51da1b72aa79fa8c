"""impala-async: an asyncio IMPALA/APPO learner service with actors anywhere."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from impala_async.loaded import Acted, LoadedPolicy, load_policy

__version__ = "0.1.0"
__all__ = ["Acted", "LoadedPolicy", "__version__", "load_policy"]


def __getattr__(name: str) -> Any:
    """Load what is for users' programs when they ask for it, as it brings torch with it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("impala_async.loaded"), name)
