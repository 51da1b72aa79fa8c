"""The run folder: an epoch that only grows, files that are whole, and what is refused."""

import errno
import json
import os
import shutil
import signal
import stat
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest

from impala_async.config.load import load_config
from impala_async.errors import CheckpointError, ConfigError
from impala_async.library.run import Run
from impala_async.runs.folder import RunFolder, default_run_path, find_run
from tests.learner.columns import small_schema
from tests.learner.server_harness import config_of

CONFIG = config_of(small_schema(), algorithm={"lambda": 0.9}, env={"kwargs": {"size": [1, 2]}})
CHANGED = CONFIG.model_copy(update={"seed": 9})
full_disk = partial(patch.object, os, "fsync", side_effect=OSError("no space left on the disk"))
NO_SPACE = r"--run-dir: cannot write to .*: no space left"


@pytest.fixture
def folder(tmp_path):
    made = RunFolder(tmp_path / "run")
    made.begin(CONFIG)
    return made


@pytest.fixture
def resumed(folder):
    """The next start of the run in `folder`, with other settings."""
    folder.let_go()
    again = RunFolder(folder.path)
    again.begin(CHANGED)
    return again


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


# -------------------- settings and small files


def test_a_new_run_has_settings_and_an_id_of_its_own(folder, tmp_path):
    assert folder.exists()
    assert folder.checkpoints.is_dir()
    assert folder.load_config() == CONFIG
    assert folder.load_settings()["algorithm"]["lambda"] == 0.9
    content = json.loads((folder.path / "config.json").read_text())
    assert content["config"]["env"]["kwargs"] == {"size": [1, 2]}
    assert len(folder.run_id) == 16
    assert RunFolder(folder.path).run_id == folder.run_id
    other = RunFolder(tmp_path / "other")
    other.begin(CONFIG)
    assert other.run_id != folder.run_id


def test_a_resumed_run_has_its_new_settings_when_they_are_confirmed(folder, resumed):
    run_id = folder.run_id
    assert resumed.load_config() == CONFIG
    with full_disk(), pytest.raises(ConfigError, match=NO_SPACE):
        resumed.confirm(CHANGED)
    assert resumed.load_config() == CONFIG
    resumed.confirm(CHANGED)
    assert resumed.load_config() == CHANGED
    assert resumed.run_id == run_id


def test_the_summary_of_a_run_is_none_of_an_earlier_start(folder, tmp_path):
    folder.write_json("summary.json", {"env_steps_trained": 3})
    folder.let_go()
    again = RunFolder(folder.path)
    again.begin(CHANGED)
    with full_disk(), pytest.raises(ConfigError, match=NO_SPACE):
        again.confirm(CHANGED)
    assert Run(folder.path).summary == {"env_steps_trained": 3}
    again.confirm(CHANGED)
    with pytest.raises(CheckpointError, match=r"has no summary\.json: the run has not ended yet"):
        _ = Run(folder.path).summary


def test_a_new_run_decides_anew_what_nobody_set_and_a_resumed_one_keeps_it(tmp_path):
    folder, file = RunFolder(tmp_path), tmp_path / "config.json"
    folder.begin(load_config(None, ["env.id=X", "algorithm.num_minibatches=2"]))
    folder.let_go()
    for overrides, passes in ([], 8), (["seed=9"], 8), (["learner.num_passes=7"], 7):
        resumed = RunFolder(tmp_path)
        config = resumed.change(overrides)
        resumed.begin(config)
        resumed.confirm(config)
        resumed.let_go()
        assert resumed.load_config() == load_config(file) == config
        assert config.learner.num_passes == passes
        # One pass is what IMPALA has where nobody says otherwise, as at the last resume.
        anew = load_config(file, ["algorithm.name=impala"])
        assert anew.learner.num_passes == (1 if passes == 8 else 7)
        assert anew.algorithm.num_minibatches == 2


def test_keys_that_lockstep_decided_follow_from_the_settings_of_a_new_run(tmp_path):
    folder, file = RunFolder(tmp_path), tmp_path / "config.json"
    folder.begin(load_config(None, ["env.id=X", "pace.mode=lockstep"]))
    more, fewer = ["train.num_actors=5"], ["pace.mode=async"]
    for overrides in ([], more, fewer):
        as_new = load_config(None, ["env.id=X", "pace.mode=lockstep", *overrides])
        assert load_config(file, overrides) == as_new
    # One that somebody changed there stays, and so do all in a file of an earlier release.
    content = json.loads(file.read_text())
    content["config"]["learner"]["queue_size"] = 7
    file.write_text(json.dumps(content))
    assert load_config(file, fewer).learner.queue_size == 7
    del content["decided"]
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"learner.batch_columns \(16\) must be train.num_actors"):
        load_config(file, more)


