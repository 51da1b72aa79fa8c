"""Recording and replaying with real processes: the same run to the last bit, though nobody waited
for anybody when it was recorded; a learner that is killed; a benchmark."""

import hashlib
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from impala_async.replay.index import RecordingIndex
from tests.e2e import harness
from tests.e2e.harness import Door, Site, identities_hold, wait_until

pytestmark = pytest.mark.e2e

CARTPOLE = "configs/cartpole.toml"
# What differs with every batch that differs. Of the last report: of the learning itself.
LEARNED = ("loss/total", "loss/policy", "loss/value", "grad/norm", "policy/entropy", "lag/mean")
SAME = ("env_steps_trained", "updates", "lag_quantiles")
# Several passes and batches side by side, and widths that no batch is a multiple of.
HARD = (
    *("algorithm.name=appo", "algorithm.num_minibatches=2", "algorithm.normalize_returns=true"),
    *("learner.num_passes=3", "learner.minibatch_buffer_size=2", "learner.init_num_passes=2"),
    *("learner.publish_every_updates=4", "learner.batch_columns=10", "actor.num_envs=4"),
    *("stop.mean_return=none", "stop.env_steps=20000"),
)


def outcome(run_dir: Path) -> dict[str, Any]:
    """All that an exact replay must have in common with its recording."""
    summary = json.loads((run_dir / "summary.json").read_text())
    last = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    assert identities_hold(last)
    checkpoints = run_dir / "checkpoints"
    newest = checkpoints / f"ckpt-1-{summary['updates']}"
    return {
        **{name: summary[name] for name in SAME},
        **{name: last[name] for name in LEARNED},
        **{
            path.name: hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(newest.glob("*.safetensors"))
        },
    }


def replay(folder: Path, recording: Path, *flags: str) -> tuple[Door, Path]:
    run_dir = folder / "run"
    folder.mkdir()
    with harness.site(folder) as opened:
        door = opened.open("replay", str(recording), "--run-dir", str(run_dir), *flags)
        assert door.wait_exit(90) == 0, door.log
    return door, run_dir


@pytest.mark.slow
def test_a_run_of_train_is_made_again_to_the_last_bit(tmp_path: Path, site: Site) -> None:
    recording = tmp_path / "recording"
    flags = ["--config", CARTPOLE, "--run-dir", str(site.run_dir), "--set", "stop.mean_return=60"]
    door = site.open("train", "--record", str(recording), *flags)
    assert door.wait_exit(90) == 0, door.log
    recorded = outcome(site.run_dir)
    again, run_dir = replay(tmp_path / "again", recording, "--exact")
    assert outcome(run_dir) == recorded
    assert recorded["updates"] > 5
    assert "the same weights and optimizer state as recorded, to the last bit" in again.log


def test_so_it_is_with_passes_rings_and_actors_of_any_width(tmp_path: Path, site: Site) -> None:
    recording = tmp_path / "recording"
    learner = site.learner(*HARD, config=CARTPOLE, record=str(recording))
    for width in (1, 3, 7):
        site.actor("--num-envs", str(width))
    assert learner.wait_exit(60) == 0, learner.log
    recorded = outcome(site.run_dir)
    index = RecordingIndex(recording)
    widths = {index.message(number).data.columns for number in range(len(index))}
    assert widths == {1, 3, 7}
    assert {f"{name}.safetensors" for name in ("model", "optimizer", "target")} <= recorded.keys()
    again, run_dir = replay(tmp_path / "again", recording, "--exact")
    assert outcome(run_dir) == recorded
    assert "to the last bit" in again.log


@pytest.mark.slow
def test_a_killed_learner_leaves_a_recording_and_its_resumed_run_makes_another(
    tmp_path: Path, site: Site
) -> None:
    recording, another = tmp_path / "recording", tmp_path / "another"
    settings = (
        *("stop.mean_return=none", "stop.env_steps=none"),
        *("checkpoint.every_s=2", "checkpoint.keep=1000"),
    )
    first = site.learner(*settings, config=CARTPOLE, record=str(recording))
    site.actor()
    wait_until("a checkpoint", lambda: list((site.run_dir / "checkpoints").glob("ckpt-1-[1-9]*")))
    # What it was trained on is in the file when that has grown twice: once may have been begun.
    for _ in range(2):
        size = recording.stat().st_size
        wait_until("more", lambda size=size: recording.stat().st_size > size)  # type: ignore[misc]
    first.signal(signal.SIGKILL)
    first.wait_exit()
    # As a kill in mid-write leaves it.
    with recording.open("ab") as file:
        file.write(b"half a record")
    before = recording.read_bytes()
    refused = site.open(
        "learner", "--resume", "--run-dir", str(site.run_dir), "--record", str(recording)
    )
    assert refused.wait_exit() == 2
    assert "a recording is of one start of a learner: name another file" in refused.log
    assert recording.read_bytes() == before
    second = site.learner(resume=True, record=str(another))
    site.actor()
    site.wait_report("training", lambda r: bool(r["recording/messages"] and r["updates"]))
    second.signal(signal.SIGTERM)
    assert second.wait_exit() == 0, second.log
    killed, resumed = RecordingIndex(recording), RecordingIndex(another)
    assert (killed.end, killed.start.epoch, killed.start.update) == (None, 1, 0)
    assert resumed.start.epoch == 2
    assert resumed.end is not None
    assert resumed.end.update >= resumed.start.update > 0
    again, run_dir = replay(tmp_path / "again", recording, "--exact")
    assert "its last record is cut off, and left out" in again.log
    assert "nothing to compare" in again.log
    # All that a checkpoint was made of is there.
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["updates"] >= resumed.start.update
    late = site.open("replay", str(another), "--exact")
    assert late.wait_exit() == 2
    assert f"begins at update {resumed.start.update}" in late.log


def test_a_learner_is_fed_from_a_file_as_long_as_one_likes(tmp_path: Path, site: Site) -> None:
    recording = tmp_path / "recording"
    learner = site.learner(
        "stop.mean_return=none", "stop.env_steps=3000", config=CARTPOLE, record=str(recording)
    )
    site.actor()
    assert learner.wait_exit(60) == 0, learner.log
    # Far more than was recorded.
    goal = ("--set", "stop.env_steps=15000")
    _, run_dir = replay(tmp_path / "fed", recording, "--loop", *goal)
    last = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    assert identities_hold(last)
    assert last["env_steps_trained"] >= 15_000
    assert last["trajectories/rejected"] == 0
    assert last["lag/max"] <= 5
    with harness.site(tmp_path) as endless:
        door = endless.open("replay", str(recording), "--loop", "--run-dir", str(tmp_path / "on"))
        wait_until("reports", lambda: (tmp_path / "on" / "metrics.jsonl").exists())
        door.signal(signal.SIGINT)
        assert door.wait_exit() == 130, door.log
        assert "times the recording" in door.log
