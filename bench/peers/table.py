"""The rows of the table: medians of each system, and ratios of ours to each, round by round."""

from collections.abc import Mapping, Sequence

from bench.paired import Figure, Sample, figure_of, ratio
from bench.peers.measure import A2C, OURS, PPO, RLLIB_IMPALA, SF

Samples = Mapping[str, Sequence[Sample]]
"""The rows of each system, by its name."""

FASTER = {
    ("CartPole", SF.name): 9.0,
    ("Pong", SF.name): 3.0,
    ("Pong", RLLIB_IMPALA.name): 6.0,
}
SOONER = (A2C.name, PPO.name, SF.name)


def speed_rows(title: str, samples: Samples) -> list[Figure]:
    """Trained steps per second, start-up and memory in a game."""
    rows = [figure_of(f"{title}, {name}", each, "per_s", "/s") for name, each in samples.items()]
    for name in _peers(samples):
        limits = {"at_least": FASTER[title, name]} if (title, name) in FASTER else {}
        label = f"{title}: {OURS.name} over {name}"
        rows.append(ratio(label, samples[OURS.name], samples[name], "per_s", **limits))
    for name, each in samples.items():
        label = f"{title}, {name}: launch to first trained step"
        rows.append(figure_of(label, each, "start_s", "s"))
    for name, each in samples.items():
        rows.append(figure_of(f"{title}, {name}: memory", each, "rss_gb", "GB"))
    return rows


def goal_rows(samples: Samples, limit_s: float) -> list[Figure]:
    """Seconds from launch to CartPole's goal; a seed that took too long counts as the limit."""
    rows = []
    for name, each in samples.items():
        num_late = sum(not sample["in_time"] for sample in each)
        late = f", {num_late} of {len(each)} not in {limit_s:g} s" if num_late else ""
        rows.append(figure_of(f"CartPole to 475, {name}{late}", each, "goal_s", "s"))
    for name in _peers(samples):
        limits = {"at_most": 1.0} if name in SOONER else {}
        label = f"CartPole to 475: {OURS.name} over {name}"
        rows.append(ratio(label, samples[OURS.name], samples[name], "goal_s", **limits))
    return rows


def _peers(samples: Samples) -> list[str]:
    """Those whom ours are compared with, if ours are there."""
    return [name for name in samples if name != OURS.name] if OURS.name in samples else []
