"""Reading a config: a TOML file, or the `config.json` of a run, then `--set section.key=value`
overrides, then validation.

Unknown keys are refused with a suggestion; every error names its source, the dotted key, the
value and what is wanted, and all mistakes are told at once.
"""

import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from datetime import date, time
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from impala_async.config.mistakes import MAX_SHOWN, explain, shown, source_of
from impala_async.config.run import DECIDED_BY_LOCKSTEP, RunConfig
from impala_async.errors import ConfigError
from impala_async.files import why_unreadable

COMMAND_LINE = "--set"
# Where values have no type of ours.
FREE_FORM = (["env"], ["env", "kwargs"], ["env", "wrappers"])
# Beyond these Python gives up, at one place or another.
MAX_DEPTH, MAX_BITS = 50, 10_000


class Merged(NamedTuple):
    """Settings, where each key came from, and which overrides make no sense.

    The source of the key "" is that of all that has none.
    """

    settings: dict[str, Any]
    sources: dict[str, str]
    mistakes: list[str]


def load_config(path: Path | None = None, overrides: Iterable[str] = ()) -> RunConfig:
    """Read a config file, apply `section.key=value` overrides, validate.

    Raises:
        ConfigError: with one line per mistake.
    """
    if path is None:
        return validate_config(*merge_overrides({}, overrides))
    if path.suffix == ".json":
        # It holds all keys, also those that nobody has set: none of them is a mistake of the file.
        settings, keys = _read_json(path), [""]
    else:
        settings = _read_toml(path)
        keys = ["", *_dotted_keys(settings)]
    return validate_config(*merge_overrides(settings, overrides, dict.fromkeys(keys, str(path))))


def merge_overrides(
    settings: Mapping[str, Any], overrides: Iterable[str], sources: Mapping[str, str] | None = None
) -> Merged:
    """Settings with `section.key=value` overrides; one that makes no sense changes nothing."""
    merged = Merged(dict(settings), dict(sources or {}), [])
    for override in overrides:
        try:
            key = _apply_override(merged.settings, override)
        except ConfigError as error:
            merged.mistakes.append(str(error))
            continue
        # A value that replaced a whole section is no mistake of where that came from.
        for below in [each for each in merged.sources if each.startswith(f"{key}.")]:
            del merged.sources[below]
        merged.sources[key] = COMMAND_LINE
    return merged


def validate_config(
    settings: Mapping[str, Any],
    sources: Mapping[str, str] | None = None,
    mistakes: Iterable[str] = (),
) -> RunConfig:
    """Turn nested settings into a config, or say in one line each what is wrong with them.

    `mistakes` are those that were found before, to be told with the others.
    """
    sources, lines = sources or {}, list(mistakes)
    for key, why in _unwritable(settings):
        # One is enough: whatever is told next would have to be written as well.
        raise ConfigError(f"{source_of(key, sources)}: {shown(key)[1:-1]}: {why}")
    try:
        config = RunConfig.model_validate(settings)
        if config.pace.is_lockstep:
            lines += _idle_in_lockstep(settings, sources)
    except ValidationError as error:
        lines += [explain(dict(detail), sources) for detail in error.errors()]
    if lines:
        raise ConfigError("\n".join(lines))
    return config


def _idle_in_lockstep(settings: Mapping[str, Any], sources: Mapping[str, str]) -> Iterator[str]:
    """Name the keys that do nothing in lockstep and were set beside it, or on the command line.

    By their sources and not by their values: a preset's are passed over, and a resolved config
    holds all keys.
    """

    def source(section: str, key: str) -> str | None:
        return sources.get(f"{section}.{key}", sources.get(section))

    beside = {COMMAND_LINE, source("pace", "mode")} - {None}
    for key in DECIDED_BY_LOCKSTEP:
        found = source("learner", key)
        if key in settings.get("learner", {}) and found in beside:
            yield f"{found}: learner.{key}: does nothing with pace.mode lockstep: drop it"


