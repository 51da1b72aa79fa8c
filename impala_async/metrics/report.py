"""One report line: counters, snapshots merged under declared names, and what limits the run.

That verdict rests on the learner's own clock: does it wait, and for what. Only when it waits for
batches do the actors' timers say which of their stages is the long one.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from numbers import Integral, Real

from impala_async.metrics.names import (
    ACTOR_TIMERS,
    AGENTS_PER_STEP,
    REGISTRY,
    Value,
    numbers,
    undeclared,
)

RETURN_EPISODES = 100
WRITTEN_OUT_BELOW = 1e10
WAIT_SHARE_THAT_LIMITS = 0.2
# A loop that is later than this on average has more to do than it can.
LATE_LOOP_MS = 5.0
ADVICE = {
    "rejections": "the learner logs each reason; nonfinite is a NaN, an infinity or an absurd "
    "number among the observations and rewards of an environment, or in what the network makes of "
    "them",
    "learner": "a faster device, a smaller model, fewer learner.num_passes, or fewer and larger "
    "minibatches (algorithm.num_minibatches)",
    "ranks": "see which rank is late by the lists under ranks/; its host, actors and cores decide",
    "copy": "smaller observations, or a larger learner.batch_columns",
    "environment": "if its steps compute: more actors, on other hosts when the cores of this one "
    "are busy, or another actor.sampler; if they wait, as for a simulator or a network: more of "
    "them at once, by a larger actor.num_envs with as many actor.num_workers, cores or not; if "
    "its resets take long, env.num_spares",
    "hanging": "see where it stands by py-spy dump, or in the log of its actor when "
    "env.step_timeout_s ends it",
    "straggler": "see the logs of the actors that it names; if one is ended, pace.on_loss decides",
    "inference": "a larger actor.num_envs, or more actors, on other hosts when cores are busy",
    "network": "a faster link or smaller observations; for actors that are far away, a larger "
    "learner.queue_size, or in lockstep pace.lag; on one host, fewer actors for its cores",
    "ingest": "a larger trajectory.rows, so that there are fewer messages, or a core of its own",
    "actors": "start actors by the command that the learner has told at its start; where train "
    "has started them, their logs, in actors/ of the run folder, say what they do: slow "
    "environments are made sooner by more actors with a smaller actor.num_envs",
}
UPDATE_MS = "timing_breakdown/learner_grad_time_ms"
BATCH_WAIT_MS = "timing_breakdown/learner_dequeue_time_ms"
COPY_WAIT_MS = "timing_breakdown/learner_load_wait_time_ms"
RANK_WAIT_MS = "timing_breakdown/learner_rank_wait_time_ms"
_LOOP_LAG_MS = "loop/lag_ms_mean"
_ENV_MS, _ACT_MS, _SEND_WAIT_MS, _WEIGHTS_WAIT_MS = (f"actor/{name}" for name in ACTOR_TIMERS)
_ACTOR_STAGES = {
    _ENV_MS: ("environment", "in environment steps"),
    _ACT_MS: ("inference", "in the policy"),
    _SEND_WAIT_MS: ("network", "waiting to send"),
    _WEIGHTS_WAIT_MS: ("network", "waiting for weights"),
}
TIMES = {
    *(UPDATE_MS, BATCH_WAIT_MS, COPY_WAIT_MS, RANK_WAIT_MS, _LOOP_LAG_MS),
    *_ACTOR_STAGES,
}
REJECTED = "rejected/"
# Nothing is lost by these two: it comes again, or has come before. And anybody may send them.
_NO_LOSS = (f"{REJECTED}unknown_session", f"{REJECTED}duplicate")


class Counters(dict[str, int]):
    """Counts that only grow, zeros included: a series never starts late."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__(dict.fromkeys(names, 0))

    def add(self, name: str, k: int = 1) -> None:
        assert k >= 0, f"counter {name} cannot fall by {-k}"
        self[name] += k

    def restore(self, saved: Mapping[str, int]) -> None:
        """Go on from earlier ones, which may be those of a program with other counters."""
        self.update((name, int(saved.get(name, 0))) for name in self)


def assemble(
    *snapshots: Mapping[str, object], before: Mapping[str, Value] | None = None
) -> dict[str, Value]:
    """A report line: every declared name, null where nobody has measured it, and the verdict."""
    report = merge(*snapshots)
    report["bottleneck"] = verdict = judge(report, before)
    report["advice"] = advice_on(verdict)
    return dict.fromkeys(REGISTRY) | report


