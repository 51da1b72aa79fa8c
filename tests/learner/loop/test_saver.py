"""Checkpoints of a run: what is in them, which stay, and what happens when the disk is full."""

import errno
import hashlib
import json
import os
import shutil
import threading
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from impala_async.config.evaluate import EvaluateSection
from impala_async.errors import CheckpointError
from impala_async.learner.handoff import Captured, Progress
from impala_async.learner.loop import saver
from impala_async.learner.loop.reporter import EpisodeStats
from impala_async.learner.loop.saver import Saver, begin_epoch, load_newest
from impala_async.learner.slots import Ledger, Settlement
from impala_async.policy import Policy
from impala_async.runs.folder import RunFolder
from impala_async.training.step import UpdateStep
from impala_async.weights import NO_VERSION, Lineage, Version
from impala_async.wire.messages import EPISODE, PROTOCOL, Hello
from impala_async.wire.session import SessionTable
from tests.learner.columns import small_schema
from tests.learner.server_harness import RUN_ID, config_of

ACTOR = b"a" * 16


class Run:
    """A saver and all that it saves."""

    def __init__(self, folder, *, keep=2, lineage=None, num_ranks=1):
        self.folder = folder
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
            evaluate=EvaluateSection(),
            num_ranks=num_ranks,
        )
        config = config_of(small_schema())
        policy = Policy(small_schema(), config.model, seed=3)
        self.step = UpdateStep(policy, config.algorithm)

    def accounts(self):
        return {"ledger": self.ledger.save(), "watermarks": self.table.watermarks()}

    def restore(self, training):
        self.ledger.restore(training.state["ledger"])
        self.table.restore_watermarks(training.state["watermarks"], 0.0)
        self.saver.restore(training)

    async def save(self, update, mean_return=None):
        if mean_return is not None:
            self.episodes.take(np.array([(mean_return, 1)] * 100, EPISODE))
        progress = Progress(1, update, env_steps_trained=update * 10)
        return await self.saver.save(Captured(progress, self.step.capture()))

    def names(self):
        return {path.name for path in self.folder.checkpoints.iterdir()}