def test_a_relative_folder_stays_where_it_was_when_the_current_one_changes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = RunFolder(Path("run"))
    folder.begin(CONFIG)
    monkeypatch.chdir("/")
    assert not folder.is_gone()
    folder.write_json("x.json", {"a": 1})
    assert RunFolder(tmp_path / "run").read_json("x.json") == folder.read_json("x.json") == {"a": 1}
    assert folder.path == Path("run"), "as it was named, to tell"
    folder.withdraw()
    assert [each.name for each in (tmp_path / "run").iterdir()] == ["x.json"]


def test_the_arguments_of_an_environment_are_private_from_the_first_byte(resumed):
    config = resumed.path / "config.json"
    assert mode(config) == 0o600
    config.chmod(0o644)  # somebody has opened it to others
    seen = []
    with patch.object(os, "fsync", side_effect=lambda fd: seen.append(os.fstat(fd).st_mode)):
        resumed.confirm(CHANGED)
    assert mode(config) == stat.S_IMODE(seen[0]) == 0o600
    resumed.announce("tcp://a:1", "tcp://a:2", 1)
    assert mode(resumed.path / "service.json") & 0o400


def test_small_files_are_whole_or_not_there(folder, caplog):
    assert folder.read_json("summary.json") is None
    folder.write_json("summary.json", {"a": 1})
    assert folder.read_json("summary.json") == {"a": 1}
    for _ in range(2):
        folder.remove("summary.json")
    assert folder.read_json("summary.json") is None
    with full_disk(), pytest.raises(ConfigError, match=NO_SPACE):
        folder.announce("tcp://a:1", "tcp://a:2", 1)
    (folder.path / "service.json").mkdir()
    folder.remove("service.json")
    assert "service.json cannot be removed: Is a directory" in caplog.text


RUN = '{"run_id": "' + 32 * "a" + '", "config": '


def test_damaged_settings_are_told(folder):
    for text in ("{", "{}", '{"run_id": "ab", "config": {}}', RUN + '[["a", 1]]}'):
        (folder.path / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"config\.json: cannot be read"):
            folder.load_config()
    # Settings that are wrong name it too.
    (folder.path / "config.json").write_text(RUN + '{"env": {"id": 3}}}')
    with pytest.raises(ConfigError, match=r"config\.json: env\.id: "):
        folder.load_config()


def test_a_default_folder_is_one_name():
    config = config_of(small_schema(), env={"id": "some.package:ALE/Pong-v5"})
    path = default_run_path(config)
    assert path.parent == Path("runs")
    assert path.name.startswith("some.package_ALE_Pong-v5-")
    assert default_run_path(config) != path


# -------------------- the epoch


def test_the_epoch_grows_by_one_at_every_start_that_could_write_it(folder, caplog):
    assert [RunFolder(folder.path).next_epoch() for _ in range(3)] == [1, 2, 3]
    epoch = folder.path / "epoch"
    assert epoch.read_text() == "3"
    with full_disk(), pytest.raises(ConfigError, match=NO_SPACE):
        folder.next_epoch()
    assert folder.next_epoch() == 4
    epoch.write_text("2\n")  # as an editor leaves it
    assert folder.next_epoch() == 3
    assert caplog.text == ""
    # It is never behind the checkpoints.
    assert folder.next_epoch(saved=7) == 8
    assert "3, but there are checkpoints of 7" in caplog.text
    assert folder.next_epoch(saved=7) == 9
    with pytest.raises(CheckpointError, match="no run has more than 99,999,999 starts"):
        folder.next_epoch(saved=10**8 - 1)
    assert folder.next_epoch() == 10


def test_an_epoch_that_is_no_number_is_refused_and_not_guessed(folder):
    epoch = folder.path / "epoch"
    told = r"epoch: wants a whole number of at most 8 digits, got .*: write the number of starts"
    for torn in ("", "two", "1.5", "-1", "9" * 9, "9" * 70):
        epoch.write_text(torn)
        with pytest.raises(CheckpointError, match=told):
            folder.next_epoch()
    # Where nobody knows what is in it, it is not to be written anew.
    epoch.unlink()
    os.mkfifo(epoch)
    with pytest.raises(CheckpointError, match=r"epoch: cannot be read: [^:]*$"):
        folder.check_resumable()


# -------------------- where a run may begin, or go on


