"""A user's code, named `package.module:Name` in a setting: how it is imported, and its errors."""

import contextlib
import difflib
import importlib
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from traceback import walk_tb
from types import ModuleType
from typing import Any

from impala_async.errors import ConfigError, ImpalaAsyncError
from impala_async.processes import is_ctrl_c

# Packages that we can use, each with the extra that brings it.
EXTRAS = {
    "Box2D": "box2d",
    "ale_py": "atari",
    "imageio_ffmpeg": "video",
    "minatar": "minatar",
    "minigrid": "minigrid",
    "mujoco": "mujoco",
    "mpe2": "pettingzoo",
    "pettingzoo": "pettingzoo",
    "popgym": "popgym",
    "tensorboardX": "tensorboard",
    "wandb": "wandb",
}

# No environment and no network comes with Python, with pip, or with what we need. A learner may
# name one of their functions, and some of these run any text that they get.
NOT_A_USERS = sys.stdlib_module_names | frozenset(
    [
        *("numpy", "torch", "functorch", "torchgen", "uvloop", "msgpack", "zmq", "safetensors"),
        *("pydantic", "pydantic_core", "rich", "matplotlib", "mpl_toolkits", "pylab", "psutil"),
        *("zstandard", "annotated_types", "typing_extensions", "typing_inspection", "cffi"),
        *("cloudpickle", "farama_notifications", "filelock", "fsspec", "jinja2", "markupsafe"),
        *("networkx", "sympy", "isympy", "mpmath", "pygments", "markdown_it", "mdurl", "PIL"),
        *("contourpy", "cycler", "dateutil", "fontTools", "kiwisolver", "packaging", "pyparsing"),
        *("pip", "setuptools", "pkg_resources", "_distutils_hack", "wheel"),
    ]
)

# An exception's text is shortened to so many characters.
MOST_TEXT = 2000
# Besides all packages that lie in a folder of their kind.
INSTALLED = {"impala_async", *sys.stdlib_module_names}


def one_line(error: BaseException) -> str:
    """An exception's type and text, without line breaks, and shortened; its type alone where its
    text fails."""
    text, fails = "", (TypeError, ValueError, AttributeError, LookupError, RuntimeError, SystemExit)
    with contextlib.suppress(*fails):
        whole = str(error)
        more = " ..." if len(whole) > MOST_TEXT else ""
        text = " ".join(whole[:MOST_TEXT].split()) + more
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def package_of(found: Any) -> str:
    """The package that a class or function comes with."""
    while isinstance(found, partial):
        found = found.func
    module = getattr(found, "__module__", None) or type(found).__module__
    return str(module).partition(".")[0]


@dataclass(eq=False, slots=True)
class UserCode:
    """A context in which every exception is that of a user's code; one instance serves many times.

    So are SystemExit and GeneratorExit, which would else end a process of ours as if all were well.
    """

    name: str
    """The setting and its value, which name the code."""
    where: str
    """The place where the code failed, in words."""
    kind: type[ImpalaAsyncError] = ConfigError
    """The error of ours that an exception becomes; one that is such already passes."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is not None and not is_ctrl_c(error) and (ours := self.blame(error)):
            raise ours from error

    def blame(self, error: BaseException) -> ImpalaAsyncError | None:
        """The error of ours that says whose fault it was; None if it says so itself."""
        if isinstance(error, self.kind):
            return None
        told = f"{one_line(error)}{_place_in(self.name, error)}{_missing_advice(error)}"
        return self.kind(f"{self.name} failed {self.where}: {told}")


def _place_in(name: str, error: BaseException) -> str:
    """The file and the last line of code of the user's own that led to an error, in brackets: code
    of the package of such a name, or of none that is installed.

    Empty where there is none. Behind it may be lines of a library, which say less.
    """
    named, place = name.split()[-1].partition(":")[0].partition(".")[0], ""
    for frame, line in walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if package == named or not (package in INSTALLED or "-packages" in file):
            place = f" ({file}:{line})"
    return place


def import_callable(
    what: str, name: str, kind: type[ImpalaAsyncError] = ConfigError
) -> Callable[..., Any]:
    """The class or function of a package.module:Name, unless it is one of `NOT_A_USERS`.

    An error of that `kind` begins with `what`, the setting and its value.
    """
    module_name, _, attribute = name.rpartition(":")
    module = import_module(what, name, kind)
    found = getattr(module, attribute, None)
    if found is None:
        raise kind(f"{what}: {module_name} has no {attribute!r}.{close_name(attribute, module)}")
    if not callable(found):
        raise kind(f"{what} is of type {type(found).__name__}, and cannot be called")
    if package_of(found) in NOT_A_USERS:
        raise kind(
            f"{what} comes with Python, or with what impala-async needs, and is not called: name "
            "one of your own, in a module that has no name of theirs"
        )
    return found  # type: ignore[no-any-return]


def import_module(what: str, name: str, kind: type[ImpalaAsyncError] = ConfigError) -> ModuleType:
    """The module of a package.module:Name; arguments as of `import_callable`."""
    module_name, _, attribute = name.rpartition(":")
    if module_name.endswith(".py") or module_name.startswith(".") or "/" in module_name:
        meant = module_name.removesuffix(".py").strip("./").replace("/", ".")
        raise kind(
            f"{what}: a file is named as Python imports it, without a path: write "
            f"{meant}:{attribute}, and have it in the current folder or on PYTHONPATH"
        )
    if module_name == "__main__":
        raise kind(
            f"{what}: every process imports it, and has another __main__: put {attribute} into a "
            "module of its own"
        )
    with UserCode(what, f"to import {module_name}", kind):
        return importlib.import_module(module_name)


def _missing_advice(error: BaseException) -> str:
    """A clause that says what to do about a missing module, if that is the cause."""
    # gymnasium has errors of its own for what is missing, caused by the import's.
    missing = error if isinstance(error, ModuleNotFoundError) else error.__cause__
    if not isinstance(missing, ModuleNotFoundError) or not missing.name:
        return ""
    package = missing.name.partition(".")[0]
    if extra := EXTRAS.get(package):
        return f"; pip install 'impala-async[{extra}]'"
    # A program of a user's own looks beside itself, where a door looks in the current folder.
    has_current = {"", os.getcwd()} & {*sys.path}
    where = "in the current folder" if has_current else f"in {sys.path[0]}, not the current folder"
    return (
        f"; Python looks for {package} among what is installed on this host, {where}, and on "
        "PYTHONPATH"
    )


def close_name(name: str, module: ModuleType, others: Iterable[str] = ()) -> str:
    """A question that suggests the likeliest name in a module, or of others; empty if none is."""
    callables = [key for key, value in vars(module).items() if callable(value) and key[:1] != "_"]
    close = difflib.get_close_matches(name, [*callables, *others], n=1)
    return f" Did you mean: `{close[0]}`?" if close else ""
