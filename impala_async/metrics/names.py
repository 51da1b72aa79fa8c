"""The one registry of metric names: every key that a report line may hold, its unit, its meaning.

A name that is missing here is refused when a report is put together, and `docs/metrics.md` is
rendered from here. Only a user's own algorithm adds to them, under `user/`. Every report has every
name; one whose value is null has none at that moment, or does not exist in that set-up.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

Value: TypeAlias = int | float | str | Sequence[float | None] | None
"""The types of values in a report line; every value is strict JSON once it is finite."""
DROP_REASONS = ("stale", "nonfinite_update", "shutdown")
"""Why columns that were admitted are not trained: `dropped/` and `partial/` have one of each."""
ACTOR_TIMERS = {
    "env_time_ms": "in environments",
    "act_time_ms": "in the policy",
    "send_wait_ms": "waiting to send",
    "weights_wait_ms": "waiting for weights",
}
"""Where an actor's time goes, in milliseconds per trajectory: its heartbeats say so."""


class Metric(NamedTuple):
    """One key of a report line."""

    name: str
    unit: str
    help: str


_QUANTILES = "percentiles 0, 10, 50, 90, 100"

SECTIONS: dict[str, tuple[Metric, ...]] = {
    "Run": (
        Metric("time_s", "s", "of the whole run, earlier starts included"),
        Metric("env_steps_trained", "rows", "valid rows at their first pass"),
        Metric("updates", "updates", "optimizer steps taken; in lockstep, batches"),
        Metric("env_steps_per_s", "rows/s", "trained over this report's interval"),
        Metric("frames_per_s", "frames/s", "the same times the frame skip of ALE's games"),
        Metric("mean_return", "reward", "of the last 100 episodes, or of as many as there are"),
        Metric("mean_return_100", "reward", "of the last 100 episodes; null before there are"),
        Metric("num_actors", "actors", "sessions with a live lease"),
        Metric("bottleneck", "text", "what limits the run, and the number it rests on"),
        Metric("advice", "text", "what may help with that"),
    ),
    "Where trajectories are": (
        Metric("trajectories/received", "columns", "arrived: admitted + all rejected"),
        Metric("trajectories/admitted", "columns", "took a place in a slot"),
        Metric("trajectories/rejected", "columns", "refused at admission, for any reason"),
        Metric("trajectories/trained", "columns", "had all their passes"),
        Metric("trajectories/dropped", "columns", "admitted, then not trained to the end"),
        Metric("trajectories/in_slots", "columns", "admitted, neither trained nor dropped yet"),
        Metric("rejected/duplicate", "columns", "admitted or settled once before"),
        Metric("rejected/invalid", "columns", "sizes, flags or actions that cannot be"),
        Metric("rejected/nonfinite", "columns", "held NaN, infinity, or what overflows"),
        Metric("rejected/unknown_session", "columns", "from a session no longer known"),
        Metric("rejected/stale", "columns", "beyond learner.max_lag on arrival"),
        Metric("rejected/dead_branch", "columns", "acted with weights of an abandoned epoch"),
        Metric("dropped/stale", "columns", "beyond learner.max_lag before a pass"),
        Metric("dropped/nonfinite_update", "columns", "their update had no finite loss"),
        Metric("dropped/shutdown", "columns", "still in a slot at the end of the run"),
    ),
    "Passes": (
        Metric("passes/done", "column-passes", "of all columns; see the identities above"),
        Metric("passes/partial", "column-passes", "of columns dropped between two passes"),
        Metric("passes/init_short", "column-passes", "ring's first fill: not given, by choice"),
        Metric("partial/stale", "column-passes", "done before dropped/stale"),
        Metric("partial/nonfinite_update", "column-passes", "before dropped/nonfinite_update"),
        Metric("partial/shutdown", "column-passes", "done before dropped/shutdown"),
    ),
    "Lag": (
        Metric("lag/mean", "updates", "between acting and training, queue and replay included"),
        Metric("lag/max", "updates", "largest in the window; never above learner.max_lag"),
        Metric("lag/quantiles", "updates", f"{_QUANTILES} of the window"),
    ),
    "Learner": (
        Metric("learner/starved_since_s", "s", "time_s when the wait began; null: not starved"),
        Metric("learner/building", "1", "1: it builds what it trains and hears nobody; else 0"),
        Metric("learner/wall_s", "s", "since this start's first update; stop.wall_s ends it"),
        Metric("learner/starved_total_s", "s", "starved so far, the present wait included"),
        Metric("learner/skipped_updates", "updates", "not taken: no valid row, or not finite"),
        Metric("timing_breakdown/learner_grad_time_ms", "ms", "one update, mean"),
        Metric("timing_breakdown/learner_load_time_ms", "ms", "loader: one copy to the device"),
        Metric("timing_breakdown/learner_load_wait_time_ms", "ms", "wait for that copy, mean"),
        Metric("timing_breakdown/learner_dequeue_time_ms", "ms", "wait for a batch, mean"),
        Metric("batch/valid_rows_mean", "rows", "that count, in batches that have any"),
    ),
    "Queues": (
        Metric("learner_queue/size_count", "updates", "sizes taken, one after each update"),
        Metric("learner_queue/size_mean", "batches", "full, loading and ready; window of 50"),
        Metric("learner_queue/size_std", "batches", "its population deviation"),
        Metric("learner_queue/size_quantiles", "batches", _QUANTILES),
        Metric("learner_queue/capacity", "batches", "full at most: all slots but the ring's"),
        Metric("queue/idle_depth_quantiles", "slots", _QUANTILES),
        Metric("queue/idle_capacity", "slots", "host slots"),
        Metric("queue/full_get_wait_ms", "ms", "the loader's wait, on a CPU the learner's, mean"),
        Metric("queue/full_depth_quantiles", "slots", _QUANTILES),
        Metric("queue/full_capacity", "slots", "host slots"),
        Metric("queue/ready_get_wait_ms", "ms", "the learner's wait for a ready batch, mean"),
        Metric("queue/ready_depth_quantiles", "slots", _QUANTILES),
        Metric("queue/ready_capacity", "slots", "device slots"),
        Metric("credit/granted_columns", "columns", "granted or unsettled, over all actors"),
        Metric("credit/free_columns", "columns", "that free slots could still be granted"),
        Metric("credit/turned_away", "columns", "for which there was no room yet: sent again"),
    ),
    "Update": (
        Metric("loss/total", "loss", "sum of the weighted terms"),
        Metric("loss/policy", "loss", "policy term"),
        Metric("loss/value", "loss", "value term, weighted"),
        Metric("loss/entropy", "loss", "entropy term, weighted: negative"),
        Metric("policy/entropy", "nats", "mean entropy of the policy, unweighted"),
        Metric("policy/kl", "nats", "appo: from the target network; ppo: from what acted"),
        Metric("policy/clip_fraction", "1", "appo, ppo: valid rows whose ratio is clipped"),
        Metric("grad/norm", "norm", "global, before clipping"),
        Metric("algorithm/lr", "1", "learning rate now"),
        Metric("algorithm/entropy_cost", "1", "entropy cost now"),
        Metric("algorithm/kl_coeff", "1", "appo: weight of the KL now"),
        Metric("algorithm/return_scale", "reward", "what rewards are divided by; 0.01 at least"),
    ),
    "Episodes": (
        Metric("episodes/count", "episodes", "finished since the start"),
        Metric("episodes/return_mean", "reward", "of this interval, unclipped and unscaled"),
        Metric("episodes/length_mean", "rows", "of this interval"),
    ),
    "Weights": (
        Metric("weights/version_epoch", "epoch", "of the newest published version"),
        Metric("weights/version_update", "updates", "of the newest published version"),
        Metric("weights/served", "replies", "that carried weights"),
        Metric("weights/not_modified", "replies", "to actors that had the newest"),
        Metric("weights/bytes", "bytes", "of weights sent"),
    ),
    "Wire": (
        Metric("wire/messages", "messages", "received on both sockets"),
        Metric("wire/bad", "messages", "refused as malformed: the sum of bad/"),
        Metric("wire/unroutable", "messages", "not sent: that peer is gone or does not read"),
        Metric(
            "wire/cut", "connections", "ended: too much came over them, or too many never joined"
        ),
        Metric("bad/unknown_type", "messages", "no such message in this protocol"),
        Metric("bad/oversized_header", "messages", "header above 4 KiB"),
        Metric("bad/malformed_header", "messages", "no msgpack array, or a field out of range"),
        Metric("bad/wrong_frame_count", "messages", "too few or too many frames"),
        Metric("bad/wrong_size", "messages", "a frame that the schema gives another size"),
        Metric("bad/unknown_session", "messages", "no such session, or its lease ran out"),
        Metric("bad/not_allowed_now", "messages", "a known type at the wrong moment"),
        Metric("sessions/opened", "sessions", "welcomed since the start"),
        Metric("sessions/expired", "sessions", "their lease ran out"),
        Metric("sessions/refused", "sessions", "their HELLO or SPEC did not fit"),
        Metric("sessions/closed", "sessions", "said BYE"),
        Metric("sessions/given_way", "sessions", "ended for another actor that came"),
    ),
    "Recording": (
        Metric("recording/messages", "messages", "recorded in this start"),
        Metric("recording/bytes", "bytes", "written to the file in this start"),
        Metric("recording/waiting_bytes", "bytes", "waiting for the disk"),
        Metric("recording/behind_total_s", "s", "no credit was given, as the disk was late"),
    ),
    "Actors": (
        *(
            Metric(f"actor/{name}", "ms", f"{where} per trajectory, median over actors")
            for name, where in ACTOR_TIMERS.items()
        ),
        Metric("lockstep/num_done", "actors", "whose part of the next batch is there"),
        Metric("lockstep/waits_for", "text", "actors whose part is not: the first few of them"),
        Metric("actor/hang", "text", "the environment that has hung for longest; null: none"),
        Metric("actor/last_death", "text", "what the last actor that said so died of"),
    ),
    "Process": (
        Metric("loop/lag_ms_mean", "ms", "how late the event loop runs a timer, mean"),
        Metric("loop/lag_ms_max", "ms", "the same, largest in the window"),
        Metric("host/rss_bytes", "bytes", "resident memory of the learner process"),
    ),
}

