"""Whole runs in lockstep in this process: the same end whatever the clock, a loss, a resume."""

import hashlib
import time
from typing import Any

import pytest

from impala_async.errors import EXIT_DONE, EXIT_TRY_AGAIN
from impala_async.learner.loader import HostLoader
from impala_async.training.checkpoint import newest_checkpoint
from tests.learner.lockstep_actor import start_lockstep_actors
from tests.learner.server_harness import check_identities
from tests.learner.service_run import ServiceRun, service_run

COUNTED = ("exit_reason", "env_steps_trained", "updates", "mean_return_100", "episodes")


def lockstep(lag: int, on_loss: str = "go_on") -> dict[str, dict[str, Any]]:
    return {
        "pace": {"mode": "lockstep", "lag": lag, "on_loss": on_loss},
        "actor": {"num_envs": 2},
        "train": {"num_actors": 2},
        "learner": {
            "batch_columns": 4,
            "lease_s": 1,
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


@pytest.mark.parametrize(
    ("lag", "stop", "reason", "updates"),
    [
        # A hundred episodes are 25 batches; their mean is that of the 13th before the last. With
        # the episodes of batch 53 the one is reached, by training batch 52 the other.
        (0, {"mean_return": 40.0, "env_steps": 625}, "mean_return", 53),
        (1, {"mean_return": 40.0, "env_steps": 624}, "env_steps", 52),
    ],
    ids=["mean_return first", "env_steps first"],
)
async def test_a_goal_is_reached_at_the_same_update_whatever_the_clock(
    tmp_path, lag, stop, reason, updates
):
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


async def test_the_batch_that_reached_the_goal_is_trained_however_late_its_turn_comes(
    tmp_path, monkeypatch
):
    get = HostLoader.get

    def get_late(loader, *, timeout):
        time.sleep(0.02)
        return get(loader, timeout=timeout)

    monkeypatch.setattr(HostLoader, "get", get_late)
    async with service_run(tmp_path, stop={"mean_return": 20.0}, **lockstep(1)) as run:
        await start_lockstep_actors(run)
        assert await run.end() == EXIT_DONE
    assert outcome(run)["updates"] == 33


async def test_a_lost_actor_may_end_the_run(tmp_path):
    async with service_run(tmp_path, **lockstep(1, on_loss="stop")) as run:
        _, lost = await start_lockstep_actors(run)
        await run.trained(10)
        lost.leave()
        assert await run.end() == EXIT_TRY_AGAIN
    last = outcome(run)
    assert last["exit_reason"] == "actor_lost"
    # Nothing was trained without it.
    assert last["trained"] == 4 * last["updates"]


async def test_a_run_is_resumed_with_the_next_update(tmp_path):
    async with service_run(tmp_path, stop={"env_steps": 240}, **lockstep(1)) as run:
        await start_lockstep_actors(run)
        assert await run.end() == EXIT_DONE
    assert run.summary["updates"] == 20
    stop = {"env_steps": 480}
    async with service_run(tmp_path, is_resumed=True, stop=stop, **lockstep(1)) as resumed:
        lockstep_actors = await start_lockstep_actors(resumed)
        assert await resumed.end() == EXIT_DONE
    assert resumed.summary["updates"] == 40
    assert all(lockstep_actor.acted[0] == (2, 20) for lockstep_actor in lockstep_actors)
    assert resumed.summary["lag_quantiles"] == [0, 1, 1, 1, 1]
