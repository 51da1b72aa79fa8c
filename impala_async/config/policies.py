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

    names: tuple[str, ...] = ()
    """Two or more; empty: one for all agents."""
    mapping: str = SHUFFLED
    """Who plays whom in an episode: shuffled, at random, or your own package.module:function."""
    train: tuple[str, ...] | None = None
    """Those that learn; none: all that are no copies."""
    copies: dict[str, str] = Field(default_factory=dict)
    """Frozen copies, each with the policy it is taken from."""
    copy_every_updates: int | None = Field(None, ge=1)
    """Updates of its source after which a copy is taken anew; here each part of a pass is one, in
    lockstep too."""

    @property
    def trained(self) -> tuple[str, ...]:
        learning = {*self.names} - {*self.copies} if self.train is None else self.train
        return tuple(name for name in self.names if name in learning)

    def broken_rules(self) -> Iterator[str]:
        names = self.names
        if not names:
            return
        is_odd = not all(re.fullmatch(r"[A-Za-z0-9_-]+", name) for name in names)
        if is_odd or not 2 <= len(set(names)) == len(names) <= MAX_POLICIES:
            single = ": a single policy for all agents needs no section policies"
            yield (
                f"names must be 2 to {MAX_POLICIES} that differ, of letters, digits, _ and -, got "
                f"{json.dumps(names)}{single * (len(names) == 1)}"
            )
            return  # the other keys would be blamed for these
        if self.mapping != SHUFFLED and NAME_OF_OWN.fullmatch(self.mapping) is None:
            yield f"mapping must be {SHUFFLED} or package.module:function, got {self.mapping!r}"
        free = [name for name in names if name not in self.copies]
        if self.train is not None and not 0 < len(self.train) == len({*self.train} & {*free}):
            yield (
                f"train must name each policy that learns once, of those that are no copies "
                f"({', '.join(free)}), got {json.dumps(self.train)}"
            )
        if not free:
            yield "copies: all policies are copies, and one at least must learn"
            return
        for name, source in self.copies.items():
            if name not in names or source not in self.trained:
                yield (
                    f"copies: {name!r} cannot be a copy of {source!r}: both must be of names, and "
                    f"the second learn, as {', '.join(self.trained)} does"
                )
        if self.copies and self.copy_every_updates is None:
            yield "copies must be taken anew from time to time: set copy_every_updates"


ONE_POLICY = PoliciesSection()
"""The policies of a run with one, which all agents share."""