def merge(*snapshots: Mapping[str, object]) -> dict[str, Value]:
    """All snapshots as one report, clean for strict JSON. An unknown name is a bug of ours."""
    report: dict[str, Value] = {}
    for snapshot in snapshots:
        unknown = undeclared(snapshot)
        assert not unknown, f"metrics that metrics/names.py does not declare: {sorted(unknown)}"
        twice = report.keys() & snapshot.keys()
        assert not twice, f"metrics with two owners: {sorted(twice)}"
        report.update((name, clean(value)) for name, value in snapshot.items())
    return report


def clean(value: object) -> Value:
    """A value as plain Python. One that is not finite becomes None: a diverged loss is news."""
    if isinstance(value, list | tuple):
        return [_clean_number(element) for element in value]
    return value if isinstance(value, str) else _clean_number(value)


def _clean_number(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, Integral):
        return int(value)
    assert isinstance(value, Real), f"a report cannot hold {value!r}"
    number = float(value)
    return number if math.isfinite(number) else None


def judge(report: Mapping[str, Value], before: Mapping[str, Value] | None = None) -> str:
    """The stage that limits the run, and the number that says so: `<stage>: <finding>`. Counts
    of `before`, an earlier report of the run, are left out."""
    verdict = _judge_waits(report)
    # A learner that has enough to do is not limited by what else is sent to it.
    is_fed = verdict.startswith(("learner: ", "copy: "))
    return (None if is_fed else _refused_share(report, before or {})) or verdict


def agents_in(report: Mapping[str, Value]) -> float:
    """How many rows are one env step: those of the agents that act at once; 1 if nobody said."""
    agents = report.get(f"actor/{AGENTS_PER_STEP}")
    return max(1.0, agents) if isinstance(agents, int | float) else 1.0


def advice_on(verdict: str) -> str | None:
    """A few words on how the stage of a verdict may limit the run less, if there are any."""
    return ADVICE.get(verdict.partition(":")[0])


def _judge_waits(report: Mapping[str, Value]) -> str:
    get = numbers(report).get
    if get("learner/building"):
        return "waiting: the learner builds what it trains, for an actor that has come"
    if (since_s := get("learner/starved_since_s")) is not None:
        so_long = f" for {max(0.0, get('time_s', 0.0) - since_s):.0f} s"
        return _blame_actors(report, f"the learner has had no batch{so_long}")
    if get("num_actors") == 0:
        # Without actors nothing arrives any more, whatever was measured last.
        return _blame_actors(report, "the learner has nobody to learn from")
    update_ms = get(UPDATE_MS)
    if not update_ms:
        return "unknown: no update has been measured yet"
    batch_wait_ms, copy_wait_ms = get(BATCH_WAIT_MS, 0.0), get(COPY_WAIT_MS, 0.0)
    rank_wait_ms = get(RANK_WAIT_MS, 0.0)
    wait_ms = batch_wait_ms + copy_wait_ms + rank_wait_ms
    whole_ms = update_ms + wait_ms
    if wait_ms <= WAIT_SHARE_THAT_LIMITS * whole_ms:
        return f"learner: updates take {_percent(update_ms / whole_ms)} of its time"
    most_ms = max(batch_wait_ms, copy_wait_ms, rank_wait_ms)
    finding = f"the learner waits {_percent(most_ms / whole_ms)} of its time for"
    if rank_wait_ms == most_ms:
        return f"ranks: {finding} other ranks"
    finding += " batches"
    if copy_wait_ms == most_ms > batch_wait_ms:
        return f"copy: {finding} to be copied"
    # While ranks are waited for actors have nothing to do either.
    return _blame_actors(report, finding, (batch_wait_ms + copy_wait_ms) / whole_ms)


