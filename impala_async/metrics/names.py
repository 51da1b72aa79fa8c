"""The one registry of metric names: every key that a report line may hold, its unit, its meaning.

`docs/metrics.md` is rendered from here. Only a user's own algorithm adds to them, under `user/`,
and several policies, each under `policies/<its name>/`. Every report has every name; its value is
null where there is none.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

Value: TypeAlias = int | float | str | Sequence[float | None] | None
DROP_REASONS = ("stale", "nonfinite_update", "shutdown")
"""Why columns that were admitted are not trained: `dropped/` and `partial/` have one of each."""
ACTOR_TIMERS = {
    "env_time_ms": "in environments",
    "act_time_ms": "in the policy",
    "send_wait_ms": "waiting to send",
    "weights_wait_ms": "waiting for weights",
}
"""Where an actor's time goes, in milliseconds per trajectory: its heartbeats say so."""
# In lockstep others wait for the one that waits least for weights.
LEAST_OF_ACTORS = {"weights_wait_ms"}
AGENTS_PER_STEP = "agents_per_step"
_QUANTILES = "percentiles 0, 10, 50, 90, 100"

SECTIONS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "Run": (
        ("time_s", "s", "of the whole run, earlier starts included"),
        ("env_steps_trained", "rows", "valid rows at their first pass, of each agent"),
        ("updates", "updates", "optimizer steps taken; in lockstep, batches"),
        ("env_steps_per_s", "rows/s", "trained over this report's interval"),
        ("frames_per_s", "frames/s", "env steps of all agents at once, times the frames of each"),
        ("mean_return", "reward", "of the last 100 episodes, or of as many as there are"),
        ("mean_return_100", "reward", "of the last 100 episodes; null before there are"),
        ("num_actors", "actors", "sessions with a live lease"),
        ("bottleneck", "text", "what limits the run, and the number it rests on"),
        ("advice", "text", "what may help with that"),
    ),
    "Where trajectories are": (
        ("trajectories/received", "columns", "arrived: admitted + all rejected"),
        ("trajectories/admitted", "columns", "took a place in a slot"),
        ("trajectories/rejected", "columns", "refused at admission, for any reason"),
        ("trajectories/trained", "columns", "had all their passes"),
        ("trajectories/dropped", "columns", "admitted, then not trained to the end"),
        ("trajectories/in_slots", "columns", "admitted, neither trained nor dropped yet"),
        ("rejected/duplicate", "columns", "admitted or settled once before"),
        ("rejected/invalid", "columns", "sizes, flags or actions that cannot be"),
        ("rejected/nonfinite", "columns", "held NaN, infinity, or what overflows"),
        ("rejected/unknown_session", "columns", "from a session no longer known"),
        ("rejected/stale", "columns", "beyond learner.max_lag on arrival"),
        ("rejected/dead_branch", "columns", "acted with weights of an abandoned epoch"),
        ("dropped/stale", "columns", "beyond learner.max_lag before a pass"),
        ("dropped/nonfinite_update", "columns", "their update had no finite loss"),
        ("dropped/shutdown", "columns", "still in a slot at the end of the run"),
    ),
    "Passes": (
        ("passes/done", "column-passes", "of all columns; see the identities above"),
        ("passes/partial", "column-passes", "of columns dropped between two passes"),
        ("passes/init_short", "column-passes", "ring's first fill: not given, by choice"),
        ("passes/ended_early", "column-passes", "not made: a new batch waited, or learner.stop_kl"),
        ("partial/stale", "column-passes", "done before dropped/stale"),
        ("partial/nonfinite_update", "column-passes", "before dropped/nonfinite_update"),
        ("partial/shutdown", "column-passes", "done before dropped/shutdown"),
    ),
    "Lag": (
        ("lag/mean", "updates", "between acting and training, queue and replay included"),
        ("lag/max", "updates", "largest of a batch or more; never above learner.max_lag"),
        ("lag/quantiles", "updates", f"{_QUANTILES} of a batch or more"),
    ),
    "Learner": (
        ("learner/starved_since_s", "s", "time_s when the wait began; null: not starved"),
        ("learner/building", "1", "1: it builds what it trains and hears nobody; else 0"),
        ("learner/wall_s", "s", "since this start's first update; stop.wall_s ends it"),
        ("learner/starved_total_s", "s", "starved so far, the present wait included"),
        (
            "learner/skipped_updates",
            "passes",
            "with an update not taken, or not with columns at fault",
        ),
        ("timing_breakdown/learner_grad_time_ms", "ms", "one pass over a batch, mean"),
        ("timing_breakdown/learner_load_time_ms", "ms", "loader: one copy to the device"),
        ("timing_breakdown/learner_load_wait_time_ms", "ms", "wait for it, mean of all passes"),
        ("timing_breakdown/learner_dequeue_time_ms", "ms", "wait for a batch, mean"),
        ("timing_breakdown/learner_rank_wait_time_ms", "ms", "wait for other ranks, with a batch"),
        ("batch/valid_rows_mean", "rows", "that count, in batches that have any"),
    ),
    "Queues": (
        ("learner_queue/size_count", "passes", "sizes taken, one after each pass"),
        ("learner_queue/size_mean", "batches", "full, loading and ready; window of 50"),
        ("learner_queue/size_std", "batches", "its population deviation"),
        ("learner_queue/size_quantiles", "batches", _QUANTILES),
        ("learner_queue/capacity", "batches", "full at most: all slots but the ring's"),
        ("queue/idle_depth_quantiles", "slots", _QUANTILES),
        ("queue/idle_capacity", "slots", "host slots"),
        ("queue/full_get_wait_ms", "ms", "the loader's wait, on a CPU the learner's, mean"),
        ("queue/full_depth_quantiles", "slots", _QUANTILES),
        ("queue/full_capacity", "slots", "host slots"),
        ("queue/ready_get_wait_ms", "ms", "the learner's wait for a ready batch, mean"),
        ("queue/ready_depth_quantiles", "slots", _QUANTILES),
        ("queue/ready_capacity", "slots", "device slots"),
        ("credit/granted_columns", "columns", "granted and not used, or not settled"),
        ("credit/free_columns", "columns", "in free slots, granted or not"),
        ("credit/delay_ms", "ms", "from an empty slot to its credit, while full ones wait"),
        ("credit/turned_away", "columns", "for which there was no room yet: sent again"),
    ),
    "Update": (
        ("loss/total", "loss", "sum of the weighted terms"),
        ("loss/policy", "loss", "policy term"),
        ("loss/value", "loss", "value term, weighted"),
        ("loss/entropy", "loss", "entropy term, weighted: negative"),
        ("loss/intrinsic", "loss", "own loss of algorithm.intrinsic_reward"),
        ("reward/intrinsic", "reward", "that of algorithm.intrinsic_reward, mean"),
        ("policy/entropy", "nats", "mean entropy of the policy, unweighted"),
        ("policy/kl", "nats", "appo: from the target network; ppo: from what acted"),
        ("policy/clip_fraction", "1", "appo, ppo: valid rows whose ratio is clipped"),
        ("grad/norm", "norm", "global, before clipping"),
        ("algorithm/lr", "1", "learning rate now"),
        ("algorithm/entropy_cost", "1", "entropy cost now"),
        ("algorithm/kl_coeff", "1", "appo: weight of the KL now"),
        ("algorithm/return_scale", "reward", "what rewards are divided by; 0.01 at least"),
    ),
    "Episodes": (
        ("episodes/count", "episodes", "finished since the start"),
        ("episodes/return_mean", "reward", "of this interval, unclipped and unscaled"),
        ("episodes/length_mean", "rows", "of this interval"),
    ),
    "Evaluation": (
        ("evaluate/greedy_return", "reward", "mean of the newest evaluation, likeliest actions"),
        ("evaluate/sampled_return", "reward", "mean of the newest evaluation, sampled actions"),
        ("evaluate/env_steps", "rows", "trained into the weights of the newest evaluation"),
        ("evaluate/best_return", "reward", "the largest that has decided; weights in best/"),
        ("evaluate/took_s", "s", "the newest evaluation, to play its episodes"),
        ("evaluate/count", "evaluations", "finished in this start"),
    ),
    "Weights": (
        ("weights/version_epoch", "epoch", "of the newest published version"),
        ("weights/version_update", "updates", "of the newest published version"),
        ("weights/served", "replies", "with weights, also those that a peer did not take"),
        ("weights/not_modified", "replies", "without weights: there is nothing newer, or not yet"),
        ("weights/bytes", "bytes", "of weights in those replies"),
    ),
    "Wire": (
        ("wire/messages", "messages", "received on both sockets"),
        ("wire/bad", "messages", "refused as malformed: the sum of bad/"),
        ("wire/unroutable", "messages", "not sent: that peer is gone or does not read"),
        (
            "wire/cut",
            "connections",
            "ended: too much came, too many never joined, or said nothing",
        ),
        (
            "wire/left",
            "connections",
            "gone before a word was read: hung up by the other end, or without the key",
        ),
        ("bad/unknown_type", "messages", "no such message in this protocol"),
        ("bad/oversized_header", "messages", "header above 4 KiB"),
        ("bad/malformed_header", "messages", "no msgpack array, or a field out of range"),
        ("bad/wrong_frame_count", "messages", "too few or too many frames"),
        ("bad/wrong_size", "messages", "a frame that the schema gives another size"),
        ("bad/unknown_session", "messages", "no such session, or its lease ran out"),
        ("bad/not_allowed_now", "messages", "a known type at the wrong moment"),
        ("sessions/opened", "sessions", "welcomed since the start"),
        ("sessions/expired", "sessions", "their lease ran out, or their connection is closed"),
        ("sessions/refused", "sessions", "their HELLO or SPEC did not fit"),
        ("sessions/closed", "sessions", "said BYE"),
        ("sessions/given_way", "sessions", "ended for another actor that came"),
    ),
    "Recording": (
        ("recording/messages", "messages", "recorded in this start"),
        ("recording/bytes", "bytes", "written to the file in this start"),
        ("recording/waiting_bytes", "bytes", "waiting for the disk"),
        ("recording/behind_total_s", "s", "no credit was given, as the disk was late"),
    ),
    "Actors": (
        *(
            (
                f"actor/{name}",
                "ms",
                f"{where} per trajectory, "
                f"{'least' if name in LEAST_OF_ACTORS else 'median'} over actors",
            )
            for name, where in ACTOR_TIMERS.items()
        ),
        (
            f"actor/{AGENTS_PER_STEP}",
            "agents",
            "that act and learn in one step of their environment",
        ),
        ("lockstep/num_done", "actors", "whose part of the next batch is there"),
        ("lockstep/waits_for", "text", "actors whose part is not: the first few of them"),
        ("lockstep/rows_cut", "rows", "masked in this start, as pace.cut_share had them cut"),
        ("actor/hang", "text", "the environment that has hung for longest; null: none"),
        (
            "actor/last_death",
            "text",
            "what the last actor that said so died of, while none has joined since",
        ),
    ),
    "Ranks": (
        ("ranks/num_actors", "actors", "of each rank"),
        ("ranks/batch_wait_ms", "ms", "learner_dequeue_time_ms of each rank"),
    ),
    "Process": (
        ("loop/lag_ms_mean", "ms", "how late the event loop runs a timer, mean"),
        ("loop/lag_ms_max", "ms", "the same, largest in the window"),
        ("host/rss_bytes", "bytes", "resident memory of the learner process"),
    ),
}

OWN_PREFIX = "user/"
"""The prefix of a user's own metrics, which are declared nowhere."""
_OWN_NAME = re.compile(rf"{OWN_PREFIX}[a-z][a-z0-9_]*")
_OF_POLICY = re.compile(r"^policies/[A-Za-z0-9_-]+/")

REGISTRY = {
    name: (unit, meaning) for metrics in SECTIONS.values() for name, unit, meaning in metrics
}
_OF_UPDATE = {name for name, _, _ in SECTIONS["Update"]}

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
    rest = set(report) - REGISTRY.keys()
    return {name for name in rest if not is_of_update(_OF_POLICY.sub("", name))}


def is_of_update(name: str) -> bool:
    """Whether an algorithm may report it: a metric of an update, or one of a user's own."""
    return name in _OF_UPDATE or _OWN_NAME.fullmatch(name) is not None


def of_policy(policy: str, name: str) -> str:
    """The name of a metric of an update where it is that of one policy among several."""
    return f"policies/{policy}/{name}"


def is_setting(name: str) -> bool:
    """Whether a metric of an update, of one policy or of all, is a setting: as it is now."""
    return name.split("/")[-2] == "algorithm"
