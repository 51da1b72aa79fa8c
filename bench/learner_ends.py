"""The doors that the benchmark of the learner goes through, and what is read off a learner.

A recording is made by `train --record`, with real environments. It is played by `replay`, which
starts the learner in a process of its own, and on a machine of many cores by more players beside
it: `python -m bench.learner_ends RECORDING URL` is one. Rates are read from the reports that every
run writes, processor time from /proc.
"""

import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.gpu import watched
from bench.one_run import end_with_parent
from bench.paired import Sample
from impala_async.replay.index import RecordingIndex
from impala_async.replay.player import Player

START_WITHIN_S = 120.0
WARM_S = 2.0
POLL_S = 0.05
# Reports often enough for a window of some seconds, and a lease that a slow start does not outlast.
FOR_MEASURING = ("learner.report_every_s=0.25", "learner.lease_s=120")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# A player keeps a thread of its own busy, and one of ZeroMQ's at each end.
CORES_FOR_A_PLAYER, MOST_PLAYERS = 4, 4
UPDATE_MS = "timing_breakdown/learner_grad_time_ms"
LOAD_WAIT_MS = "timing_breakdown/learner_load_wait_time_ms"
WAITS_MS = ("timing_breakdown/learner_dequeue_time_ms", LOAD_WAIT_MS)


def record(path: Path, config: Path, settings: Sequence[str]) -> None:
    """Train for a moment, and keep what the actors sent."""
    door = [sys.executable, "-m", "impala_async.train", "--record", str(path)]
    run = ["--config", str(config), "--run-dir", f"{path}.run", *_set(settings)]
    recorder = subprocess.Popen(
        [*door, *run], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        _, said = recorder.communicate()
    except KeyboardInterrupt:
        # It ends its learner and its actors first, which write where we clear away.
        recorder.terminate()
        recorder.communicate()
        raise
    if recorder.returncode:
        raise RuntimeError(f"train --record ended with {recorder.returncode}:\n{said}")


def serve(
    recording: Path, run_dir: Path, settings: Sequence[str], seconds: float, device: torch.device
) -> Sample:
    """Play a recording again and again into a fresh learner, as fast as that takes it."""
    door = [sys.executable, "-m", "impala_async.replay", str(recording), "--loop"]
    command = [*door, "--run-dir", str(run_dir), *_set([*settings, *FOR_MEASURING])]
    log_path = run_dir.with_suffix(".log")
    players = [_start(command, log_path)]
    try:
        _wait_until(lambda: _is_updating(run_dir), players, log_path)
        service = json.loads((run_dir / "service.json").read_text())
        pid, more = service["pid"], [sys.executable, "-m", __name__, str(recording)]
        while len(players) < num_players():
            players.insert(0, _start([*more, service["data_url"]], log_path))
        _wait_until(lambda: _num_actors(run_dir) == num_players(), players, log_path)
        time.sleep(WARM_S)
        first, cpu_before = len(_reports(run_dir)), cpu_seconds(pid)
        begun = time.monotonic()
        with watched(device, seconds) as of_the_gpu:
            time.sleep(seconds)
        _wait_until(lambda: len(_reports(run_dir)) >= first + 2, players, log_path)
        cpu_after, spent_s = cpu_seconds(pid), time.monotonic() - begun
        reports = _reports(run_dir)[first:]
    finally:
        # The last of them is the one that has the learner.
        for player in players:
            player.terminate()
            player.wait()
    check_whole(reports[-1])
    cores = {name: (cpu_after[name] - cpu_before[name]) / spent_s for name in cpu_after}
    return {**rates(reports), **cores, **of_the_gpu}


def _start(command: Sequence[str], log_path: Path) -> "subprocess.Popen[bytes]":
    with log_path.open("a") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, preexec_fn=end_with_parent)


def num_players() -> int:
    """How many players a learner is measured with on this machine."""
    return max(1, min(MOST_PLAYERS, len(os.sched_getaffinity(0)) // CORES_FOR_A_PLAYER))


def rates(reports: Sequence[Mapping[str, Any]]) -> Sample:
    """The updates per second from first to last report, how long they took, and the waits."""
    first, last = reports[0], reports[-1]
    updates_per_s = (last["updates"] - first["updates"]) / (last["time_s"] - first["time_s"])
    update_ms = statistics.fmean(each[UPDATE_MS] for each in reports if each[UPDATE_MS])
    wait_ms = statistics.fmean(sum(each[name] or 0.0 for name in WAITS_MS) for each in reports)
    load_wait_ms = statistics.fmean(each[LOAD_WAIT_MS] or 0.0 for each in reports)
    return {
        "updates_per_s": updates_per_s,
        "update_ms": update_ms,
        "wait_share": wait_ms / (update_ms + wait_ms),
        # At most: a pass may be several updates.
        "load_wait_share": load_wait_ms / 1000 * updates_per_s,
    }


def cpu_seconds(pid: int) -> dict[str, float]:
    """The processor time of a learner so far: of its event loop, the main thread, and the rest."""
    loop_s, whole_s = (
        _cpu_seconds_of(Path(f"/proc/{pid}{task}/stat")) for task in (f"/task/{pid}", "")
    )
    return {"loop_cores": loop_s, "other_cores": whole_s - loop_s}


def _cpu_seconds_of(stat: Path) -> float:
    # The name in brackets may hold anything. Fields 14 and 15 of the whole line are
    # the time in user mode and in the kernel.
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def check_whole(report: Mapping[str, Any]) -> None:
    """Data that is refused, dropped or skipped costs less than an update."""
    names = ("trajectories/rejected", "trajectories/dropped", "learner/skipped_updates")
    lost = {name: report[name] for name in names if report[name]}
    if lost:
        raise RuntimeError(f"not everything that was played was trained on: {lost}")


def _wait_until(
    is_so: Callable[[], bool], players: Sequence["subprocess.Popen[bytes]"], log_path: Path
) -> None:
    until = time.monotonic() + START_WITHIN_S
    while not is_so():
        if any(each.poll() is not None for each in players) or time.monotonic() > until:
            raise RuntimeError(f"the learner does not train:\n{log_path.read_text()}")
        time.sleep(POLL_S)


def _is_updating(run_dir: Path) -> bool:
    return any(report["updates"] for report in _reports(run_dir))


def _num_actors(run_dir: Path) -> int:
    return int(_reports(run_dir)[-1]["num_actors"])


def _reports(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        return []
    *whole, _ = path.read_text().split("\n")
    return [json.loads(line) for line in whole]


def _set(settings: Sequence[str]) -> list[str]:
    return [part for setting in settings for part in ("--set", setting)]


def main() -> None:
    """Play a recording into a learner that is there, until a signal says to leave it."""
    recording, url = sys.argv[1:]
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    Player(
        url,
        RecordingIndex(Path(recording)),
        is_exact=False,
        is_looped=True,
        should_stop=lambda: bool(told),
        connect_s=math.inf,
    ).run()


if __name__ == "__main__":
    main()
