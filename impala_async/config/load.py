"""Reading a config: a TOML file, or the `config.json` of a run, then `--set section.key=value`.

All mistakes are told at once, each with its source, the dotted key, the value and what is wanted.
"""

import contextlib
import errno
import json
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from impala_async.config.mistakes import explain, shown, source_of
from impala_async.config.packaged import packaged_configs
from impala_async.config.run import RunConfig
from impala_async.config.section import IS_DRAFT
from impala_async.errors import CheckpointError, ConfigError
from impala_async.files import find_bytes

COMMAND_LINE = "--set"
DECIDED_BY_LOCKSTEP = ("learner.max_lag", "learner.queue_size")


def load_config(path: Path | None = None, overrides: Iterable[str] = ()) -> RunConfig:
    """Read a config file, apply `section.key=value` overrides, validate; raises ConfigError."""
    settings = {} if path is None else _read(path)
    keys = [] if path is None else [""]
    # A config.json holds all keys, also those that nobody has set: none is a mistake of the file.
    if path is not None and path.suffix != ".json":
        sections = {key: value for key, value in settings.items() if isinstance(value, dict)}
        keys += [f"{section}.{key}" for section, value in sections.items() for key in value]
    merged, sources, mistakes = merge_overrides(settings, overrides, dict.fromkeys(keys, str(path)))
    # The file alone may have no environment.
    before = _idle_in({**settings, "env": merged.get("env")})
    # A key of the file that has nothing to do beside the overrides is passed over, and then those
    # that have nothing to do without that key.
    while before is not None and (idle := (_idle_in(merged) or set()) - before):
        given = [key for key in idle if source_of(key, sources) != COMMAND_LINE]
        if not given:
            break
        for key in given:
            merged = _without(merged, key.split("."))
    return validate_config(merged, sources, mistakes)


def _idle_in(settings: Mapping[str, Any]) -> set[str] | None:
    """The keys that have nothing to do; None where the settings are none."""
    try:
        config = RunConfig.model_validate(settings, context=IS_DRAFT)
    except ValidationError:  # its mistakes are told later
        return None
    return {key for key, _ in config.idle_keys()}


def _without(settings: Mapping[str, Any], path: Sequence[str]) -> dict[str, Any]:
    first, *rest = path
    if not rest:
        return {key: value for key, value in settings.items() if key != first}
    inner = settings.get(first)
    changed = {first: _without(inner, rest)} if isinstance(inner, dict) else {}
    return {**settings, **changed}


def merge_overrides(
    settings: Mapping[str, Any], overrides: Iterable[str], sources: Mapping[str, str] | None = None
) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """Settings, which stay as they are, with overrides; where each key came from, as `sources` says
    of the settings (that of "" is of all the others); and which overrides make no sense."""
    merged, sources, mistakes = dict(settings), dict(sources or {}), []
    for override in overrides:
        try:
            key = _apply_override(merged, override)
        except ConfigError as error:
            mistakes.append(f"{COMMAND_LINE}: {error}")
            continue
        # A value that replaced a whole section is no mistake of where that came from.
        for below in [each for each in sources if each.startswith(f"{key}.")]:
            del sources[below]
        sources[key] = COMMAND_LINE
    return merged, sources, mistakes


def sets(overrides: Iterable[str], key: str) -> bool:
    """Whether these set this key by themselves, or the whole of its section with it."""
    section, _, name = key.partition(".")
    found = merge_overrides({}, overrides)[0]
    keys = found.get(section)
    return section in found if not name else isinstance(keys, dict) and name in keys


def validate_config(
    settings: Mapping[str, Any],
    sources: Mapping[str, str] | None = None,
    mistakes: Iterable[str] = (),
) -> RunConfig:
    """The config of nested settings; ConfigError with a line for each mistake, former ones too."""
    sources, lines = sources or {}, list(mistakes)
    try:
        config = RunConfig.model_validate(settings)
        if config.pace.is_lockstep:
            lines += _idle_in_lockstep(settings, sources)
    except ValidationError as error:
        lines += [line for each in error.errors() for line in explain(dict(each), sources)]
    if lines:
        raise ConfigError("\n".join(lines))
    return config