def _blame_actors(report: Mapping[str, Value], finding: str, waited_share: float = 1.0) -> str:
    if report.get("num_actors") == 0:
        why, found = report.get("actor/last_death"), numbers(report)
        if not why and not found.get("updates") and found.get("sessions/opened"):
            why = "one that came may still make its environments: its log says so"
        return f"actors: {finding}, none is connected" + (f"; {why}" if why else "")
    is_starved = report.get("learner/starved_since_s") is not None
    if names := report.get("lockstep/waits_for") if is_starved else None:
        finding += f", it waits for {names}"
    if hang := report.get("actor/hang"):
        return f"hanging: {finding}, {hang}"
    found = numbers(report)
    times = {name: found.get(name, 0.0) for name in _ACTOR_STAGES}
    whole_ms = sum(times.values())
    # In lockstep an update is waited for, too: that is not the way of the weights.
    times[_WEIGHTS_WAIT_MS] -= (1 - waited_share) * whole_ms
    longest = max(times, key=lambda name: times[name])
    is_known = times[longest] > 0.0
    if names and (report.get("lockstep/num_done") or not is_known):
        # The others are not what takes so long.
        return f"straggler: {finding}"
    if not is_known:
        return f"waiting: {finding}, no actor says what takes its time"
    stage, where = _ACTOR_STAGES[longest]
    share = _percent(found.get(longest, 0.0) / whole_ms)
    finding += f", an actor spends {share} of its time {where}"
    late_ms = found.get(_LOOP_LAG_MS, 0.0)
    if stage == "network" and late_ms > LATE_LOOP_MS:
        return f"ingest: {finding}, and the event loop is {late_ms:.0f} ms late"
    return f"{stage}: {finding}"


def _refused_share(report: Mapping[str, Value], before: Mapping[str, Value]) -> str | None:
    """If most of what arrives is refused, nothing else matters."""
    then = numbers(before)
    found = {name: count - then.get(name, 0.0) for name, count in numbers(report).items()}
    reasons = {name: count for name, count in found.items() if name.startswith(REJECTED)}
    num_no_loss = sum(reasons.pop(name, 0.0) for name in _NO_LOSS)
    received = found.get("trajectories/received", 0.0) - num_no_loss
    rejected = found.get("trajectories/rejected", 0.0) - num_no_loss
    if rejected <= received / 2:
        return None
    most = max(reasons, key=lambda name: reasons[name], default=REJECTED).removeprefix(REJECTED)
    share = _percent(rejected / received)
    return f"rejections: {share} of what arrived was refused, most as {most}"


def _percent(share: float) -> str:
    return f"{100.0 * share:.0f} %"


class RunTimes:
    """The mean times of a whole start, from its reports, each counted by its updates."""

    def __init__(self, num_updates: int = 0) -> None:
        self._sums, self._weights = defaultdict[str, float](float), defaultdict[str, float](float)
        self._num_updates: float = num_updates
        self._had_actors = False

    def add(self, report: Mapping[str, Value]) -> None:
        found = numbers(report)
        self._had_actors |= found.get("num_actors", 0) > 0
        weight = found.get("updates", self._num_updates) - self._num_updates
        self._num_updates += weight
        for name in found.keys() & TIMES:
            self._sums[name] += weight * found[name]
            self._weights[name] += weight

    def over(self, report: Mapping[str, Value]) -> dict[str, Value]:
        """The last report with the times of all of them in it. A wait that lasts to the end is in
        none of them: where it is most of the start, the last report says what there is to say."""
        found = numbers(report)
        starved_s = found.get("time_s", 0.0) - found.get("learner/starved_since_s", math.inf)
        if starved_s > found.get("learner/wall_s", 0.0) / 2:
            return dict(report)
        means = {name: self._sums[name] / each for name, each in self._weights.items() if each}
        # An environment that hangs now has not hung all the time.
        whole = {**report, **means, "learner/starved_since_s": None, "actor/hang": None}
        # Those that were there, and left before the end, were some.
        return whole | {"num_actors": None} if self._had_actors else whole


def format_return(value: float | None, goal: float | None = None) -> str:
    """A return, with as many digits more as it takes to tell one below the goal from the goal."""
    if value is None:
        return "-"
    num_digits = 3
    while goal is not None and value < goal <= float(_format(value, num_digits)):
        num_digits += 1
    return _format(value, num_digits)


def format_mean_return(value: float | None, num_episodes: object, goal: float | None = None) -> str:
    """Format as `format_return`, with the number of episodes while there are few."""
    is_early = isinstance(num_episodes, int) and 0 < num_episodes < RETURN_EPISODES
    few = f" ({num_episodes} episode{'s' * (num_episodes != 1)})" if is_early else ""
    aim = "" if goal is None else f" / {goal:.12g}"
    return f"{format_return(value, goal)}{aim}{few}"


def _format(value: float, num_digits: int) -> str:
    value = value or 0.0  # without the sign of -0.0
    if 10**num_digits - 0.5 <= abs(value) < WRITTEN_OUT_BELOW:
        return f"{value:.0f}"
    return f"{value:#.{num_digits}g}".removesuffix(".")
