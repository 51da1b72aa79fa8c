"""The keys and values of earlier releases, as run folders and recordings hold them.

The settings that a run wrote down itself are read for as long as its folder lives; anybody else is
told what became of a key.
"""

import copy
from collections.abc import Mapping
from typing import Any

FORMER_KEYS = {
    "ingest.process": "the learner takes trajectories in on its own event loop",
    "learner.heartbeat_s": "it follows from learner.lease_s",
    "learner.starved_after_s": "it follows from learner.lease_s",
}
"""Each with the reason why it does nothing any more."""
MOVED_KEYS = {
    "algorithm.optimizer_eps": "algorithm.optimizer_options.eps",
    "algorithm.rms_decay": "algorithm.optimizer_options.decay",
    "algorithm.momentum": "algorithm.optimizer_options.momentum",
    "algorithm.weight_decay": "algorithm.optimizer_options.weight_decay",
}
"""Each with the place where it is today."""
FORMER_VALUES = {("actor.sampler", "central"): "parallel"}
"""Each with what it is called now."""
_NOTHING = object()


def up_to_date(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a run wrote down, with today's keys and values."""
    kept = copy.deepcopy(dict(settings))
    for key in FORMER_KEYS:
        _take(kept, key)
    for key, today in MOVED_KEYS.items():
        if (value := _take(kept, key)) is not _NOTHING:
            section, table, name = today.split(".")
            kept.setdefault(section, {}).setdefault(table, {})[name] = value
    for (key, former), today in FORMER_VALUES.items():
        section, _, name = key.partition(".")
        keys = kept.get(section)
        if isinstance(keys, dict) and keys.get(name) == former:
            keys[name] = today
    return kept


def _take(settings: dict[str, Any], key: str) -> Any:
    """Take a key out, and its section with the last one; `_NOTHING` if it is not there."""
    section, _, name = key.partition(".")
    keys = settings.get(section)
    if not isinstance(keys, dict) or name not in keys:
        return _NOTHING
    value = keys.pop(name)
    if not keys:
        del settings[section]
    return value