def _idle_in_lockstep(settings: Mapping[str, Any], sources: Mapping[str, str]) -> Iterator[str]:
    """Name the keys that do nothing in lockstep and were set beside it, or on the command line: a
    preset's are passed over, and a resolved config holds all keys."""
    beside = {COMMAND_LINE, sources.get("pace.mode", sources.get("pace"))}
    for key in DECIDED_BY_LOCKSTEP:
        section, _, name = key.partition(".")
        source = sources.get(key, sources.get(section))
        if source in beside and name in settings.get(section, {}) and source is not None:
            yield f"{source}: {key}: does nothing with pace.mode lockstep: drop it"


def _read(path: Path) -> dict[str, Any]:
    try:
        data = find_bytes(path)
        if data is None:
            gone = f"{path}: cannot read this config file: {os.strerror(errno.ENOENT)}"
            # It may be meant as the name of one that is packaged.
            names = f"; configs by name are {', '.join(packaged_configs())}"
            raise ConfigError(gone + (names if path.name == str(path.with_suffix("")) else ""))
        text = data.decode("utf-8-sig")
        if path.suffix != ".json":
            return tomllib.loads(text)
        content = json.loads(text)
        return without_decided(dict(content["config"]), content.get("decided", {}))
    except CheckpointError as error:
        raise ConfigError(str(error)) from None
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        if path.suffix == ".json":
            raise ConfigError(f"{path}: is not the config.json of a run") from None
        why = str(error)
        if "Invalid value" in why:
            why += '; text wants double quotes, and TOML has true, false and, for settings, "none"'
        raise ConfigError(f"{path}: not a valid TOML file: {why}") from None


def without_decided(settings: dict[str, Any], decided: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run without those that were decided, which a new run decides anew."""
    for key, value in decided.items():
        section, _, name = key.partition(".")
        keys = settings.get(section)
        if isinstance(keys, dict) and keys.get(name) == value:  # else somebody has changed it
            del keys[name]
    return settings


def _apply_override(settings: dict[str, Any], override: str) -> str:
    key, equals, text = override.partition("=")
    key, text = key.strip(), text.strip()
    if not equals or not all(key.split(".")):
        form = "section.key=value, for example learner.num_passes=2"
        raise ConfigError(f"{override!r} is not of the form {form}")
    value = _parse_value(key, text)
    *parents, leaf = key.split(".")
    for parent in parents:
        inner = settings.get(parent, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{key}: {parent} is a value, without keys")
        # A copy: the settings that were given stay as they are.
        settings[parent] = dict(inner)
        settings = settings[parent]
    settings[leaf] = value
    return key


def _parse_value(key: str, text: str) -> Any:
    """Read a value as TOML does, or `none`; what else looks like text is text."""
    if text.lower() in {"none", "null"}:
        return None
    with contextlib.suppress(ValueError, RecursionError):
        parsed = tomllib.loads(f"value = {text}")
        tomllib.loads(f"value = [{text}]")  # a comment would lose what is behind its sign
        if len(parsed) == 1:
            return parsed["value"]
    try:
        float(text)
    except ValueError:
        if text[:1] not in ("[", "{") and text.lower() not in ("true", "false"):
            return text
    raise ConfigError(
        f"{key}: wants a value as TOML has it, such as true, 0.5, [1, 2] or {{size = 5}}, or none, "
        f"got {shown(text)}; if it is meant as text, put double quotes within single ones"
    )


def by_key(config: BaseModel, *, exclude_unset: bool = False) -> dict[str, Any]:
    """The value of each key."""
    found = dict[str, Any]()
    dumped = config.model_dump(mode="json", by_alias=True, exclude_unset=exclude_unset)
    for section, keys in dumped.items():
        inner = keys if isinstance(keys, dict) else {"": keys}
        found |= {f"{section}.{name}".rstrip("."): value for name, value in inner.items()}
    return found
