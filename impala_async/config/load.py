"""Reading a config: a TOML file, or the `config.json` of a run, then `--set section.key=value`
overrides, then validation.

Unknown keys are refused with a suggestion; every error names its source, the dotted key, the
value and what is wanted, and all mistakes are told at once.
"""

import copy
import json
import re
import tomllib
import typing
from collections.abc import Iterable, Iterator, Mapping
from datetime import date, time
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, NamedTuple, NoReturn

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from impala_async.config.bind import like_url
from impala_async.config.keys import fields_of, is_section, key_like
from impala_async.config.run import DECIDED_BY_LOCKSTEP, RunConfig
from impala_async.errors import ConfigError
from impala_async.files import why_unreadable

COMMAND_LINE = "--set"
# Where values have no type of ours.
FREE_FORM = (["env"], ["env", "kwargs"], ["env", "wrappers"])
MAX_SHOWN = 200
# Beyond these Python gives up, at one place or another.
MAX_DEPTH, MAX_BITS = 50, 10_000
# The key that says most in a section, which a value for the section itself is meant for.
NAMED_BY = {"env": "id", "algorithm": "name", "model": "name", "pace": "mode", "bind": "data"}


class Merged(NamedTuple):
    """Settings, where each overridden key came from, and which overrides make no sense."""

    settings: dict[str, Any]
    sources: dict[str, str]
    mistakes: list[str]


def load_config(path: Path | None = None, overrides: Iterable[str] = ()) -> RunConfig:
    """Read a config file, apply `section.key=value` overrides, validate.

    Raises:
        ConfigError: with one line per mistake.
    """
    if path is not None and path.suffix == ".json":
        # It holds all keys, also those that nobody has set: none of them is a mistake of the file.
        return validate_config(*merge_overrides(_read_json(path), overrides, path))
    from_file = {} if path is None else _read_toml(path)
    settings, sources, mistakes = merge_overrides(from_file, overrides)
    # A value that replaced a whole section of the file is no mistake of the file.
    in_file = {key: str(path) for key in _dotted_keys(from_file) if _is_at(settings, key)}
    if path is not None:
        in_file[""] = str(path)  # what it lacks
    return validate_config(settings, in_file | sources, mistakes)


def merge_overrides(
    settings: Mapping[str, Any], overrides: Iterable[str], path: Path | None = None
) -> Merged:
    """Settings with `section.key=value` overrides; one that makes no sense changes nothing.

    A mistake that is not of these is of the file at `path`.
    """
    _check_shape(settings, str(path or "config"))
    merged = Merged(copy.deepcopy(dict(settings)), {"": str(path)} if path else {}, [])
    for override in overrides:
        try:
            merged.sources[_apply_override(merged.settings, override)] = COMMAND_LINE
        except ConfigError as error:
            merged.mistakes.append(str(error))
    return merged


def validate_config(
    settings: Mapping[str, Any],
    sources: Mapping[str, str] | None = None,
    mistakes: Iterable[str] = (),
) -> RunConfig:
    """Turn nested settings into a config, or say in one line each what is wrong with them.

    `mistakes` are those that were found before, to be told with the others.
    """
    _check_shape(settings, (sources or {}).get("", "config"))
    lines = list(mistakes)
    try:
        config = RunConfig.model_validate(settings)
        if config.pace.is_lockstep:
            lines += _idle_keys(settings, sources or {})
        lines += _steps_without_learning(config, sources or {})
        lines += _dates(settings, sources or {})
    except ValidationError as error:
        lines += [_explain(dict(detail), sources or {}) for detail in error.errors()]
    if lines:
        raise ConfigError("\n".join(lines))
    return config


def _idle_keys(settings: Mapping[str, Any], sources: Mapping[str, str]) -> Iterator[str]:
    """Name the keys that do nothing in lockstep and were set beside it, or on the command line.

    By their sources and not by their values: a preset's are passed over, and a resolved config
    holds all keys.
    """

    def source_of(key: str) -> str | None:
        return sources.get(key, sources.get(key.partition(".")[0]))

    for key in DECIDED_BY_LOCKSTEP:
        source = source_of(key)
        if _is_at(settings, key) and source in {COMMAND_LINE, source_of("pace.mode")} - {None}:
            yield f"{source}: {key}: does nothing with pace.mode lockstep: drop it"


def _steps_without_learning(config: RunConfig, sources: Mapping[str, str]) -> Iterator[str]:
    """A rate of 0 before the end, if both were set in one place; else a warning says so."""
    end, zero_at = config.stop.env_steps, config.idle_from
    source, other = (sources.get(key) for key in ("stop.env_steps", "algorithm.schedule_env_steps"))
    if end is not None and zero_at is not None and source == other is not None:
        yield (
            f"{source}: algorithm.schedule_env_steps ({zero_at}) ends at a rate of 0 "
            f"(algorithm.lr_end), before stop.env_steps ({end}): nothing would be learned in "
            "between: set both to the same, or algorithm.lr_end over 0"
        )


