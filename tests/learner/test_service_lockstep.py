"""Whole runs in lockstep in this process: the same end whatever the clock, losses, and returns."""

import hashlib
import time
from pathlib import Path
from typing import Any

import pytest

from impala_async.errors import EXIT_DONE, EXIT_TRY_AGAIN
from impala_async.learner.threads.batch import LoadedBatch
from impala_async.learner.threads.loader import HostLoader
from impala_async.training.checkpoint import newest_checkpoint
from tests.learner.hand_actor import until
from tests.learner.lockstep_actor import start_lockstep_actors
from tests.learner.server_harness import check_identities
from tests.learner.service_run import ServiceRun, service_run

COUNTED = ("exit_reason", "env_steps_trained", "updates", "mean_return_100", "episodes")
LAGS = pytest.mark.parametrize("lag", [0, 1])


def lockstep(lag: int, num_actors: int = 2, on_loss: str = "go_on") -> dict[str, dict[str, Any]]:
    return {
        "pace": {"mode": "lockstep", "lag": lag, "on_loss": on_loss},
        "actor": {"num_envs": 2},
        "train": {"num_actors": num_actors},
        "learner": {
            "batch_columns": 2 * num_actors,
            "lease_s": 1,
            "heartbeat_s": 0.2,
            "report_every_s": 0.05,
        },
    }


def outcome(run: ServiceRun) -> dict[str, Any]:
    """What must not depend on the clock."""
    checkpoint = newest_checkpoint(run.folder.checkpoints)
    assert checkpoint is not None
    model = (checkpoint.path / "model.safetensors").read_bytes()
    last = run.reports[-1]
    check_identities(last)
    assert last["trajectories/in_slots"] == 0
    assert last["trajectories/rejected"] == 0
    return {
        **{name: run.summary[name] for name in (*COUNTED, "lag_quantiles")},
        "loss": last["loss/total"],
        "trained": last["trajectories/trained"],
        "lag": last["lag/mean"],
        "model": hashlib.sha256(model).hexdigest(),
    }


@LAGS
@pytest.mark.parametrize(
    ("stop", "reason", "updates"),
    [
        ({"env_steps": 900}, "env_steps", 75),
        # A hundred episodes are 25 batches; their mean is that of the 13th before the last.
        ({"mean_return": 40.0}, "mean_return", 53),
        # With the episodes of batch 53 the one is reached, by training batch 52 the other.
        ({"mean_return": 40.0, "env_steps": 625}, "mean_return", 53),
        ({"mean_return": 40.0, "env_steps": 624}, "env_steps", 52),
    ],
    ids=["env_steps", "mean_return", "mean_return first", "env_steps first"],
)
async def test_a_goal_is_reached_at_the_same_update_whatever_the_clock(
    tmp_path: Path, lag: int, stop: dict[str, float], reason: str, updates: int
) -> None:
    outcomes = []
    for number, slack_s in enumerate((0.0, 0.004)):
        async with service_run(tmp_path / str(number), stop=stop, **lockstep(lag)) as run:
            await start_lockstep_actors(run, slack_s=slack_s)
            assert await run.end() == EXIT_DONE
        outcomes.append(outcome(run))
    assert outcomes[0] == outcomes[1]
    found = outcomes[0]
    assert (found["exit_reason"], found["updates"]) == (reason, updates)
    assert found["trained"] == 4 * updates
    assert found["env_steps_trained"] == 12 * updates
    # Only the first batch has no lag.
    assert found["lag_quantiles"] == [0, *[lag] * 4]