def test_a_new_run_begins_in_a_new_or_an_empty_folder(tmp_path):
    RunFolder(tmp_path / "none").check_new()
    RunFolder(tmp_path).check_new()
    # Put there for a learner, by those who start it, or by a start that was killed.
    for name in ("actors", "lost+found", "checkpoints"):
        (tmp_path / name).mkdir()
    for name in (".config.json.4711", ".epoch.4712", ".mine"):
        (tmp_path / name).touch()
    RunFolder(tmp_path).check_new()
    for other in ("checkpoints/ckpt-1-1", "thesis.tex"):
        (tmp_path / other).touch()
        name = other.rpartition("/")[2]
        says = rf"--run-dir: .* holds other files \({name}\) and no run: name a"
        with pytest.raises(ConfigError, match=says):
            RunFolder(tmp_path).check_new()
        (tmp_path / other).unlink()
    begun = RunFolder(tmp_path)
    begun.begin(CONFIG)
    begun.let_go()
    # Gone is all that such a start had half written.
    kept = {"checkpoints", "config.json", "actors", "lost+found", ".mine"}
    assert {*os.listdir(tmp_path)} == kept
    with pytest.raises(ConfigError, match="already holds a run"):
        RunFolder(tmp_path).check_new()


def test_where_nothing_can_be_made_or_written_the_flag_is_wrong(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match="--run-dir: cannot write to"):
        RunFolder(tmp_path / "file" / "run").begin(CONFIG)
    (tmp_path / "link").symlink_to("unmounted")
    for name in ("link", "link/run"):
        with pytest.raises(ConfigError, match=r": .*/link is a link to unmounted, which is not th"):
            RunFolder(tmp_path / name).begin(CONFIG)
    folder = RunFolder(tmp_path / "in the way")
    (folder.path / "service.json").mkdir(parents=True)
    for what in (folder.check_free, lambda: folder.announce("tcp://a:1", "tcp://a:2", epoch=1)):
        with pytest.raises(ConfigError, match=r"cannot write to .*/in the way/service\.json: Is a"):
            what()
    assert not folder.is_taken()
    made = os.mkdir

    def make(path, mode=0o777):
        if Path(path).parent.name == "checkpoints":
            raise OSError(refused, os.strerror(refused), str(path))
        made(path, mode)

    monkeypatch.setattr(os, "mkdir", make)
    for refused in (errno.EACCES, errno.EROFS):
        with pytest.raises(ConfigError, match=rf"/checkpoints/.*: {os.strerror(refused)}"):
            RunFolder(tmp_path / f"run {refused}").begin(CONFIG)


def test_a_folder_that_cannot_be_looked_into_is_told(tmp_path):
    folder = RunFolder(tmp_path / (300 * "n"))
    with pytest.raises(ConfigError, match=r"--run-dir: cannot write to .*: File name too long"):
        folder.check_new()
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read: File name too long"):
        folder.check_resumable()
    # When a run is over it has its exit code.
    assert folder.peek_json("summary.json") is None


def test_to_resume_there_must_be_a_run_with_its_checkpoints(folder):
    with pytest.raises(CheckpointError, match="holds no run"):
        RunFolder(folder.path.parent).check_resumable()
    # A disk that was full when a checkpoint should be noted has not lost one.
    with full_disk():
        folder.note_saved("ckpt-1-1")
    folder.check_resumable()
    folder.note_saved("ckpt-1-2")
    gone = r"checkpoints: the checkpoints of this run are gone, or cannot be read: put them back"
    with pytest.raises(CheckpointError, match=gone):
        folder.check_resumable()
    (folder.checkpoints / "ckpt-1-2").mkdir()
    folder.check_resumable()
    shutil.rmtree(folder.checkpoints)
    # A link to itself cannot be read.
    folder.checkpoints.symlink_to("checkpoints")
    with pytest.raises(CheckpointError, match=gone):
        folder.check_resumable()
    folder.checkpoints.unlink()
    (folder.path / "last_checkpoint").unlink()
    with pytest.raises(CheckpointError, match=gone):
        folder.check_resumable()


# -------------------- one learner holds it


def test_a_folder_belongs_to_one_learner_and_is_free_when_that_has_gone(folder):
    folder.announce("tcp://h:1", "tcp://h:2", 1)
    second = RunFolder(folder.path)
    says = rf"in use by a run of another learner \(process {os.getpid()}\): let it end"
    for take in (second.check_free, second.check_new, lambda: second.begin(CONFIG)):
        with pytest.raises(ConfigError, match=says):
            take()
    assert folder.read_json("service.json") is not None
    folder.let_go()
    second.check_free()
    # It says of no learner that has gone.
    assert folder.read_json("service.json") is None
    second.begin(CONFIG)


