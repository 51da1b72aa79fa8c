"""The base of every section of the config, and the types of what a user names by its module."""

import math
import re
from collections.abc import Collection, Iterator
from typing import Annotated, Any, Self, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

MOST_S = 1_000_000_000
"""No setting in seconds is larger: it is thirty years, and timers overflow at ten times that."""
NAME_OF_OWN = re.compile(r"[\w.]+:\w+")
"""A package.module:Name."""
MAX_DEPTH = 50
# The context of a validation that does not ask whether the rules between keys hold.
IS_DRAFT = {"is_draft": True}


class Section(BaseModel):
    """A frozen group of settings that refuses keys it does not know."""

    # No number here may be infinite, but some environments' arguments are, and reach them so.
    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, ser_json_inf_nan="constants"
    )

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_odd(cls, value: Any, info: ValidationInfo) -> Any:
        """pydantic reads true as 1, 1 as true and "1" as 1, which nobody means, and takes any
        number."""
        kinds = set(_within(cls.model_fields[str(info.field_name)].annotation))
        if value in (None, "none") and type(None) in kinds:
            return None  # a TOML file has only text for it
        items = value if isinstance(value, list) else [value]
        is_truth = any(isinstance(item, bool) for item in items)
        texts = {item for item in items if isinstance(item, str)}
        is_word = bool(texts) and texts <= kinds
        is_other = kinds & {bool, int, float} and is_truth != (bool in kinds) and not is_word
        is_text = kinds & {int, float} and str not in kinds and not texts <= kinds
        is_plain = all(_is_plain(item, 0) for item in items if isinstance(item, int | str))
        if is_other or is_text or not is_plain:
            raise ValueError  # without words: it is told as any value of a wrong type is
        return value

    @model_validator(mode="after")
    def _rules_hold(self, info: ValidationInfo) -> Self:
        if info.context != IS_DRAFT and (broken := list(self.broken_rules())):
            raise ValueError("\n".join(broken))
        return self

    def broken_rules(self) -> Iterator[str]:
        """Tell what is wrong between keys that are right one by one."""
        return iter(())


def _within(annotation: Any) -> Iterator[Any]:
    """An annotation and all those in it: `tuple[int, ...] | None` has an int."""
    yield annotation
    for inner in get_args(annotation):
        yield from _within(inner)


def _check_plain(value: Any) -> Any:
    """Arguments are written down, sent to actors and read again, and have to stay the same."""
    if not _is_plain(value, MAX_DEPTH):
        raise ValueError(
            "wants text in UTF-8, numbers (whole ones of 64 bits), true, false, lists and tables, "
            f"at most {MAX_DEPTH} deep; a date needs double quotes, as text"
        )
    return value


def _is_plain(value: Any, depth: int) -> bool:
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list | tuple):
        return depth > 0 and all(_is_plain(each, depth - 1) for each in value)
    if isinstance(value, str):
        return not any("\ud800" <= letter <= "\udfff" for letter in value)
    if isinstance(value, int):
        return value.bit_length() < 64
    return value is None or isinstance(value, float)


Kwargs = dict[
    Annotated[str, AfterValidator(_check_plain)], Annotated[Any, AfterValidator(_check_plain)]
]


def check_count(value: Any, most: float = math.inf) -> Any:
    """A whole number from 1 up, or auto."""
    if value != "auto" and not (type(value) is int and 1 <= value <= most):
        raise ValueError  # without words: it is told as any value of a wrong type is
    return value


class Named(Section):
    """Something that is made by its name, with keyword arguments; a name alone has none."""

    name: str = Field(min_length=1)
    kwargs: Kwargs = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, given: Any) -> Any:
        return {"name": given} if isinstance(given, str) else given


def unknown_name(key: str, name: str, known: Collection[str] = ()) -> Iterator[str]:
    """Complain of a name that is neither known nor that of a user's code."""
    if name not in known and NAME_OF_OWN.fullmatch(name) is None:
        ours = f"one of {', '.join(known)}, or " if known else ""
        yield f"{key} must be {ours}package.module:Name of your own, got {name!r}"
