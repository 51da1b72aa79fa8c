"""The checkpoint that all ranks have, and what becomes of accounts where their number changes."""

import pytest
import torch

from impala_async.config.ranks import Place
from impala_async.errors import CheckpointError, ConfigError
from impala_async.learner.agreement import Word
from impala_async.learner.restoring import merge_watermarks, restore
from impala_async.learner.slots import Ledger
from impala_async.runs.folder import RunFolder
from impala_async.training.checkpoint import prune, save_checkpoint
from impala_async.training.ranks import Ranks
from impala_async.weights import NO_VERSION, Version
from tests.learner.test_agreement import at_once

ACTOR = "ab" * 16


def folders_of(path, count):
    return [RunFolder(Place(number, count).folder(path)) for number in range(count)]


def save(folder, version, *, weight=1.0, count=1, columns=0, marks=None):
    """A checkpoint of a rank that has trained so many columns."""
    ledger = Ledger().save()
    for name in ("received", "admitted", "trained"):
        ledger["counts"][name] = columns
    state = {
        "env_steps_trained": 100 * version[1],
        "run_s": 1.0,
        "forks": {"1": 0},
        "episodes": {"count": columns, "returns": []},
        "ledger": ledger,
        "watermarks": marks or {},
        "optimizer": {},
        "algorithm": {"num_updates": version[1]},
        **({"num_ranks": count} if count > 1 else {}),
    }
    tensors = {"model": {"w": torch.full((3,), weight)}, "optimizer": {}}
    folder.path.mkdir(parents=True, exist_ok=True)
    save_checkpoint(folder.checkpoints, Version(*version), tensors, state)


def restored(path, count):
    """All of so many ranks go on with what is there."""
    return at_once(restore, *folders_of(path, count))


def trained(found):
    return [each.training.state["ledger"]["counts"]["trained"] for each in found]


@pytest.mark.parametrize(
    ("first", "second", "versions"),
    [
        # Rank 0 has an update of a start from which nobody went on, that rank 1 has of the next.
        ({(1, 10): 1.0, (1, 20): 2.0}, {(1, 10): 1.0, (2, 20): 3.0}, [(1, 10), (1, 10)]),
        ({(1, 20): 2.0, (3, 20): 3.0}, {(2, 20): 3.0}, [(3, 20), (2, 20)]),
    ],
)
def test_ranks_go_on_from_checkpoints_with_the_same_weights(first, second, versions, tmp_path):
    for folder, saved in zip(folders_of(tmp_path, 2), (first, second), strict=True):
        for version, weight in saved.items():
            save(folder, version, weight=weight, count=2)
    found = restored(tmp_path, 2)
    assert [each.progress.version for each in found] == versions


@pytest.mark.parametrize(
    ("saves", "update"),
    [
        (("111111", "11...."), 2),
        # The third is the newest of rank 0, and rank 1 has later ones only.
        (("111...", "11.111"), 2),
        (("11.1.1.", "1.1.1.1"), 1),
        (("11111.", "1.1111", "11.111"), 5),
    ],
)
def test_though_saves_fail_ranks_go_on_from_the_last_that_all_had(saves, update, tmp_path):
    """Each keeps the newest two, and what their words have told it to spare."""
    folders, common = folders_of(tmp_path, len(saves)), None
    newest = [NO_VERSION] * len(folders)
    for number, are_saved in enumerate(zip(*saves, strict=True), 1):
        for rank, folder in enumerate(folders):
            if are_saved[rank] == "1":
                newest[rank] = Version(1, number)
                save(folder, newest[rank], weight=float(number), count=len(folders))
                prune(folder.checkpoints, 2, common)
        common = Word(saved=tuple(newest)).common or common
    found = restored(tmp_path, len(folders))
    assert {each.progress.version for each in found} == {(1, update)}


