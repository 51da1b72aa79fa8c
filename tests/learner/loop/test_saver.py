"""Checkpoints of a run: what is in them, which stay, and what happens when the disk is full."""

import asyncio
import errno
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from impala_async.errors import CheckpointError
from impala_async.learner.handoff import Captured, Progress
from impala_async.learner.loop import saver
from impala_async.learner.loop.ledger import Ledger, Settlement
from impala_async.learner.loop.reporter import EpisodeStats
from impala_async.learner.loop.saver import Saver, begin_epoch, load_newest
from impala_async.policy import Policy
from impala_async.runs.folder import RunFolder
from impala_async.training.step import UpdateStep
from impala_async.weights import Lineage
from impala_async.wire.codec import EPISODE
from impala_async.wire.messages import PROTOCOL, Hello
from impala_async.wire.session import SessionTable
from tests.learner.columns import small_schema
from tests.learner.server_harness import RUN_ID, config_of

ACTOR = b"a" * 16


class Ship:
    """A saver and all that it saves."""

    def __init__(self, folder: RunFolder, *, keep: int = 2, lineage: Lineage | None = None) -> None:
        self.folder = folder
        self.deaths: list[BaseException] = []
        self.ledger = Ledger()
        self.episodes = EpisodeStats()
        self.lineage = lineage or Lineage(0).resumed(1, 0)
        self.table = SessionTable(
            run_id=RUN_ID, lineage=self.lineage, lease_s=10, max_lag=100, new_id=lambda: b"s" * 16
        )
        self.saver = Saver(
            folder=folder,
            keep=keep,
            accounts=self.accounts,
            lineage=self.lineage,
            episodes=self.episodes,
            run_s=lambda: 12.5,
            on_death=self.deaths.append,
        )
        config = config_of(small_schema())
        policy = Policy(small_schema(), config.model, seed=3)
        self.step = UpdateStep(policy, config.algorithm, "cpu")

    def accounts(self) -> dict[str, Any]:
        return {"ledger": self.ledger.save(), "watermarks": self.table.watermarks()}

    def restore(self, state: dict[str, Any]) -> None:
        self.ledger.restore(state["ledger"])
        self.table.restore_watermarks(state["watermarks"], 0.0)
        self.saver.restore(state)

    async def save(self, update: int, mean_return: float | None = None) -> bool:
        if mean_return is not None:
            self.episodes.take(np.array([(mean_return, 1)] * 100, EPISODE))
        progress = Progress(1, update, env_steps_trained=update * 10)
        return await self.saver.save(Captured(progress, self.step.capture()))

    def names(self) -> set[str]:
        return {path.name for path in self.folder.checkpoints.iterdir()}


@pytest.fixture
def make_ship(tmp_path: Path) -> Callable[..., Ship]:
    folder = RunFolder(tmp_path / "run")
    folder.begin(config_of(small_schema()))
    return lambda **settings: Ship(folder, **settings)


async def test_everything_that_is_saved_comes_back(make_ship: Callable[..., Ship]) -> None:
    ship = make_ship(lineage=Lineage(1, {1: 0}).resumed(2, 30))
    ship.ledger.admit(7)
    ship.ledger.reject(2, "duplicate")
    ship.ledger.submit(1, 4)
    ship.ledger.settle(Settlement(1, trained=4, passes_done=4))
    peer = ship.table.hello(Hello(PROTOCOL, ACTOR, "b", RUN_ID, 1, 0), b"r", 0.0)
    peer.columns = 1
    for _ in range(4):
        peer.extend()
    for seq in (0, 1, 3):
        ship.table.settle(peer, seq, None)
    assert await ship.save(40, mean_return=7.0)

    restored = load_newest(ship.folder)
    assert restored is not None
    assert restored.progress == Progress(1, 40, 400)
    assert restored.state["run_s"] == 12.5
    assert {int(k): v for k, v in restored.state["forks"].items()} == {1: 0, 2: 30}
    model = dict(ship.step.policy.model.state_dict())
    assert all(torch.equal(restored.training.tensors["model"][name], model[name]) for name in model)

    again = make_ship()
    again.restore(restored.state)
    assert again.ledger.report() == {
        **ship.ledger.report(),
        "trajectories/in_slots": 0,
        "trajectories/dropped": 3,
        "dropped/shutdown": 3,
    }
    assert again.episodes.mean_return == 7.0
    assert again.table.watermarks() == ship.table.watermarks() == {ACTOR.hex(): [0, 2, 3]}


