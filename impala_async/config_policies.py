"""The `[policies]` section: which policies there are, who plays whom, who learns, and copies."""

import json
import re
from typing import Self

from pydantic import Field, model_validator

from impala_async.config_section import Section

SHUFFLED = "shuffled"
# They name tensors, and their numbers travel as a byte.
MAX_POLICIES = 64
_EXAMPLE = 'for example names = ["main", "past"]'


class PoliciesSection(Section):
    """Several policies for the agents of one environment. Without names all agents share one."""

    names: tuple[str, ...] = Field((), description="Two or more; empty: one for all agents.")
    mapping: str = Field(
        SHUFFLED,
        description="Who plays which agent, anew in each episode. shuffled: dealt in a random "
        "order. Or your own package.module:function.",
    )
    train: tuple[str, ...] | None = Field(
        None, description="Those that learn; none: all that are no copies."
    )
    copies: dict[str, str] = Field(
        default_factory=dict, description="Frozen copies, each with the policy it is taken from."
    )
    copy_every_updates: int | None = Field(
        None, ge=1, description="Updates of its source after which a copy is taken anew."
    )

    @property
    def trained(self) -> tuple[str, ...]:
        """Those that learn, in the order of `names`."""
        if self.train is None:
            return tuple(name for name in self.names if name not in self.copies)
        return tuple(name for name in self.names if name in self.train)

    @model_validator(mode="after")
    def _there_are_several(self) -> Self:
        names = self.names
        if not names:
            for key, field in type(self).model_fields.items():
                if getattr(self, key) != field.get_default(call_default_factory=True):
                    raise ValueError(f"{key} does nothing without names: set those, {_EXAMPLE}")
            return self
        if not 2 <= len(names) <= MAX_POLICIES:
            raise ValueError(
                f"names must be 2 to {MAX_POLICIES}, got {_shown(names)}: a single policy for all "
                f"agents needs no section policies, and several are named, {_EXAMPLE}"
            )
        odd = [name for name in names if not re.fullmatch(r"[A-Za-z0-9_-]+", name)]
        if odd:
            raise ValueError(f"names must be of letters, digits, _ and -, got {_shown(odd)}")
        if len(set(names)) < len(names):
            raise ValueError(f"names must differ, got {_shown(names)}")
        if self.mapping != SHUFFLED and not re.fullmatch(r"[\w.]+:\w+", self.mapping):
            raise ValueError(
                f"mapping must be {SHUFFLED} or package.module:function, got {self.mapping!r}"
            )
        return self

    @model_validator(mode="after")
    def _copies_have_sources(self) -> Self:
        self._check_known("copies", [*self.copies, *self.copies.values()])
        for name, source in self.copies.items():
            if source in self.copies:
                raise ValueError(
                    f"copies: {name!r} is to be a copy of {source!r}, which is a copy itself: name "
                    "a policy that is trained"
                )
        if self.copies and self.copy_every_updates is None:
            raise ValueError(
                "copies must be taken anew from time to time: set copy_every_updates, counted in "
                "updates of the source"
            )
        if self.copy_every_updates is not None and not self.copies:
            raise ValueError(
                f"copy_every_updates ({self.copy_every_updates}) does nothing without copies: drop "
                'it, or set copies, for example copies = {past = "main"}'
            )
        return self

    @model_validator(mode="after")
    def _somebody_learns(self) -> Self:
        if self.train is not None:
            self._check_known("train", self.train)
            if not self.train or len(set(self.train)) < len(self.train):
                raise ValueError(
                    f"train must name each policy that learns once, got {_shown(self.train)}: drop "
                    "it to train all that are no copies"
                )
            frozen = [name for name in self.train if name in self.copies]
            if frozen:
                raise ValueError(
                    f"train: {frozen[0]!r} is a copy of {self.copies[frozen[0]]!r} and is not "
                    "trained: drop it from train or from copies"
                )
        for name, source in self.copies.items():
            if source not in self.trained:
                raise ValueError(
                    f"copies: {name!r} is a copy of {source!r}, which never changes: add that to "
                    "train"
                )
        return self

    def _check_known(self, key: str, names: "tuple[str, ...] | list[str]") -> None:
        for name in names:
            if name not in self.names:
                raise ValueError(
                    f"{key}: {name!r} is none of names ({', '.join(self.names)}): add it there"
                )


ONE_POLICY = PoliciesSection()
"""Which all agents share."""


def _shown(names: "tuple[str, ...] | list[str]") -> str:
    return json.dumps(list(names))
