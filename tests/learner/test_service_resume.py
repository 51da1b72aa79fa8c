"""A run that goes on: counters, watermarks, lineage, and a new epoch at every start."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from impala_async.errors import EXIT_DONE, CheckpointError
from impala_async.learner import service
from impala_async.learner.handoff import Mailbox
from impala_async.runs.folder import RunFolder
from impala_async.wire.messages import BYE_REASONS, VERDICTS, Bye, Heartbeat
from tests.learner.hand_actor import Actor, until
from tests.learner.server_harness import check_identities
from tests.learner.service_run import ServiceRun, service_run


@pytest.fixture(autouse=True)
def short_goodbye(monkeypatch):
    """The hand-made actors here do not answer one."""
    monkeypatch.setattr(service, "GOODBYE_S", 0.01)


async def first_start(path: Path, **sections: dict[str, Any]) -> tuple[ServiceRun, Actor]:
    """A start with one hand-made actor that sent five messages; ended in good order."""
    async with service_run(path, **sections) as run:
        await run.start_actors(2)
        await run.trained(20)
        actor = await run.actor()
        await actor.join()
        for _ in range(5):
            await actor.send()
        await actor.say(Bye(actor.session, BYE_REASONS.index("leaving")))
        await actor.hear(lambda: bool(actor.others))
        run.service.stop("terminated")
        assert await run.end() == EXIT_DONE
    return run, actor


async def come_back(run: ServiceRun, former: Actor) -> Actor:
    """The same actor at the next start, which remembers nothing of what it sent."""
    actor = await run.actor()
    actor.uuid = former.uuid
    await actor.hello(run_id=run.folder.run_id, epoch=1, lowest_unsettled=0)
    await actor.spec()
    await actor.hear(lambda: bool(actor.grants))
    return actor


async def test_numbers_go_on_where_they_were(tmp_path):
    before, _ = await first_start(tmp_path)
    num_before, last = len(before.reports), before.reports[-1]
    goal = last["env_steps_trained"] + 600
    async with service_run(tmp_path, is_resumed=True, stop={"env_steps": goal}) as run:
        place = await run.place()
        assert place["epoch"] == 2
        await run.start_actors(2)
        assert await run.end() == EXIT_DONE
    reports = run.reports[num_before:]
    for name in ("updates", "env_steps_trained", "trajectories/received", "trajectories/trained",
                 "passes/done", "episodes/count", "time_s"):  # fmt: skip
        values = [last[name], *(report[name] for report in reports)]
        assert values == sorted(values), name
    final = reports[-1]
    assert final["env_steps_trained"] >= goal
    assert final["weights/version_epoch"] == 2
    check_identities(final)
    assert final["trajectories/in_slots"] == 0
    # What the summary says of this start is of this start, from its first update.
    assert run.service._reading.first_update is not None
    begun = run.service._reading.first_update[1]
    assert begun > last["env_steps_trained"]
    steps = final["env_steps_trained"] - begun
    assert run.summary["env_steps_per_s"] == pytest.approx(steps / run.summary["wall_s"], rel=0.01)


async def test_what_was_settled_is_never_taken_again_nor_what_an_abandoned_branch_made(tmp_path):
    before, former = await first_start(tmp_path)
    fork = before.reports[-1]["updates"]
    dead = VERDICTS.index("dead_branch")
    async with service_run(tmp_path, is_resumed=True) as run:
        actor = await come_back(run, former)
        assert actor.settled == 5
        duplicates = run.service._server.report()["rejected/duplicate"]
        for seq in range(5):
            await actor.send(seq=seq, epoch=1, update=0, is_waiting=False)
        await until(lambda: run.service._server.report()["rejected/duplicate"] == duplicates + 5)
        check_identities(run.service._server.report())
        # And it may go on from there.
        actor.seq = 5
        await actor.send(epoch=1, update=fork)
        assert (actor.settled, actor.verdicts) == (6, [])
        await actor.send(epoch=1, update=fork + 1)
        assert actor.verdicts == [[6, dead]]
        await run.start_actors(1)
        await run.trained(fork + 3)
        # It ends as by a crash: nothing is saved, and so it is a dead branch itself.
        run.task.cancel()
    async with service_run(tmp_path, is_resumed=True) as run:
        assert (await run.place())["epoch"] == 3
        actor = await come_back(run, former)
        actor.seq = 5
        await actor.send(epoch=2, update=fork + 1)
        assert actor.verdicts == [[5, dead]]
        await actor.send(epoch=1, update=fork)
        assert len(actor.verdicts) == 1
    assert (tmp_path / "epoch").read_text() == "3"


async def test_data_of_an_earlier_epoch_is_welcome_before_the_first_weights(tmp_path, monkeypatch):
    """A learner that has published nothing yet could not judge it: it gives no credit."""
    _, former = await first_start(tmp_path)
    held: list[Callable[[], None]] = []
    deliver = Mailbox._deliver
    with monkeypatch.context() as patch:
        patch.setattr(Mailbox, "_deliver", lambda box, _: held.append(lambda: deliver(box, None)))
        async with service_run(tmp_path, is_resumed=True) as run:
            actor = await come_back(run, former)
            await actor.beat(Heartbeat(actor.session, {}))
            await actor.hear(lambda: len(actor.grants) >= 2)
            assert (actor.granted, actor.version) == (5, (0, 0))
            patch.undo()
            for waiting in held:
                waiting()
            actor.seq = 5
            await actor.send(epoch=1, update=1)
            assert actor.verdicts == []


async def test_a_resume_that_fails_leaves_the_run_as_it_was(tmp_path):
    before, _ = await first_start(tmp_path)
    async with service_run(tmp_path, is_resumed=True, algorithm={"optimizer": "rmsprop"}) as run:
        with pytest.raises(CheckpointError, match="state of Adam does not fit RMSprop"):
            await run.end()
    assert RunFolder(tmp_path).load_config() == before.config
    async with service_run(tmp_path, is_resumed=True, algorithm={"lr": 0.25}) as run:
        await run.place()
        assert run.folder.load_config() == run.config != before.config