def _dates(value: object, sources: Mapping[str, str], key: str = "") -> Iterator[str]:
    """Name those among the arguments of foreign code: other processes would be given text."""
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield from _dates(each, sources, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for each in value:
            # No key leads into a list.
            inner = list(each.values()) if isinstance(each, Mapping) else each
            yield from _dates(inner, sources, key)
    elif isinstance(value, date | time):
        yield (
            f"{_source(key, sources)}: {key}: wants no date or time of TOML, got {value}: put it "
            "in double quotes, as text"
        )


def _read_toml(path: Path) -> dict[str, Any]:
    text = ""
    try:
        data = path.read_bytes()
        # No TOML in UTF-8 has it, and any in the others has.
        if b"\0" in data:
            encoding = "UTF-32" if b"\0\0\0" in data else "UTF-16"
            raise ValueError(f"it seems to be in {encoding}, and has to be in UTF-8")
        settings = tomllib.loads(text := data.decode("utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot read this config file: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        why = f"{why_unreadable(error)}{_place(error, text)}"
        raise ConfigError(f"{path}: not a valid TOML file: {why}") from None
    _check_shape(settings, str(path))
    return settings


def _place(error: Exception, text: str) -> str:
    """The line where a TOML file is at fault, and what is mostly wrong with one."""
    found = re.search(r"\(at line (\d+), column (\d+)\)", str(error))
    if found is None:
        return ""
    line = text.split("\n")[int(found[1]) - 1].rstrip()
    value = re.match(r"[^\s,;#\]}\"']+", line[int(found[2]) - 1 :])
    hint = ""
    if value is not None and "Invalid value" in str(error):
        word = value[0].lower()
        hint = f"; text wants quotes: {_shown(value[0])}"
        if word in ("true", "false"):
            hint = f"; TOML has {word}"
        elif word in ("none", "null"):
            hint = "; TOML has no such value: leave the key out, or use --set"
    return f": {line.strip()[:MAX_SHOWN]}{hint}"


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


def _check_shape(settings: Mapping[str, Any], source: str) -> None:
    """Raise ConfigError for what could not be written down again, or not without trouble."""

    def refuse(key: str, why: str) -> NoReturn:
        key = ".".join(key.split(".")[:3])
        raise ConfigError(f"{source}: {_shown(key)[1:-1]}: {why}")

    level: list[tuple[str, Any]] = [("", settings)]
    for _ in range(MAX_DEPTH):
        below = []
        for key, value in level:
            if isinstance(value, Mapping):
                below += [(f"{key}.{name}".lstrip("."), each) for name, each in value.items()]
            elif isinstance(value, list | tuple):
                below += [(key, each) for each in value]
            elif isinstance(value, int) and value.bit_length() > MAX_BITS:
                refuse(key, "a number in it is too long")
            elif any("\ud800" <= letter <= "\udfff" for letter in f"{key}{value}"):
                refuse(key, "wants text in UTF-8")
        level = below
    if level:
        refuse(level[0][0], f"is nested more than {MAX_DEPTH} deep")


def _dotted_keys(settings: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in settings.items():
        yield prefix + key
        if isinstance(value, dict):
            yield from _dotted_keys(value, f"{prefix}{key}.")


def _is_at(settings: Mapping[str, Any], dotted: str) -> bool:
    found: Any = settings
    for part in dotted.split("."):
        if not isinstance(found, dict) or part not in found:
            return False
        found = found[part]
    return True


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
    text = text.strip()
    value = _parse_value(text)
    _check_shape({".".join(key.split(".")[:2]): [value]}, COMMAND_LINE)
    if len(parents) >= MAX_DEPTH:
        raise ConfigError(f"{COMMAND_LINE}: {_shown(key)}: has more than {MAX_DEPTH} parts")
    for parent in parents:
        settings = settings.setdefault(parent, {})
        if not isinstance(settings, dict):
            raise ConfigError(f"{COMMAND_LINE}: {key}: {parent} is a value, without keys")
    if key.split(".")[:2] in FREE_FORM and (value == text or text == "None"):
        _refuse_mistaken(key, text)
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


def _refuse_mistaken(key: str, text: str) -> None:
    """Raise for what TOML cannot read, was no text, and would reach foreign code as one.

    Keys of ours have a type that tells; the arguments of environments and wrappers have none.
    """
    if text[:1] in ("[", "{"):
        wanted = "a list or table as TOML has it, with true and false, and without None"
    elif text == "None":
        wanted = "none"
    elif text.lower() in ("true", "false"):
        wanted = f"{text.lower()}, as TOML has it"
    else:
        try:
            wanted = f"{float(text)!r}, as TOML has it"
        except ValueError:
            return
    raise ConfigError(
        f"{COMMAND_LINE}: {key}: wants {wanted}, got {_shown(text)}; "
        "if it is meant as text, put double quotes within single ones"
    )


def _explain(detail: dict[str, Any], sources: Mapping[str, str]) -> str:
    """A line for each mistake: source, dotted key, what it got, what it wants."""
    named = [part for part in detail["loc"] if isinstance(part, str)]
    key = ".".join(named)
    source = _source(key, sources)
    if detail["type"] == "extra_forbidden":
        within = next(iter(detail["input"]), "") if isinstance(detail["input"], dict) else ""
        meant = key_like(key) or key_like(f"{key}.{within}")
        return f"{source}: {key}: unknown key" + (f"; did you mean {meant}?" if meant else "")
    if detail["type"] == "missing":
        has_file = source not in ("config", COMMAND_LINE)
        other = 'id = "CartPole-v1" in its section [env]' if has_file else "--config FILE"
        hint = f" (for example --set env.id=CartPole-v1, or {other})" if "env" in key else ""
        return f"{source}: {'env.id' if key == 'env' else key}: required{hint}"
    if detail["type"] == "value_error":
        message = detail["msg"].removeprefix("Value error, ")
        place = f"{source}: {key}: " if key else f"{source}: "
        return "\n".join(place + line for line in message.splitlines())
    item = "".join(f"[{part}]" for part in detail["loc"] if isinstance(part, int))
    wanted = _wanted_at(key, is_item=bool(item)) or detail["msg"]
    got = _shown(detail["input"])
    if key == "bind" or (key in NAMED_BY and isinstance(detail["input"], str)):
        value = str(detail["input"])
        if key == "bind":
            value = like_url(value) or "tcp://HOST:PORT"
        got += f"; did you mean {key}.{NAMED_BY[key]}={value}?"
    return f"{source}: {key}{item}: {wanted}, got {got}"


def _source(key: str, sources: Mapping[str, str]) -> str:
    """Where a key was set; where anything below it was, if a whole section is at fault."""
    if key and key in sources and not any(k.startswith(f"{key}.") for k in sources):
        return sources[key]
    below = {source for k, source in sources.items() if not key or k.startswith(f"{key}.")}
    anywhere = sources.get("", "config")
    return " and ".join(sorted(below)) or sources.get(key.rpartition(".")[0], anywhere)


def _wanted_at(key: str, *, is_item: bool) -> str | None:
    """Say what a key takes, in a user's words; None for one that is not ours."""
    field = dict(fields_of(RunConfig)).get(key)
    if field is None:
        return None
    if is_item:
        list_of = _without_none(field.annotation)
        return f"wants {_wanted(typing.get_args(list_of)[0], field)}"
    return f"wants {_wanted(field.annotation, field)}"


def _wanted(kind: Any, field: FieldInfo) -> str:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if _without_none(kind) is not kind:
        return f"{_wanted(_without_none(kind), field)}, or none"
    if origin is typing.Literal:
        *others, last = args
        return f"{', '.join(others)} or {last}" if others else str(last)
    if origin is tuple:
        example = ["main", "past"] if args[0] is str else [64, 64]
        return f"a list, for example {json.dumps(field.default or example)}"
    if is_section(kind):
        return "keys of its own, not a value"
    if kind is str:
        return "text that is not empty" if field.metadata else "text"
    if kind is int or kind is float:
        return ("a whole number" if kind is int else "a number") + _range(field)
    if kind is bool:
        return "true or false"
    entry = '{past = "main"}' if str in args[1:] else "{size = 5}"
    return f"a table, for example {entry}"


def _without_none(kind: Any) -> Any:
    """The other kind of those that may also be none; any other as it is."""
    if typing.get_origin(kind) not in (UnionType, typing.Union):
        return kind
    (inner,) = (arg for arg in typing.get_args(kind) if arg is not NoneType)
    return inner


def _range(field: FieldInfo) -> str:
    """The bounds of a number, as far as it has any."""
    bounds = {
        name: getattr(bound, name)
        for bound in field.metadata
        for name in ("ge", "gt", "le", "lt")
        if hasattr(bound, name)
    }
    words = {"ge": "from", "gt": "over", "le": "to", "lt": "below"}
    # Beyond such a bound is no number that anybody means.
    told = {name: bound for name, bound in bounds.items() if abs(bound) < 1e30}
    text = "".join(f" {words[name]} {bound}" for name, bound in told.items())
    return f"{text} up" if told.keys() == {"ge"} else text


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    text = json.dumps(value, default=str)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