@pytest.fixture
def make_run(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.begin(config_of(small_schema()))
    return lambda **settings: Run(folder, **settings)


async def test_everything_that_is_saved_comes_back(make_run):
    run = make_run(lineage=Lineage(1, {1: 0}).resumed(2, 30))
    run.ledger.admit(7)
    run.ledger.reject(2, "duplicate")
    run.ledger.submit(1, 4)
    run.ledger.settle(Settlement(1, trained=4, passes_done=4))
    peer = run.table.hello(Hello(PROTOCOL, ACTOR, "b", RUN_ID, 1, 0), b"r", 0.0)
    peer.columns = 1
    for _ in range(4):
        peer.extend()
    for seq in (0, 1, 3):
        run.table.settle(peer, seq, None)
    assert await run.save(40, mean_return=7.0)

    restored = load_newest(run.folder)
    assert restored.progress == Progress(1, 40, 400)
    assert restored.training.state["run_s"] == 12.5
    assert {int(k): v for k, v in restored.training.state["forks"].items()} == {1: 0, 2: 30}
    model = dict(run.step.policy.model.state_dict())
    assert all(torch.equal(restored.training.tensors["model"][name], model[name]) for name in model)

    again = make_run()
    again.restore(restored.training)
    assert again.ledger.report() == {
        **run.ledger.report(),
        "trajectories/in_slots": 0,
        "trajectories/dropped": 3,
        "dropped/shutdown": 3,
    }
    assert again.episodes.mean_return == 7.0
    assert again.table.watermarks() == run.table.watermarks() == {ACTOR.hex(): [0, 2, 3]}


async def test_the_newest_and_the_best_stay_and_after_a_resume_too(make_run):
    run = make_run(keep=2)
    for update in (1, 2, 3):
        assert await run.save(update)
    # Without a score only the newest.
    assert run.names() == {"ckpt-1-2", "ckpt-1-3"}
    for update, score in enumerate((5.0, 9.0, 7.0, 8.0, 3.0), start=4):
        assert await run.save(update, score)
    assert run.names() == {"ckpt-1-5", "ckpt-1-7", "ckpt-1-8"}
    restored = load_newest(run.folder)
    again = make_run(keep=1)
    again.restore(restored.training)
    await again.save(9, 8.0)
    assert again.names() == {"ckpt-1-5", "ckpt-1-9"}
    await again.save(10, 9.5)
    assert again.names() == {"ckpt-1-10"}


async def test_the_best_is_kept_though_the_one_before_cannot_be_removed(
    make_run, monkeypatch, caplog
):
    run = make_run()
    captured = Captured(Progress(1, 3), run.step.capture())
    monkeypatch.setattr(saver, "prune", Mock(side_effect=CheckpointError("cannot remove old")))
    await run.saver.save_best(captured, run.saver.state_of(captured), 5.0)
    assert run.saver.best_evaluated == (5.0, "best/ckpt-1-3", "greedy")
    assert caplog.messages == ["cannot remove old"]
    monkeypatch.setattr(saver, "save_checkpoint", Mock(side_effect=CheckpointError("it is full")))
    await run.saver.save_best(captured, run.saver.state_of(captured), 6.0)
    assert run.saver.best_evaluated == (5.0, "best/ckpt-1-3", "greedy")
    assert caplog.messages[-1] == "the best weights so far are not kept: it is full"


async def test_a_disk_that_fails_for_a_while_has_not_lost_the_best(make_run, monkeypatch):
    run = make_run()
    captured = Captured(Progress(1, 3), run.step.capture())
    await run.saver.save_best(captured, run.saver.state_of(captured), 5.0)
    for error, best in (
        (OSError(errno.EIO, "Input/output error"), (5.0, "best/ckpt-1-3", "greedy")),
        (FileNotFoundError(errno.ENOENT, "No such file"), None),
    ):
        monkeypatch.setattr(Path, "stat", Mock(side_effect=error))
        assert run.saver.best_evaluated == best


async def test_with_other_ranks_the_newest_that_all_have_stays_too(make_run, monkeypatch):
    run = make_run(keep=2, num_ranks=2)
    for update in (1, 2):
        assert await run.save(update, 9.0)
        assert run.saver.saved == [Version(1, update)]
    run.saver.note_common(Version(1, 2))
    # From now on another rank's disk is full.
    for update in range(3, 9):
        assert await run.save(update, 5.0)
        assert run.names() >= {"ckpt-1-1", "ckpt-1-2"}
    assert run.names() == {"ckpt-1-1", "ckpt-1-2", "ckpt-1-7", "ckpt-1-8"}
    # One that was not written is not said to be there.
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", Mock(side_effect=NO_SPACE))
        assert not await run.save(9)
    assert run.saver.saved == [Version(1, 8)]
    # It has room again: the one before may go.
    run.saver.note_common(Version(1, 8))
    assert await run.save(10)
    assert run.names() == {"ckpt-1-1", "ckpt-1-8", "ckpt-1-10"}


@pytest.mark.parametrize("num_ranks", [1, 2])
async def test_until_all_ranks_have_saved_anew_the_one_that_they_went_on_from_stays(
    num_ranks, make_run
):
    await make_run().save(5)
    again = make_run(keep=2, num_ranks=num_ranks)
    again.restore(load_newest(again.folder).training)
    assert again.saver.saved == [NO_VERSION]
    for update in range(6, 9):
        assert await again.save(update)
    spared = {"ckpt-1-5"} if num_ranks > 1 else set()
    assert again.names() == {"ckpt-1-7", "ckpt-1-8"} | spared


NO_SPACE = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
NO_THREAD = RuntimeError("can't start new thread")


async def test_what_fails_costs_a_log_line_and_is_tried_again(make_run, monkeypatch, caplog):
    run = make_run(keep=1)
    assert run.folder.checkpoint_bytes == 0

    async def fail(update, score=None, owner=os, name="fsync", error=NO_SPACE):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, Mock(side_effect=error))
            assert not await run.save(update, score)
        return caplog.text.rstrip()

    said = await fail(1, None, threading.Thread, "start", NO_THREAD)
    assert said.endswith("can't start new thread; no other one can be read")
    assert (await fail(1, 1.0)).endswith("No space left on device; no other one can be read")
    # How much it takes is known before one is written.
    assert run.folder.checkpoint_bytes >= 4 * sum(p.numel() for p in run.step.parameters)
    assert await run.save(2, 9.0)
    # A best that was never written does not replace the one that was.
    text = await fail(3, 20.0)
    assert "ckpt-1-3: [Errno 28] No space left on device" in text
    assert text.endswith("the last good one is ckpt-1-2")
    assert run.names() == {"ckpt-1-2"}
    assert await run.save(4)
    await run.save(5, 5.0)
    await run.save(6, 6.0)
    assert run.names() == {"ckpt-1-4", "ckpt-1-6"}
    # Old ones that cannot be removed do not undo the new one.
    monkeypatch.setattr(saver, "prune", Mock(side_effect=CheckpointError("cannot remove old")))
    assert await run.save(7)
    assert "cannot remove old" in caplog.text


async def test_checkpoints_of_a_run_that_takes_the_place_are_left_alone(
    make_run, monkeypatch, caplog
):
    run, save = make_run(keep=1), saver.save_checkpoint
    assert await run.save(1)

    def save_slowly(directory, *what):
        path = save(directory, *what)
        here = run.folder.path
        shutil.copytree(here, here.with_name("other"))
        here.rename(here.with_name("moved"))
        here.with_name("other").rename(here)
        return path

    monkeypatch.setattr(saver, "save_checkpoint", save_slowly)
    assert not await run.save(2)
    assert run.names() == {"ckpt-1-1", "ckpt-1-2"}
    assert run.folder.last_saved() == "ckpt-1-1"
    (told,) = caplog.messages
    assert "it is gone, or another one lies there" in told