async def test_the_newest_and_the_best_stay(make_ship: Callable[..., Ship]) -> None:
    ship = make_ship(keep=2)
    for update, score in enumerate((5.0, 9.0, 7.0, 8.0, 3.0), start=1):
        assert await ship.save(update, score)
    assert ship.names() == {"ckpt-1-2", "ckpt-1-4", "ckpt-1-5"}


async def test_without_a_score_only_the_newest_stay(make_ship: Callable[..., Ship]) -> None:
    ship = make_ship(keep=1)
    for update in (1, 2, 3):
        assert await ship.save(update)
    assert ship.names() == {"ckpt-1-3"}


async def test_the_best_is_known_after_a_resume(make_ship: Callable[..., Ship]) -> None:
    ship = make_ship(keep=1)
    for update, score in ((1, 9.0), (2, 4.0)):
        await ship.save(update, score)
    restored = load_newest(ship.folder)
    assert restored is not None
    again = make_ship(keep=1)
    again.restore(restored.state)
    await again.save(3, 8.0)
    assert again.names() == {"ckpt-1-1", "ckpt-1-3"}
    await again.save(4, 9.5)
    assert again.names() == {"ckpt-1-4"}


def block(folder: RunFolder) -> None:
    """A file where the checkpoints are to be: nothing can be written there, even by root."""
    folder.checkpoints.rename(folder.path / "aside")
    folder.checkpoints.write_text("in the way")


def unblock(folder: RunFolder) -> None:
    folder.checkpoints.unlink()
    (folder.path / "aside").rename(folder.checkpoints)


