"""Reading a config: a TOML file, then `--set section.key=value` overrides, then validation.

Unknown keys are refused with a suggestion; every error names its source, the dotted key, the
value and what is wanted, and all mistakes are told at once.
"""

import copy
import difflib
import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from impala_async.config import RunConfig
from impala_async.errors import ConfigError

COMMAND_LINE = "--set"
MAX_SHOWN = 200


def load_config(path: Path | None = None, overrides: Iterable[str] = ()) -> RunConfig:
    """Read a TOML file, apply `section.key=value` overrides, validate.

    Raises:
        ConfigError: with one line per mistake.
    """
    from_file = {} if path is None else _read_toml(path)
    settings, sources = merge_overrides(from_file, overrides)
    return validate_config(settings, dict.fromkeys(_dotted_keys(from_file), str(path)) | sources)


def merge_overrides(
    settings: Mapping[str, Any], overrides: Iterable[str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Settings with `section.key=value` overrides, and where each overridden key came from."""
    merged: dict[str, Any] = copy.deepcopy(dict(settings))
    keys = [_apply_override(merged, override) for override in overrides]
    return merged, dict.fromkeys(keys, COMMAND_LINE)


def validate_config(
    settings: Mapping[str, Any], sources: Mapping[str, str] | None = None
) -> RunConfig:
    """Turn nested settings into a config, or say in one line each what is wrong with them."""
    try:
        return RunConfig.model_validate(settings)
    except ValidationError as error:
        lines = [_explain(dict(detail), sources or {}) for detail in error.errors()]
        raise ConfigError("\n".join(lines)) from None


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot read this config file: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a valid TOML file: {error}") from None


def _dotted_keys(settings: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in settings.items():
        yield prefix + key
        if isinstance(value, dict):
            yield from _dotted_keys(value, f"{prefix}{key}.")


def _apply_override(settings: dict[str, Any], override: str) -> str:
    """Write one `section.key=value` into the nested settings; return its dotted key."""
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not all(key.split(".")):
        raise ConfigError(
            f"{COMMAND_LINE}: {override!r} is not of the form section.key=value, "
            "for example learner.num_passes=2"
        )
    *parents, leaf = key.split(".")
    for parent in parents:
        settings = settings.setdefault(parent, {})
        if not isinstance(settings, dict):
            raise ConfigError(f"{COMMAND_LINE}: {key}: {parent} is a value, without keys")
    settings[leaf] = _parse_value(text.strip())
    return key


def _parse_value(text: str) -> Any:
    """Read a value as TOML does; what TOML cannot read is a plain string, and `none` is None."""
    if text.lower() in {"none", "null"}:
        return None
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return parsed["value"] if len(parsed) == 1 else text


def _explain(detail: dict[str, Any], sources: Mapping[str, str]) -> str:
    """One line for one mistake: source, dotted key, what it got, what it wants."""
    key = ".".join(str(part) for part in detail["loc"])
    source = _source(key, sources)
    if detail["type"] == "extra_forbidden":
        return f"{source}: {key}: unknown key{_suggest(key)}"
    if detail["type"] == "missing":
        hint = " (for example --set env.id=CartPole-v1, or --config FILE)" if "env" in key else ""
        return f"{source}: {'env.id' if key == 'env' else key}: required{hint}"
    message = detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "value_error":
        return f"{source}: {key + ': ' if key else ''}{message}"
    return f"{source}: {key}: {message}, got {_shown(detail['input'])}"


def _source(key: str, sources: Mapping[str, str]) -> str:
    """Where a key was set; where anything below it was, if a whole section is at fault."""
    if key in sources and not any(k.startswith(f"{key}.") for k in sources):
        return sources[key]
    below = {source for k, source in sources.items() if not key or k.startswith(f"{key}.")}
    return " and ".join(sorted(below)) or sources.get(key.rpartition(".")[0], "config")


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def _suggest(key: str) -> str:
    """The key that was meant: one of the same name elsewhere, or the one spelled most like it."""
    known = list(_schema_keys(RunConfig))
    named_so = [k for k in known if k.rpartition(".")[2] == key.rpartition(".")[2]]
    near = difflib.get_close_matches(key, named_so or known, n=1, cutoff=0.0 if named_so else 0.6)
    if not near:
        leaves = {k.rpartition(".")[2]: k for k in known}
        close = difflib.get_close_matches(key.rpartition(".")[2], list(leaves), n=1, cutoff=0.6)
        near = [leaves[leaf] for leaf in close]
    return f"; did you mean {near[0]}?" if near else ""


def _schema_keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        key = prefix + (field.alias or name)
        yield key
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _schema_keys(field.annotation, f"{key}.")
