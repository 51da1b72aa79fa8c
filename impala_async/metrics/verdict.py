"""The stage that limits a run, judged from the waits that it measured, and what may help.

The learner's own clock decides first: does it wait, and for what. Only when it waits for batches do
the actors' timers say which of their stages is the long one.
"""

from collections.abc import Mapping
from typing import NamedTuple

from impala_async.metrics.names import ACTOR_TIMERS, Value

WAIT_SHARE_THAT_LIMITS = 0.2
# A loop that is later than this on average has more to do than it can.
LATE_LOOP_MS = 5.0

ADVICE: Mapping[str, str | None] = {
    "rejections": "look for the reason in the learner's log",
    "learner": "a faster device, a smaller model, or a lower learner.num_passes",
    "copy": "smaller observations, or a larger learner.batch_columns",
    "environment": "if its steps compute: more actors, on other hosts when the cores of this one "
    "are busy, or another actor.sampler; if they wait, as for a simulator or a network: more of "
    "them at once, by a larger actor.num_envs with as many actor.num_workers, cores or not",
    "hanging": "see where it stands by py-spy dump, or in the log of its actor when "
    "env.step_timeout_s ends it",
    "straggler": "see the logs of the actors that it names; if one is ended, pace.on_loss decides",
    "inference": "a larger actor.num_envs, or more actors, on other hosts when cores are busy",
    "network": "a faster link or smaller observations; on one host, fewer actors for its cores",
    "ingest": "a larger trajectory.rows, so that there are fewer messages, or a core of its own",
    "actors": "start actors: python -m impala_async.actor --learner tcp://HOST:PORT; if they end, "
    "see their logs",
    "waiting": None,
    "unknown": None,
}

UPDATE_MS = "timing_breakdown/learner_grad_time_ms"
BATCH_WAIT_MS = "timing_breakdown/learner_dequeue_time_ms"
COPY_WAIT_MS = "timing_breakdown/learner_load_wait_time_ms"
_LOOP_LAG_MS = "loop/lag_ms_mean"
_ENV_MS, _ACT_MS, _SEND_WAIT_MS, _WEIGHTS_WAIT_MS = (f"actor/{name}" for name in ACTOR_TIMERS)
_ACTOR_STAGES = (
    (_ENV_MS, "environment", "in environment steps"),
    (_ACT_MS, "inference", "in the policy"),
    (_SEND_WAIT_MS, "network", "waiting to send"),
)
_TIMES = (
    *(UPDATE_MS, BATCH_WAIT_MS, COPY_WAIT_MS, _LOOP_LAG_MS, _WEIGHTS_WAIT_MS),
    *(name for name, _, _ in _ACTOR_STAGES),
)
_REJECTED = "rejected/"
# Nothing is lost by these two: it comes again, or has come before. And anybody may send them.
_NO_LOSS = (f"{_REJECTED}unknown_session", f"{_REJECTED}duplicate")


class Verdict(NamedTuple):
    """A stage, and the measured number that says so. Written as `<stage>: <finding>`."""

    stage: str
    finding: str

    def __str__(self) -> str:
        return f"{self.stage}: {self.finding}"

    @property
    def advice(self) -> str | None:
        return ADVICE[self.stage]


def judge(report: Mapping[str, Value]) -> Verdict:
    """The stage that limits the run."""
    verdict = _judge_waits(report)
    # A learner that has enough to do is not limited by what else is sent to it.
    is_fed = verdict.stage in ("learner", "copy")
    return (None if is_fed else _refused_share(report)) or verdict


def _judge_waits(report: Mapping[str, Value]) -> Verdict:
    if report.get("learner/building"):
        return Verdict("waiting", "the learner builds what it trains, for an actor that has come")
    if "learner/starved_since_s" in report and report["learner/starved_since_s"] is not None:
        return _blame_actors(report, f"the learner has had no batch{_for_how_long(report)}")
    if report.get("num_actors") == 0:
        # Without actors nothing arrives any more, whatever was measured last.
        return _blame_actors(report, "the learner has nobody to learn from")
    update_ms, batch_wait_ms = _number(report, UPDATE_MS), _number(report, BATCH_WAIT_MS)
    copy_wait_ms = _number(report, COPY_WAIT_MS) or 0.0
    if update_ms is None or batch_wait_ms is None:
        return Verdict("unknown", "no update has been measured yet")
    whole_ms = update_ms + batch_wait_ms + copy_wait_ms
    if whole_ms <= 0.0:
        return Verdict("unknown", "no measurable time has passed")
    if batch_wait_ms + copy_wait_ms <= WAIT_SHARE_THAT_LIMITS * whole_ms:
        return Verdict("learner", f"updates take {_percent(update_ms / whole_ms)} of its time")
    share = _percent(max(batch_wait_ms, copy_wait_ms) / whole_ms)
    finding = f"the learner waits {share} of its time for batches"
    if copy_wait_ms > batch_wait_ms:
        return Verdict("copy", f"{finding} to be copied")
    return _blame_actors(report, finding)


