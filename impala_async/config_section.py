"""What every section of the config is."""

import json
import typing
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator


class Section(BaseModel):
    """A frozen group of settings that refuses keys it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _truth_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """pydantic reads true as 1, which nobody means."""
        kind = cls.model_fields[str(info.field_name)].annotation
        takes_numbers = {int, float} & {kind, *typing.get_args(kind)}
        items = value if isinstance(value, list) else [value]
        if takes_numbers and any(isinstance(item, bool) for item in items):
            wanted = "numbers" if isinstance(value, list) else "a number"
            raise ValueError(f"wants {wanted}, got {json.dumps(value)}")
        return value