def test_a_process_that_foreign_code_forks_does_not_hold_the_folder(folder):
    """It lives on when the learner has gone."""
    is_forked, tell = os.pipe()
    child = os.fork()
    if not child:
        os.write(tell, b".")
        signal.pause()
    try:
        os.read(is_forked, 1)
        folder.let_go()
        RunFolder(folder.path).check_free()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.parametrize("how", ["removed", "renamed", "emptied", "another is there"])
def test_a_folder_that_is_gone_is_known_and_not_written_into(folder, caplog, how):
    # One that fails is not gone.
    config = folder.path / "config.json"
    kept = config.rename(folder.path / "kept.json")
    config.symlink_to("config.json")
    assert not folder.is_gone()
    kept.rename(config)
    if how == "emptied":
        (folder.path / "config.json").unlink()
    elif how == "removed":
        shutil.rmtree(folder.path)
    else:
        folder.path.rename(folder.path.with_name("moved"))
    if how == "another is there":
        folder.path.mkdir()
        for name in ("config.json", "service.json", "epoch"):
            (folder.path / name).write_text("theirs")
    before = sorted(folder.path.iterdir()) if folder.path.exists() else None
    assert folder.is_gone()
    with pytest.raises(OSError, match="its folder is gone"):
        folder.write_json("summary.json", {})
    folder.remove("service.json")
    folder.withdraw()
    assert (sorted(folder.path.iterdir()) if folder.path.exists() else None) == before
    # It does not come back, not even when nobody holds it any more, and is told once.
    assert folder.is_gone()
    said = (
        "its config.json is gone" if how == "emptied" else "it is gone, or another one lies there"
    )
    assert caplog.text.count(said) == len(caplog.records) == 1


def test_a_run_is_found_by_its_folder_its_checkpoints_or_one_of_them(folder, tmp_path):
    one = folder.checkpoints / "ckpt-1-2"
    one.mkdir(parents=True)
    best = folder.best / "ckpt-1-1"
    best.mkdir(parents=True)
    for path, where, named in (
        (folder.path, folder.checkpoints, None),
        (folder.checkpoints, folder.checkpoints, None),
        (one, folder.checkpoints, one),
        (folder.best, folder.best, None),
        (best, folder.best, best),
    ):
        found, checkpoints, checkpoint = find_run(path)
        assert (found.path, checkpoints, checkpoint) == (folder.path, where, named)
    for path in (tmp_path, folder.path / "epoch", tmp_path / "none"):
        with pytest.raises(CheckpointError, match=f"^{path}: "):
            find_run(path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=rf"; did you mean {folder.path}\?$"):
        find_run(tmp_path)
    folder.checkpoints.rename(tmp_path / "disk")
    folder.checkpoints.symlink_to(tmp_path / "disk")
    for path, named in ((folder.checkpoints, None), (one, one)):
        assert find_run(path)[1:] == (folder.checkpoints, named)


# -------------------- a start that failed


def test_a_start_that_failed_leaves_nothing_in_the_way(tmp_path):
    run = tmp_path / "run"
    folder = RunFolder(run)
    folder.begin(CONFIG)
    folder.next_epoch()
    folder.keep_spaces({"action": {}})
    folder.withdraw()
    assert not run.exists()
    folder.begin(CONFIG)
    (run / "note").write_text("mine")
    (run / f".epoch.{os.getpid()}").write_text("cut off")
    folder.metrics.write_text("{}")
    folder.withdraw()
    assert os.listdir(run) == ["note"]
    # A log in which there is nothing goes too.
    (run / "note").unlink()
    (run / "actors").mkdir()
    for said in ("", "no GL"):
        folder.begin(CONFIG)
        (run / "actors" / "actor-0.log").write_text(said)
        folder.withdraw()
        assert run.exists() == bool(said)
        (run / "actors").mkdir(parents=True, exist_ok=True)
    assert os.listdir(run / "actors") == ["actor-0.log"]


def test_a_run_with_a_result_or_of_an_earlier_start_is_not_withdrawn(tmp_path, folder, resumed):
    resumed.withdraw()
    assert folder.load_config() == CONFIG
    for result in ("summary.json", "checkpoints/ckpt-1-0"):
        folder = RunFolder(tmp_path / result[:4])
        folder.begin(CONFIG)
        (folder.path / result).touch()
        folder.withdraw()
        assert folder.load_config() == CONFIG
