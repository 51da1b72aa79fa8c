"""How a policy did: a row for each seed and policy, in words and as JSON."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from impala_async.config.policies import PoliciesSection
from impala_async.evaluation.play import Episode
from impala_async.metrics.report import format_return


def mean_return(episodes: Sequence[Episode]) -> float | None:
    return fmean(each.total for each in episodes) if episodes else None


def standard_error(episodes: Sequence[Episode]) -> float | None:
    """The deviation of the mean, as far as the episodes tell; one alone tells nothing."""
    if len(episodes) < 2:
        return None
    return stdev(each.total for each in episodes) / math.sqrt(len(episodes))


@dataclass(frozen=True)
class Row:
    """Episodes of one seed, or of all (None), with one policy of a team, or the only one (None)."""

    seed: int | None
    policy: str | None
    episodes: Sequence[Episode]

    def as_json(self) -> dict[str, Any]:
        returns = [each.total for each in self.episodes]
        return {
            "seed": self.seed,
            "policy": self.policy,
            "num_episodes": len(returns),
            "mean_return": mean_return(self.episodes),
            "standard_error": standard_error(self.episodes),
            "smallest": min(returns),
            "largest": max(returns),
            "mean_length": fmean(each.length for each in self.episodes),
        }

    def describe(self, actions: str) -> str:
        found, who = self.as_json(), f"{self.policy}: " if self.policy else ""
        num, plural = len(self.episodes), "s" * (len(self.episodes) != 1)
        mean, error, smallest, largest = (
            format_return(found[name])
            for name in ("mean_return", "standard_error", "smallest", "largest")
        )
        if self.seed is not None:
            who = f"seed {self.seed}: {who}"
        return (
            f"{who}mean return of {num} {actions} episode{plural}: {mean}\n"
            f"{who}smallest {smallest}, largest {largest}, standard error {error}"
        )


def rows_of(episodes: Sequence[Episode], policies: PoliciesSection) -> list[Row]:
    """A row for each seed, where there are several, and one for all; in a team, for each policy."""
    names: Sequence[str | None] = policies.names or [None]
    seeds: list[int | None] = list(dict.fromkeys(each.seed for each in episodes))
    rows = []
    for seed in [*seeds, None] if len(seeds) > 1 else [None]:
        for number, name in enumerate(names):
            mine = [e for e in episodes if e.policy == number and seed in (None, e.seed)]
            if mine:
                rows.append(Row(seed, name, mine))
    return rows


def as_json(episodes: Sequence[Episode], policies: PoliciesSection) -> dict[str, Any]:
    """All that is known of the episodes. In a team, the mean is that of those who learn."""
    names, trained = policies.names, trained_of(episodes, policies)
    return {
        "mean_return": mean_return(trained),
        "standard_error": standard_error(trained),
        "rows": [row.as_json() for row in rows_of(episodes, policies)],
        "episodes": [
            {
                "seed": each.seed,
                "policy": names[each.policy] if names else None,
                "return": each.total,
                "length": each.length,
            }
            for each in episodes
        ],
    }


def trained_of(episodes: Sequence[Episode], policies: PoliciesSection) -> list[Episode]:
    """Those that were played by policies that learn."""
    names, learning = policies.names, policies.trained
    return [each for each in episodes if not names or names[each.policy] in learning]
