"""The `[policies]` section: which policies there are, who plays whom, who learns, and copies."""

import json
import re
from collections.abc import Iterator

from pydantic import Field

from impala_async.config.section import NAME_OF_OWN, Section

SHUFFLED = "shuffled"
# They name tensors, and their numbers travel as a byte.
MAX_POLICIES = 64


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

    def broken_rules(self) -> Iterator[str]:
        if not self.names:
            for key in type(self).model_fields:
                yield from self.idle(key, "names", None)
            return
        # Keys that refer to names would be blamed for names that are wrong themselves.
        yield from list(self._broken_names()) or [*self._broken_copies(), *self._broken_train()]

    def _broken_names(self) -> Iterator[str]:
        names = self.names
        if not 2 <= len(names) <= MAX_POLICIES:
            yield (
                f"names must be 2 to {MAX_POLICIES}, got {_shown(names)}: a single policy for all "
                "agents needs no section policies"
            )
        odd = [name for name in names if not re.fullmatch(r"[A-Za-z0-9_-]+", name)]
        if odd:
            yield f"names must be of letters, digits, _ and -, got {_shown(odd)}"
        if len(set(names)) < len(names):
            yield f"names must differ, got {_shown(names)}"
        if self.mapping != SHUFFLED and NAME_OF_OWN.fullmatch(self.mapping) is None:
            yield f"mapping must be {SHUFFLED} or package.module:function, got {self.mapping!r}"

    def _broken_copies(self) -> Iterator[str]:
        yield from self._unknown("copies", [*self.copies, *self.copies.values()])
        for name, source in self.copies.items():
            if source in self.copies:
                yield (
                    f"copies: {name!r} is to be a copy of {source!r}, which is a copy itself: name "
                    "a policy that is trained"
                )
            elif source in self.names and source not in self.trained:
                yield (
                    f"copies: {name!r} is a copy of {source!r}, which never changes: add that to "
                    "train"
                )
        if self.copies and self.copy_every_updates is None:
            yield (
                "copies must be taken anew from time to time: set copy_every_updates, counted in "
                "updates of the source"
            )
        if not self.copies:
            yield from self.idle("copy_every_updates", "copies", None)

    def _broken_train(self) -> Iterator[str]:
        if self.train is None:
            return
        yield from self._unknown("train", self.train)
        if not self.train or len(set(self.train)) < len(self.train):
            yield (
                f"train must name each policy that learns once, got {_shown(self.train)}: drop "
                "it to train all that are no copies"
            )
        for name in self.train:
            if name in self.copies:
                yield (
                    f"train: {name!r} is a copy of {self.copies[name]!r} and is not trained: drop "
                    "it from train or from copies"
                )

    def _unknown(self, key: str, names: "tuple[str, ...] | list[str]") -> Iterator[str]:
        for name in names:
            if name not in self.names:
                yield f"{key}: {name!r} is none of names ({', '.join(self.names)}): add it there"


ONE_POLICY = PoliciesSection()
"""Which all agents share."""


def _shown(names: "tuple[str, ...] | list[str]") -> str:
    return json.dumps(list(names))
