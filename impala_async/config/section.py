"""The base of every section of the config, which tells which of its rules are broken."""

import json
import re
import typing
from collections.abc import Collection, Iterator
from typing import Annotated, Any, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

MOST_S = 1_000_000_000
"""No setting in seconds is larger: it is thirty years, and timers overflow at ten times that."""
NAME_OF_OWN = re.compile(r"[\w.]+:\w+")
"""A package.module:Name."""


class Section(BaseModel):
    """A frozen group of settings that refuses keys it does not know."""

    # No number here may be infinite, but some environments' arguments are, and reach them so.
    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, ser_json_inf_nan="constants"
    )

    @field_validator("*", mode="before")
    @classmethod
    def _truth_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """pydantic reads true as 1, which nobody means."""
        kinds = set(_within(cls.model_fields[str(info.field_name)].annotation))
        items = value if isinstance(value, list) else [value]
        if kinds & {int, float} and any(isinstance(item, bool) for item in items):
            wanted = "numbers" if isinstance(value, list) else "a number"
            raise ValueError(f"wants {wanted}, got {json.dumps(value)}")
        is_truth = value is None or isinstance(value, bool | list | dict)
        if kinds & {bool, str} == {bool} and not is_truth:
            raise ValueError(f"wants true or false, got {json.dumps(value, default=str)}")
        return value

    @model_validator(mode="after")
    def _rules_hold(self) -> Self:
        """One line for each that does not, so that all are told in one go."""
        if broken := list(self.broken_rules()):
            raise ValueError("\n".join(broken))
        return self

    def broken_rules(self) -> Iterator[str]:
        """Tell what is wrong between keys that are right one by one."""
        return iter(())

    def idle(
        self, key: str, choice: str, chosen: str | None, names: Collection[str] = ()
    ) -> Iterator[str]:
        """Complain of a key that is set, and does something only where `choice` is one of `names`.

        Without names the choice has to be set at all.
        """
        field, value = type(self).model_fields[key], getattr(self, key)
        if chosen not in names and value != field.get_default(call_default_factory=True):
            fix = f"{choice} = {' or '.join(names)}" if names else choice
            yield (
                f"{key} ({value}) does nothing where {choice} is {chosen or 'none'}: drop it, or "
                f"set {fix}"
            )


def unknown_name(key: str, name: str, known: Collection[str] = ()) -> Iterator[str]:
    """Complain of a name that is neither known nor that of a user's code."""
    if name not in known and NAME_OF_OWN.fullmatch(name) is None:
        ours = f"one of {', '.join(known)}, or " if known else ""
        yield f"{key} must be {ours}package.module:Name of your own, got {name!r}"


class Named(Section):
    """Something that is made by its name, with keyword arguments."""

    name: str = Field(min_length=1)
    kwargs: dict[str, Any] = Field(default_factory=dict)


def _read_named(given: Any) -> tuple[Named, ...]:
    """A list of names, or of tables with name and kwargs; a name alone has no arguments."""
    try:
        if isinstance(given, str):
            raise TypeError
        return tuple(
            Named.model_validate({"name": one} if isinstance(one, str) else one) for one in given
        )
    except (TypeError, ValidationError):
        example = '["package.module:Name"] or [{name = "package.module:Name", kwargs = {size = 5}}]'
        raise ValueError(
            f"wants a list, for example {example}, got {json.dumps(given, default=str)}"
        ) from None


NamedList = Annotated[tuple[Named, ...], BeforeValidator(_read_named)]


def _within(annotation: Any) -> Iterator[Any]:
    """An annotation and all those in it: `tuple[int, ...] | None` has an int."""
    yield annotation
    for inner in typing.get_args(annotation):
        yield from _within(inner)
