"""The configs that come with the package, by name."""

import difflib
import os
from pathlib import Path

from impala_async.errors import ConfigError

PACKAGE = Path(__file__).resolve().parents[1]


def packaged_configs() -> dict[str, Path]:
    """The configs by their names: they are in the package, or beside it in a checkout."""
    packaged = sorted(PACKAGE.glob("configs/*.toml"))
    return {path.stem: path for path in packaged or sorted(PACKAGE.parent.glob("configs/*.toml"))}


def find_config(given: str | os.PathLike[str]) -> Path:
    """A file, whose reader says if it is not there, or the config of that name; ConfigError if one
    with another name is meant."""
    name, packaged = os.fspath(given), packaged_configs()
    # A folder of that name may be that of a run.
    is_file = os.path.exists(name) and not os.path.isdir(name)
    near = [] if is_file else difflib.get_close_matches(Path(name).stem, packaged, n=1)
    if near and name not in packaged:
        raise ConfigError(f"there is no file {name}; did you mean {near[0]}?")
    return packaged[name] if near else Path(name)