def _unwritable(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Each key with what could not be written down again, or not without trouble, and why."""
    level: list[tuple[str, Any]] = [("", settings)]
    for _ in range(MAX_DEPTH):
        below = []
        for key, value in level:
            place = ".".join(key.split(".")[:3])
            if isinstance(value, Mapping):
                below += [(f"{key}.{name}".lstrip("."), each) for name, each in value.items()]
            elif isinstance(value, list | tuple):
                below += [(key, each) for each in value]
            elif isinstance(value, int) and value.bit_length() > MAX_BITS:
                yield place, "a number in it is too long"
            elif isinstance(value, date | time):
                # Other processes would be given text.
                why = f"wants no date or time of TOML, got {value}: put it in double quotes"
                yield place, f"{why}, as text"
            elif any("\ud800" <= letter <= "\udfff" for letter in f"{key}{value}"):
                yield place, "wants text in UTF-8"
        level = below
    if level:
        yield ".".join(level[0][0].split(".")[:3]), f"is nested more than {MAX_DEPTH} deep"


def _read_toml(path: Path) -> dict[str, Any]:
    text = ""
    try:
        data = path.read_bytes()
        # No TOML in UTF-8 has it, and any in the others has.
        if b"\0" in data:
            encoding = "UTF-32" if b"\0\0\0" in data else "UTF-16"
            raise ValueError(f"it seems to be in {encoding}, and has to be in UTF-8")
        return tomllib.loads(text := data.decode("utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot read this config file: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        why = f"{why_unreadable(error)}{_line_at_fault(error, text)}"
        raise ConfigError(f"{path}: not a valid TOML file: {why}") from None


def _line_at_fault(error: Exception, text: str) -> str:
    found = re.search(r"\(at line (\d+)", str(error))
    if found is None:
        return ""
    line = text.split("\n")[int(found[1]) - 1].strip()
    is_value = "Invalid value" in str(error)
    hint = "; text wants double quotes, and TOML has true, false and no none" if is_value else ""
    return f": {line[:MAX_SHOWN]}{hint}"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        settings = json.loads(path.read_bytes())["config"]
    except OSError as error:
        raise ConfigError(f"{path}: cannot read this config file: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, RecursionError):
        settings = None
    if not isinstance(settings, dict):
        raise ConfigError(f"{path}: is not the config.json of a run, nor a TOML file")
    return settings


def _dotted_keys(settings: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """All keys, each after the one that it lies in; of those that lie too deep none."""
    for key, value in settings.items():
        yield prefix + key
        if isinstance(value, dict) and prefix.count(".") < MAX_DEPTH:
            yield from _dotted_keys(value, f"{prefix}{key}.")


def _apply_override(settings: dict[str, Any], override: str) -> str:
    """Write one `section.key=value` into the nested settings; return its dotted key."""
    key, equals, text = override.partition("=")
    key, text = key.strip(), text.strip()
    if not equals or not all(key.split(".")):
        raise ConfigError(
            f"{COMMAND_LINE}: {override!r} is not of the form section.key=value, "
            "for example learner.num_passes=2"
        )
    value = _parse_value(text)
    if value == text and key.split(".")[:2] in FREE_FORM and _is_hardly_text(text):
        raise ConfigError(
            f"{COMMAND_LINE}: {key}: wants a value as TOML has it, such as true, 0.5, [1, 2] or "
            f"{{size = 5}}, or none, got {shown(text)}; if it is meant as text, put double quotes "
            "within single ones"
        )
    *parents, leaf = key.split(".")
    for parent in parents:
        inner = settings.get(parent, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{COMMAND_LINE}: {key}: {parent} is a value, without keys")
        # A copy: the settings that were given stay as they are.
        settings[parent] = dict(inner)
        settings = settings[parent]
    settings[leaf] = value
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


def _is_hardly_text(text: str) -> bool:
    """Whether TOML does not read it and it was meant as something else, as `True` or `.5` are.

    Keys of ours have a type that tells; the arguments of environments and wrappers have none.
    """
    try:
        float(text)
    except ValueError:
        return text[:1] in ("[", "{") or text.lower() in ("true", "false")
    return True
