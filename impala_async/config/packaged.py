"""The configs that come with the package, by name."""

from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]


def packaged_configs() -> dict[str, Path]:
    """The configs by their names: they are in the package, or beside it in a checkout."""
    packaged = sorted(PACKAGE.glob("configs/*.toml"))
    return {path.stem: path for path in packaged or sorted(PACKAGE.parent.glob("configs/*.toml"))}