async def test_without_a_sound_checkpoint_training_starts_anew_or_not_at_all(make_run, caplog):
    run = make_run(keep=9)
    assert load_newest(run.folder) is None
    assert "holds no checkpoint, as the run ended before its first: training starts" in caplog.text
    for update in (1, 2, 3):
        await run.save(update)
    torn = run.folder.checkpoints / "ckpt-1-3" / "model.safetensors"
    torn.write_bytes(torn.read_bytes()[:-1])
    (run.folder.checkpoints / "ckpt-1-2" / "manifest.json").unlink()
    assert load_newest(run.folder).progress.update == 1
    assert caplog.text.count("skipping a damaged checkpoint") == 2
    shutil.rmtree(run.folder.checkpoints / "ckpt-1-1")
    with pytest.raises(CheckpointError, match="no checkpoint there is whole"):
        load_newest(run.folder)


async def test_a_note_of_what_is_not_there_is_told(make_run, caplog):
    run = make_run()
    await run.save(1)
    assert load_newest(run.folder) is not None
    assert "last_checkpoint" not in caplog.text
    for noted in ("junk\x1b[31m", "", "ckpt-1-9"):
        (run.folder.path / "last_checkpoint").write_text(noted)
        assert load_newest(run.folder).progress.update == 1
        assert f"last_checkpoint: names {noted!r}, which is not there" in caplog.text


def nested(depth):
    return {"a": nested(depth - 1)} if depth else {"a": "1"}


# Each is wrong: what the state lacks, or another value of it.
KEYS = ("env_steps_trained", "ledger", "watermarks", "forks", "episodes", "run_s")
CRAFTED = [
    ("env_steps_trained", "10"),
    ("env_steps_trained", -1),
    ("env_steps_trained", True),
    ("run_s", float("nan")),
    ("episodes", {"count": 1, "returns": [1e300]}),
    ("episodes", {"count": 1, "returns": ["1"]}),
    ("episodes", [1]),
    ("episodes", {"count": 1, "returns": [1.0], "deaths": 2}),
    ("watermarks", {"actor": [0, 1]}),
    ("watermarks", {ACTOR.hex(): [0]}),
    ("forks", {"one": 0}),
    ("best", [1.0, 1]),
    ("ledger", {"counts": 3}),
    ("ledger", {}),
    ("optimizer", "Adam"),
    ("algorithm", {"num_updates": "3"}),
    ("algorithm", {"num_updates": 3, "target": {"kl_coeff": "nan"}}),
    ("algorithm", {"num_updates": 3, "return_scale": {"mean": None}}),
    ("algorithm", nested(600)),
]


async def test_a_crafted_state_is_skipped_for_the_one_before(make_run, caplog):
    run = make_run()
    for update in (1, 2):
        await run.save(update, mean_return=1.0)
    path = run.folder.checkpoints / "ckpt-1-2"
    state = json.loads((path / "state.json").read_text())
    wrong = [state | {key: value} for key, value in CRAFTED]
    wrong += [{name: value for name, value in state.items() if name != key} for key in KEYS]
    for crafted in wrong:
        caplog.clear()
        rewrite(path, crafted)
        restored = load_newest(run.folder)
        what = [key for key in state if crafted.get(key, path) != state[key]]
        assert restored is not None, what
        assert restored.progress.update == 1, what
        (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
        assert warning.startswith(f"skipping a damaged checkpoint: {path}/state.json: ")
        assert what[0] in crafted or what[0] in warning
        assert "\n" not in warning


async def test_accounts_that_do_not_add_up_are_refused(make_run, caplog):
    run = make_run()
    run.ledger.admit(2)
    await run.save(1)
    path = run.folder.checkpoints / "ckpt-1-1"
    saved = (path / "state.json").read_text()
    for group, name in (("counts", "received"), ("counts", "trained"), ("dropped", "stale")):
        state = json.loads(saved)
        state["ledger"][group][name] += 1
        rewrite(path, state)
        with pytest.raises(CheckpointError, match="no checkpoint there is whole"):
            load_newest(run.folder)
        assert "do not add up" in caplog.messages[-1]


def rewrite(path, state):
    """Change the state of a checkpoint so that its manifest still fits."""
    data = json.dumps(state).encode()
    (path / "state.json").write_bytes(data)
    manifest = json.loads((path / "manifest.json").read_text())
    digest = hashlib.sha256(data).hexdigest()
    manifest["files"]["state.json"] = {"size": len(data), "sha256": digest}
    (path / "manifest.json").write_text(json.dumps(manifest))


def test_a_start_has_an_epoch_over_those_of_all_checkpoints(tmp_path):
    """The file that counts starts may be older, put back from elsewhere perhaps."""
    folder = RunFolder(tmp_path)
    (folder.checkpoints / "ckpt-7-3").mkdir(parents=True)
    assert begin_epoch(folder, None)[0].epoch == 8