class RunTimes:
    """The mean times of a whole start, from its reports, each counted by its updates."""

    def __init__(self, num_updates: int = 0) -> None:
        """`num_updates`: those that this start found."""
        self._sums: dict[str, float] = {}
        self._weights: dict[str, float] = {}
        self._num_updates = float(num_updates)
        self._had_actors = False

    def add(self, report: Mapping[str, Value]) -> None:
        """The next report of the start."""
        self._had_actors |= bool(report.get("num_actors"))
        num_updates = _number(report, "updates") or 0.0
        weight = num_updates - self._num_updates
        if weight <= 0:
            return
        self._num_updates = num_updates
        for name in _TIMES:
            value = _number(report, name)
            if value is not None:
                self._sums[name] = self._sums.get(name, 0.0) + weight * value
                self._weights[name] = self._weights.get(name, 0.0) + weight

    def over(self, report: Mapping[str, Value]) -> dict[str, Value]:
        """The last report with the times of all of them in it; nothing is starved at the end."""
        means = {name: total / self._weights[name] for name, total in self._sums.items()}
        whole = {**report, **means, "learner/starved_since_s": None}
        # Those that were there, and left before the end, were some.
        return whole | {"num_actors": None} if self._had_actors else whole


def _refused_share(report: Mapping[str, Value]) -> Verdict | None:
    """If most of what arrives is refused, nothing else matters."""
    reasons = {name: _number(report, name) or 0.0 for name in report if name.startswith(_REJECTED)}
    num_no_loss = sum(reasons.pop(name, 0.0) for name in _NO_LOSS)
    received = (_number(report, "trajectories/received") or 0.0) - num_no_loss
    rejected = (_number(report, "trajectories/rejected") or 0.0) - num_no_loss
    if rejected <= received / 2:
        return None
    most = max(reasons, key=lambda name: reasons[name], default=_REJECTED)
    share = _percent(rejected / received)
    reason = most.removeprefix(_REJECTED)
    return Verdict("rejections", f"{share} of what arrived was refused, most as {reason}")


def _blame_actors(report: Mapping[str, Value], finding: str) -> Verdict:
    """Name the stage that takes the most of an actor's time, if the actors have told."""
    if report.get("num_actors") == 0:
        death = report.get("actor/last_death")
        return Verdict("actors", f"{finding}, none is connected" + (f"; {death}" if death else ""))
    is_starved = report.get("learner/starved_since_s") is not None
    if names := report.get("lockstep/waits_for") if is_starved else None:
        finding += f", it waits for {names}"
    if hang := report.get("actor/hang"):
        return Verdict("hanging", f"{finding}, {hang}")
    stages = [(_number(report, name), stage, where) for name, stage, where in _ACTOR_STAGES]
    known = [(spent_ms, stage, where) for spent_ms, stage, where in stages if spent_ms is not None]
    whole_ms = sum(spent_ms for spent_ms, _, _ in known)
    whole_ms += _number(report, _WEIGHTS_WAIT_MS) or 0.0
    is_known = bool(known) and whole_ms > 0.0
    if names and (report.get("lockstep/num_done") or not is_known):
        # The others are not what takes so long.
        return Verdict("straggler", finding)
    if not is_known:
        return Verdict("waiting", f"{finding}, no actor has said yet what takes its time")
    longest_ms, stage, where = max(known)
    finding += f", an actor spends {_percent(longest_ms / whole_ms)} of its time {where}"
    late_ms = _number(report, _LOOP_LAG_MS) or 0.0
    if stage == "network" and late_ms > LATE_LOOP_MS:
        return Verdict("ingest", f"{finding}, and the event loop is {late_ms:.0f} ms late")
    return Verdict(stage, finding)


def _for_how_long(report: Mapping[str, Value]) -> str:
    now_s, since_s = _number(report, "time_s"), _number(report, "learner/starved_since_s")
    if now_s is None or since_s is None:
        return ""
    return f" for {max(0.0, now_s - since_s):.0f} s"


def _number(report: Mapping[str, Value], name: str) -> float | None:
    value = report.get(name)
    return float(value) if isinstance(value, int | float) else None


def _percent(share: float) -> str:
    return f"{100.0 * share:.0f} %"