@LAGS
async def test_the_batch_that_reached_the_goal_is_trained_however_late_its_turn_comes(
    tmp_path: Path, lag: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    get = HostLoader.get

    def get_late(loader: HostLoader, *, timeout: float | None) -> LoadedBatch:
        time.sleep(0.02)
        return get(loader, timeout=timeout)

    monkeypatch.setattr(HostLoader, "get", get_late)
    async with service_run(tmp_path, stop={"mean_return": 20.0}, **lockstep(lag)) as run:
        await start_lockstep_actors(run)
        assert await run.end() == EXIT_DONE
    assert outcome(run)["updates"] == 33


@LAGS
async def test_all_passes_of_a_batch_are_one_update(tmp_path: Path, lag: int) -> None:
    sections = lockstep(lag)
    sections["learner"]["num_passes"] = 3
    sections["algorithm"] = {"name": "ppo", "num_minibatches": 2}
    outcomes = []
    for number in range(2):
        async with service_run(tmp_path / str(number), stop={"env_steps": 361}, **sections) as run:
            await start_lockstep_actors(run, slack_s=0.003 * number)
            assert await run.end() == EXIT_DONE
        outcomes.append(outcome(run))
        assert run.reports[-1]["passes/done"] == 3 * 4 * 31
    assert outcomes[0] == outcomes[1]
    assert outcomes[0]["updates"] == 31


@LAGS
async def test_the_run_goes_on_without_a_lost_actor(tmp_path: Path, lag: int) -> None:
    async with service_run(tmp_path, stop={"env_steps": 1500}, **lockstep(lag)) as run:
        first, lost = await start_lockstep_actors(run)
        await run.trained(10)
        lost.leave()
        num_then = first.num_sent
        assert await run.end() == EXIT_DONE
    assert first.num_sent > num_then + 50
    last = outcome(run)
    # Its place was empty in the batches after that.
    assert last["trained"] < 4 * last["updates"]
    assert last["lag_quantiles"] == [0, *[lag] * 4]
    assert run.summary["num_actors"] == 1


@LAGS
async def test_a_lost_actor_may_end_the_run(tmp_path: Path, lag: int) -> None:
    async with service_run(tmp_path, **lockstep(lag, on_loss="stop")) as run:
        _, lost = await start_lockstep_actors(run)
        await run.trained(10)
        lost.leave()
        assert await run.end() == EXIT_TRY_AGAIN
    last = outcome(run)
    assert last["exit_reason"] == "actor_lost"
    # Nothing was trained without it.
    assert last["trained"] == 4 * last["updates"]


@LAGS
async def test_who_comes_instead_of_a_lost_one_is_in_step(tmp_path: Path, lag: int) -> None:
    async with service_run(tmp_path, **lockstep(lag)) as run:
        first, lost = await start_lockstep_actors(run)
        await run.trained(10)
        lost.leave()
        await until(lambda: run.number("num_actors") == 1, "a loss")
        num_then = run.number("updates")
        await run.trained(num_then + 20)
        (late,) = await start_lockstep_actors(run, 1, slack_s=0.002)
        await until(lambda: late.num_sent > 20, "its trajectories")
        assert {first.rank, late.rank} == {0, 1}
        run.service.stop("terminated")
        await run.end()
    # It began where the others were, and missed nothing from then on.
    begun = late.acted[0][1]
    assert begun > num_then
    wanted = [(1, max(begun, begun + number - lag)) for number in range(len(late.acted))]
    assert late.acted == wanted
    assert run.reports[-1]["trajectories/rejected"] == 0
    assert run.summary["lag_quantiles"][-1] == lag


@LAGS
async def test_a_run_is_resumed_with_the_next_update(tmp_path: Path, lag: int) -> None:
    async with service_run(tmp_path, stop={"env_steps": 240}, **lockstep(lag)) as run:
        await start_lockstep_actors(run)
        assert await run.end() == EXIT_DONE
    assert run.summary["updates"] == 20
    async with service_run(
        tmp_path, is_resumed=True, stop={"env_steps": 480}, **lockstep(lag)
    ) as resumed:
        lockstep_actors = await start_lockstep_actors(resumed)
        assert await resumed.end() == EXIT_DONE
    assert resumed.summary["updates"] == 40
    assert all(lockstep_actor.acted[0] == (2, 20) for lockstep_actor in lockstep_actors)
    assert resumed.summary["lag_quantiles"] == [0, *[lag] * 4]


async def test_the_first_batch_waits_for_everybody(tmp_path: Path) -> None:
    async with service_run(tmp_path, stop={"env_steps": 240}, **lockstep(0, num_actors=3)) as run:
        await start_lockstep_actors(run, 2)
        await until(lambda: bool(run.sink.lines) and run.number("num_actors") == 2, "two")
        before = len(run.sink.lines)
        await until(lambda: len(run.sink.lines) > before + 3, "reports")
        assert run.number("updates") == 0
        await start_lockstep_actors(run, 1)
        assert await run.end() == EXIT_DONE
    assert outcome(run)["trained"] == 6 * run.summary["updates"]
