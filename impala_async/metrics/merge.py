"""One report of several ranks: each metric says how it merges.

Updates are taken by all at once, so the rank that waits longest for its batches says what limits
the run: times are its.
"""

from collections.abc import Mapping, Sequence

from impala_async.metrics.names import SECTIONS, Value
from impala_async.metrics.report import BATCH_WAIT_MS, RETURN_EPISODES, TIMES, advice_on, judge

FIRST, SUM, MEAN, MOST, LEAST, SLOWEST, ANY, JUDGED, EACH, BY_EPISODES = (
    *("rank 0's", "sum", "mean", "largest", "smallest", "the slowest rank's", "the first there is"),
    *("judged anew", "a list of all", "mean, by episodes"),
)
OF_SECTIONS = {
    "Run": FIRST,
    "Where trajectories are": SUM,
    "Passes": SUM,
    "Lag": MEAN,
    "Learner": MOST,
    "Queues": SLOWEST,
    "Update": FIRST,
    "Episodes": MEAN,
    "Evaluation": FIRST,
    "Weights": SUM,
    "Wire": SUM,
    "Recording": FIRST,
    "Actors": ANY,
    "Ranks": FIRST,
    "Process": MOST,
}
EXCEPTIONS = {
    "mean_return": BY_EPISODES,
    "mean_return_100": MEAN,
    "bottleneck": JUDGED,
    "advice": JUDGED,
    "ranks/num_actors": EACH,
    "ranks/batch_wait_ms": EACH,
    "num_actors": SUM,
    "lag/max": MOST,
    "lag/quantiles": FIRST,
    "learner/starved_since_s": LEAST,
    "learner/skipped_updates": FIRST,
    "batch/valid_rows_mean": SUM,
    "credit/granted_columns": SUM,
    "credit/free_columns": SUM,
    "credit/turned_away": SUM,
    "episodes/count": SUM,
    "weights/version_epoch": FIRST,
    "weights/version_update": FIRST,
    "lockstep/num_done": SUM,
    "lockstep/rows_cut": SUM,
    "host/rss_bytes": SUM,
    **dict.fromkeys(TIMES, SLOWEST),
}
# A verdict is that of one rank: these are of its actors.
OF_VERDICT = (
    *("num_actors", "actor/hang", "actor/last_death", "lockstep/waits_for", "lockstep/num_done"),
)
RULES = {
    name: EXCEPTIONS.get(name, OF_SECTIONS[section])
    for section, metrics in SECTIONS.items()
    for name, _, _ in metrics
}


def merge_ranks(
    reports: Sequence[Mapping[str, Value]], before: Mapping[str, Value] | None = None
) -> dict[str, Value]:
    """The report of the run, with a verdict that names the rank which limits it."""
    slowest = max(range(len(reports)), key=lambda rank: _waits(reports[rank]))
    merged = dict(reports[0])
    for name in merged:
        rule = RULES.get(name, FIRST)
        found = [value for each in reports if (value := each.get(name)) is not None]
        if rule == SLOWEST:
            merged[name] = reports[slowest].get(name)
        elif rule == BY_EPISODES and found:
            merged[name] = _by_episodes(reports, name)
        elif rule in (SUM, MEAN, MOST, LEAST, ANY) and found:
            merged[name] = _merged(rule, found)
    merged["ranks/num_actors"] = _of_each(reports, "num_actors")
    merged["ranks/batch_wait_ms"] = _of_each(reports, BATCH_WAIT_MS)
    its_own = {name: reports[slowest].get(name) for name in OF_VERDICT}
    # Counts of earlier starts are in the very first.
    verdict = judge({**merged, **its_own}, before or merged)
    merged["bottleneck"], merged["advice"] = f"{verdict} (rank {slowest})", advice_on(verdict)
    return merged


def _waits(report: Mapping[str, Value]) -> tuple[bool, float]:
    waits = report.get(BATCH_WAIT_MS)
    is_starved = report.get("learner/starved_since_s") is not None
    return is_starved, float(waits) if isinstance(waits, int | float) else 0.0


def _merged(rule: str, found: Sequence[Value]) -> Value:
    numbers = [value for value in found if isinstance(value, int | float)]
    if rule == ANY or len(numbers) < len(found):
        return found[0]
    if rule == SUM:
        return sum(numbers)
    if rule == MEAN:
        return sum(numbers) / len(numbers)
    return max(numbers) if rule == MOST else min(numbers)


def _by_episodes(reports: Sequence[Mapping[str, Value]], name: str) -> Value:
    """The mean over ranks that have one, by how many of the last episodes are theirs."""
    pairs = [
        (min(count, RETURN_EPISODES), value)
        for each in reports
        if isinstance(value := each.get(name), int | float)
        and isinstance(count := each.get("episodes/count"), int)
    ]
    number = sum(count for count, _ in pairs)
    return sum(count * value for count, value in pairs) / number if number else None


def _of_each(reports: Sequence[Mapping[str, Value]], name: str) -> list[float | None]:
    values = [each.get(name) for each in reports]
    return [value if isinstance(value, int | float) else None for value in values]