@pytest.mark.parametrize(("count", "accounts"), [(1, [12]), (2, [5, 7]), (3, [5, 7, 0])])
def test_no_account_is_lost_where_the_number_of_ranks_changes(count, accounts, tmp_path):
    first, second = folders_of(tmp_path, 2)
    save(first, (1, 10), count=2, columns=5, marks={ACTOR: [0, 3, 5]})
    save(second, (1, 10), count=2, columns=7, marks={ACTOR: [4, 6], "cd" * 16: [1, 2]})
    # This one was not written everywhere.
    save(first, (1, 20), count=2, columns=99, weight=2.0)
    found = restored(tmp_path, count)
    assert trained(found) == accounts
    assert [each.training.state["episodes"]["count"] for each in found] == accounts
    assert {each.progress.version for each in found} == {(1, 10)}
    for each in found:
        # An actor may come to any of them now.
        assert each.training.state["watermarks"] == {ACTOR: [0, 6], "cd" * 16: [1, 2]}
        Ledger().restore(each.training.state["ledger"])


def test_folders_of_ranks_that_a_run_no_longer_has_do_not_count_again(tmp_path):
    ranks = folders_of(tmp_path, 3)
    for folder in ranks:
        save(folder, (1, 10), count=3, columns=5)
    # Two went on, and one took over the accounts of the third. They ended without an update.
    for folder, columns in zip(ranks, (10, 5), strict=False):
        save(folder, (2, 10), count=2, columns=columns)
    assert trained(restored(tmp_path, 3)) == [10, 5, 0]
    assert trained(restored(tmp_path, 1)) == [15]
    save(ranks[0], (3, 10), columns=15)
    assert trained(restored(tmp_path, 2)) == [15, 0]


def test_the_first_checkpoint_of_more_ranks_that_not_all_have_leaves_the_one_before(
    tmp_path, caplog
):
    first, second, _ = folders_of(tmp_path, 3)
    for folder in (first, second):
        save(folder, (1, 10), count=2, columns=5)
    save(first, (2, 20), count=3, columns=9, weight=2.0)
    for count, accounts in ((1, [10]), (2, [5, 5]), (3, [5, 5, 0])):
        found = restored(tmp_path, count)
        assert trained(found) == accounts
        assert {each.progress.version for each in found} == {(1, 10)}
        lost = [line for line in caplog.messages if "passed over" in line]
        assert lost == ["ckpt-2-20 is passed over: not the same at rank 1, 2"]
        caplog.clear()


@pytest.mark.parametrize("count", [1, 2])
def test_a_damaged_one_is_passed_over(count, tmp_path, caplog):
    ranks = folders_of(tmp_path, count)
    for folder in ranks:
        save(folder, (1, 10), count=count, columns=5)
        save(folder, (1, 20), count=count, columns=9, weight=2.0)
    damaged = ranks[-1].checkpoints / "ckpt-1-20" / "state.json"
    damaged.write_text(damaged.read_text().replace('"env_steps_trained"', '"env_steps_trainer"'))
    assert trained(restored(tmp_path, count)) == [5] * count
    assert "skipping a damaged checkpoint" in caplog.text


def test_before_the_first_checkpoint_there_is_none_and_one_that_lacks_some_is_no_run(tmp_path):
    first, second = folders_of(tmp_path, 2)
    for folder in (first, second):
        folder.path.mkdir(parents=True, exist_ok=True)
    assert restored(tmp_path, 2) == [None, None]
    save(first, (1, 10), count=2)
    with pytest.raises(CheckpointError, match="none of these is whole at all ranks that wrote it"):
        restore(Ranks(), first)


def test_a_rank_that_sees_another_disk_is_told_and_so_are_the_others(tmp_path):
    for folder in folders_of(tmp_path, 2):
        save(folder, (1, 10), count=2)

    def told(ranks, folder):
        says = "is --run-dir on a disk that all hosts"
        if ranks.place.number == 1:
            folder = RunFolder(tmp_path / "other" / "ranks" / "1")
            with pytest.raises(CheckpointError, match=says):
                restore(ranks, folder)
        else:
            with pytest.raises(ConfigError, match=f"^rank 1 cannot start: .*{says}"):
                restore(ranks, folder)
        return True

    assert at_once(told, *folders_of(tmp_path, 2)) == [True, True]


def test_what_any_rank_has_settled_is_settled_for_all():
    merged = merge_watermarks([{ACTOR: [3, 2, 4, 9]}, {}, {ACTOR: [1, 5, 7]}])
    assert merged == {ACTOR: [3, 5, 7, 9]}