def no_space(descriptor: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


async def test_a_full_disk_costs_a_log_line_and_is_tried_again(
    make_ship: Callable[..., Ship],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    ship = make_ship()
    assert await ship.save(1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", no_space)
        assert not await ship.save(2)
    assert "ckpt-1-2: [Errno 28] No space left on device" in caplog.text
    assert caplog.text.rstrip().endswith("the last good one is ckpt-1-1")
    assert ship.names() == {"ckpt-1-1"}
    assert await ship.save(3)
    assert ship.names() == {"ckpt-1-1", "ckpt-1-3"}


async def test_none_is_said_to_stay_where_there_is_none(
    make_ship: Callable[..., Ship],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    ship = make_ship()
    monkeypatch.setattr(os, "fsync", no_space)
    assert not await ship.save(1)
    assert caplog.text.rstrip().endswith("No space left on device; there is no other one")


async def test_whether_the_last_one_is_on_the_disk_is_known(
    make_ship: Callable[..., Ship], monkeypatch: pytest.MonkeyPatch
) -> None:
    ship = make_ship()
    assert ship.saver.is_saved
    for update, is_full in ((1, True), (2, False), (3, True)):
        with monkeypatch.context() as patch:
            if is_full:
                patch.setattr(os, "fsync", no_space)
            ship.saver.begin(Captured(Progress(1, update, 10), ship.step.capture()))
            await ship.saver.finish()
        assert ship.saver.is_saved == (not is_full)


async def test_old_ones_that_cannot_be_removed_do_not_undo_the_new_one(
    make_ship: Callable[..., Ship],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: Any) -> None:
        raise CheckpointError("cannot remove old checkpoints")

    monkeypatch.setattr(saver, "prune", fail)
    assert await make_ship().save(1)
    assert "cannot remove old checkpoints" in caplog.text


async def test_how_much_a_checkpoint_takes_is_known_before_one_is_written(
    make_ship: Callable[..., Ship], monkeypatch: pytest.MonkeyPatch
) -> None:
    ship = make_ship()
    assert ship.folder.checkpoint_bytes == 0
    monkeypatch.setattr(os, "fsync", no_space)
    await ship.save(1)
    assert ship.folder.checkpoint_bytes >= 4 * sum(p.numel() for p in ship.step.parameters)


async def test_a_new_start_sorts_above_all_checkpoints(make_ship: Callable[..., Ship]) -> None:
    """Whatever has become of the file that counts starts."""
    ship = make_ship(keep=1)
    await ship.save(5)
    (ship.folder.checkpoints / "ckpt-1-5").rename(ship.folder.checkpoints / "ckpt-6-5")
    (ship.folder.path / "epoch").write_text("2")
    progress, _ = begin_epoch(ship.folder, None)
    assert progress.epoch == 7


async def test_a_best_that_was_never_written_does_not_replace_the_one_that_was(
    make_ship: Callable[..., Ship],
) -> None:
    ship = make_ship(keep=1)
    await ship.save(1, 9.0)
    block(ship.folder)
    await ship.save(2, 20.0)
    unblock(ship.folder)
    await ship.save(3, 5.0)
    await ship.save(4, 6.0)
    assert ship.names() == {"ckpt-1-1", "ckpt-1-4"}


async def test_the_newest_waits_for_a_slow_disk_and_the_others_are_left_out(
    make_ship: Callable[..., Ship], monkeypatch: pytest.MonkeyPatch
) -> None:
    ship, may_write, write = make_ship(keep=9), threading.Event(), Saver._write

    def write_late(*arguments: Any) -> None:
        assert may_write.wait(10)
        write(*arguments)

    monkeypatch.setattr(Saver, "_write", write_late)
    for update in range(1, 6):
        ship.saver.begin(Captured(Progress(1, update, update * 10), ship.step.capture()))
        await asyncio.sleep(0)
    may_write.set()
    await ship.saver.finish()
    assert ship.names() == {"ckpt-1-1", "ckpt-1-5"}
    assert ship.deaths == []


async def test_a_slow_disk_is_waited_for_and_told(
    make_ship: Callable[..., Ship],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    ship, is_done = make_ship(), threading.Event()
    monkeypatch.setattr(saver, "NEWS_EVERY_S", 0.01)
    monkeypatch.setattr(Saver, "_write", lambda *_: is_done.wait(10))
    caplog.set_level("INFO")
    ship.saver.begin(Captured(Progress(1, 1, 10), ship.step.capture()))
    finishing = asyncio.create_task(ship.saver.finish())
    while caplog.text.count("still writing the last checkpoint") < 2:
        await asyncio.sleep(0.01)
    assert not finishing.done()
    is_done.set()
    await finishing
    assert ship.deaths == []


async def test_a_save_that_dies_is_told(
    make_ship: Callable[..., Ship], monkeypatch: pytest.MonkeyPatch
) -> None:
    ship, error = make_ship(), RuntimeError("a bug")

    def die(*_: object) -> None:
        raise error

    monkeypatch.setattr(Saver, "_write", die)
    ship.saver.begin(Captured(Progress(1, 1, 10), ship.step.capture()))
    await ship.saver.finish()
    assert ship.deaths == [error]


async def test_a_torn_checkpoint_is_passed_over(
    make_ship: Callable[..., Ship], caplog: pytest.LogCaptureFixture
) -> None:
    ship = make_ship(keep=9)
    for update in (1, 2, 3):
        await ship.save(update)
    torn = ship.folder.checkpoints / "ckpt-1-3" / "model.safetensors"
    torn.write_bytes(torn.read_bytes()[:-1])
    (ship.folder.checkpoints / "ckpt-1-2" / "manifest.json").unlink()
    restored = load_newest(ship.folder)
    assert restored is not None
    assert restored.progress.update == 1
    assert caplog.text.count("skipping a damaged checkpoint") == 2


def test_without_a_checkpoint_training_starts_anew(
    make_ship: Callable[..., Ship], caplog: pytest.LogCaptureFixture
) -> None:
    assert load_newest(make_ship().folder) is None
    assert "holds no checkpoint, as the run ended before its first: training starts" in caplog.text


async def test_a_run_that_has_lost_its_checkpoints_is_known(make_ship: Callable[..., Ship]) -> None:
    ship = make_ship()
    ship.folder.check_resumable()
    await ship.save(1)
    await ship.save(2)
    ship.folder.check_resumable()
    shutil.rmtree(ship.folder.checkpoints)
    with pytest.raises(CheckpointError, match=r"are gone \(ckpt-1-2 was the last\)"):
        ship.folder.check_resumable()


async def test_a_note_of_what_is_not_there_is_told(
    make_ship: Callable[..., Ship], caplog: pytest.LogCaptureFixture
) -> None:
    ship = make_ship()
    await ship.save(1)
    assert load_newest(ship.folder) is not None
    assert "last_checkpoint" not in caplog.text
    for noted in ("junk\x1b[31m", "", "ckpt-1-9"):
        (ship.folder.path / "last_checkpoint").write_text(noted)
        restored = load_newest(ship.folder)
        assert restored is not None
        assert restored.progress.update == 1
        assert f"last_checkpoint: names {noted!r}, which is not there" in caplog.text


async def test_a_folder_that_is_gone_is_not_made_again(make_ship: Callable[..., Ship]) -> None:
    ship = make_ship()
    assert await ship.save(1)
    shutil.rmtree(ship.folder.path)
    assert not await ship.save(2)
    assert not ship.folder.path.exists()


async def test_a_checkpoint_of_something_else_is_refused(make_ship: Callable[..., Ship]) -> None:
    ship = make_ship()
    await ship.save(1)
    path = ship.folder.checkpoints / "ckpt-1-1"
    state: dict[str, Any] = json.loads((path / "state.json").read_text())
    for key in ("env_steps_trained", "ledger", "watermarks", "forks", "episodes", "run_s"):
        rewrite(path, {name: value for name, value in state.items() if name != key})
        with pytest.raises(CheckpointError, match=key):
            load_newest(ship.folder)


def nested(depth: int) -> dict[str, Any]:
    return {"a": nested(depth - 1)} if depth else {"a": "1"}


CRAFTED: dict[str, tuple[str, Any]] = {
    "a text": ("env_steps_trained", "10"),
    "a negative number": ("env_steps_trained", -1),
    "a truth": ("env_steps_trained", True),
    "no number": ("run_s", float("nan")),
    "more than there is": ("episodes", {"count": 1, "returns": [1e300]}),
    "a return that is none": ("episodes", {"count": 1, "returns": ["1"]}),
    "a list": ("episodes", [1]),
    "more than is known": ("episodes", {"count": 1, "returns": [1.0], "deaths": 2}),
    "a name that is none": ("watermarks", {"actor": [0, 1]}),
    "a short mark": ("watermarks", {ACTOR.hex(): [0]}),
    "a fork that is none": ("forks", {"one": 0}),
    "a best of two": ("best", [1.0, 1]),
    "accounts that are none": ("ledger", {"counts": 3}),
    "accounts that are empty": ("ledger", {}),
    "an optimizer that is none": ("optimizer", "Adam"),
    "a count in words": ("algorithm", {"num_updates": "3"}),
    "a weight that is no number": ("algorithm", {"num_updates": 3, "target": {"kl_coeff": "nan"}}),
    "a scale that is missing": ("algorithm", {"num_updates": 3, "return_scale": {"mean": None}}),
    "a depth that nobody reads": ("algorithm", nested(600)),
}


async def test_a_crafted_state_is_skipped_for_the_one_before(
    make_ship: Callable[..., Ship], caplog: pytest.LogCaptureFixture
) -> None:
    ship = make_ship()
    for update in (1, 2):
        await ship.save(update, mean_return=1.0)
    path = ship.folder.checkpoints / "ckpt-1-2"
    state = json.loads((path / "state.json").read_text())
    for what, (key, value) in CRAFTED.items():
        caplog.clear()
        rewrite(path, state | {key: value})
        restored = load_newest(ship.folder)
        assert restored is not None, what
        assert restored.progress.update == 1, what
        (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
        assert warning.startswith(f"skipping a damaged checkpoint: {path}/state.json: ")
        assert "\n" not in warning


async def test_accounts_that_do_not_add_up_are_refused(make_ship: Callable[..., Ship]) -> None:
    ship = make_ship()
    ship.ledger.admit(2)
    await ship.save(1)
    path = ship.folder.checkpoints / "ckpt-1-1"
    saved = (path / "state.json").read_text()
    for group, name in (("counts", "received"), ("counts", "trained"), ("dropped", "stale")):
        state = json.loads(saved)
        state["ledger"][group][name] += 1
        rewrite(path, state)
        with pytest.raises(CheckpointError, match=r"is whole: .* do not add up"):
            load_newest(ship.folder)


def rewrite(path: Path, state: dict[str, Any]) -> None:
    """Change the state of a checkpoint so that its manifest still fits."""
    data = json.dumps(state).encode()
    (path / "state.json").write_bytes(data)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["state.json"] = {
        "size": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
    }
    (path / "manifest.json").write_text(json.dumps(manifest))
