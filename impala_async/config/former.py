"""The keys and values of earlier releases, as run folders and recordings hold them.

What a run wrote down itself is read for as long as its folder lives; anybody else is told what
became of a key.
"""

from collections.abc import Mapping
from typing import Any

FORMER_KEYS = {"ingest.process": "the learner takes trajectories in on its own event loop"}
"""Each with the reason why it does nothing any more."""
FORMER_VALUES = {("actor.sampler", "central"): "parallel"}
"""Each with what it is called now."""


def up_to_date(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a run wrote down, with today's keys and values."""
    kept = dict(settings)
    for key in FORMER_KEYS:
        section, _, name = key.partition(".")
        keys = kept.get(section)
        if isinstance(keys, Mapping) and name in keys:
            kept[section] = {other: keys[other] for other in keys if other != name}
            if not kept[section]:
                del kept[section]
    for (key, former), today in FORMER_VALUES.items():
        section, _, name = key.partition(".")
        keys = kept.get(section)
        if isinstance(keys, Mapping) and keys.get(name) == former:
            kept[section] = {**keys, name: today}
    return kept
