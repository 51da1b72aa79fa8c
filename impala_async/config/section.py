"""The base of every section of the config, which tells which of its rules are broken."""

import json
import re
import typing
from collections.abc import Iterator
from typing import Any, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

MOST_S = 1_000_000_000
"""No setting in seconds is larger: it is thirty years, and timers overflow at ten times that."""


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
        kind = cls.model_fields[str(info.field_name)].annotation
        takes_numbers = {int, float} & set(_within(kind))
        items = value if isinstance(value, list) else [value]
        if takes_numbers and any(isinstance(item, bool) for item in items):
            wanted = "numbers" if isinstance(value, list) else "a number"
            raise ValueError(f"wants {wanted}, got {json.dumps(value)}")
        takes_truth = {bool, str} & set(_within(kind)) == {bool}
        if takes_truth and isinstance(value, int | float | str) and not isinstance(value, bool):
            raise ValueError(f"wants true or false, got {json.dumps(value)}")
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


class Named(Section):
    """Something that is made by its name, with keyword arguments."""

    name: str = Field(min_length=1)
    kwargs: dict[str, Any] = Field(default_factory=dict)


NAME_OF_OWN = re.compile(r"[\w.]+:\w+")
"""A package.module:Name."""


def read_named(given: Any, example: str) -> tuple[Named, ...]:
    """A list of names, or of tables with name and kwargs; a name alone has no arguments."""
    try:
        if isinstance(given, str):
            raise TypeError
        return tuple(
            Named.model_validate({"name": one} if isinstance(one, str) else one) for one in given
        )
    except (TypeError, ValidationError):
        raise ValueError(
            f"wants a list, for example {example}, got {json.dumps(given, default=str)}"
        ) from None


def _within(annotation: Any) -> Iterator[Any]:
    """An annotation and all those in it: `tuple[int, ...] | None` has an int."""
    yield annotation
    for inner in typing.get_args(annotation):
        yield from _within(inner)