OWN_PREFIX = "user/"
"""Before a name of a user's own, which is declared nowhere."""
_OWN_NAME = re.compile(rf"{OWN_PREFIX}[a-z][a-z0-9_]*")

REGISTRY: dict[str, Metric] = {
    metric.name: metric for metrics in SECTIONS.values() for metric in metrics
}
_OF_UPDATE = {metric.name for metric in SECTIONS["Update"]}
assert len(REGISTRY) == sum(map(len, SECTIONS.values())), "a name stands twice"

ALIASES = {
    "global_step": "env_steps_trained",
    "charts/SPS": "env_steps_per_s",
    "charts/episodic_return": "episodes/return_mean",
    "charts/episodic_length": "episodes/length_mean",
    "charts/learning_rate": "algorithm/lr",
    "losses/policy_loss": "loss/policy",
    "losses/entropy": "policy/entropy",
    "losses/approx_kl": "policy/kl",
    "losses/clipfrac": "policy/clip_fraction",
    "rollout/ep_rew_mean": "mean_return",
    "time/fps": "env_steps_per_s",
    "time/total_timesteps": "env_steps_trained",
}
"""The names that CleanRL and Stable-Baselines3 give to metrics that mean the same."""


def numbers(report: Mapping[str, Value]) -> dict[str, float]:
    """The numbers of a report, under our names and under all that others know them by."""
    found = {name: value for name, value in report.items() if isinstance(value, int | float)}
    return found | {alias: found[name] for alias, name in ALIASES.items() if name in found}


def undeclared(report: Iterable[str]) -> set[str]:
    """The keys of a report, or any names, that neither the registry knows nor a user has named."""
    return {name for name in set(report) - REGISTRY.keys() if not _OWN_NAME.fullmatch(name)}


def is_of_update(name: str) -> bool:
    """Whether an algorithm may report it: a metric of an update, or one of a user's own."""
    return name in _OF_UPDATE or _OWN_NAME.fullmatch(name) is not None


def markdown_table() -> str:
    """The whole registry as Markdown, one headed table per section, for `docs/metrics.md`."""
    return "\n".join(
        f"## {title}\n\n| name | unit | meaning |\n|---|---|---|\n"
        + "".join(f"| `{m.name}` | {m.unit} | {m.help} |\n" for m in metrics)
        for title, metrics in SECTIONS.items()
    )
