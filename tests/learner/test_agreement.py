"""The word of all ranks, and the checkpoint that all of them have."""

import stat
import threading
import uuid

import pytest

from impala_async.config.learner import KEY_VARIABLE, BindSection
from impala_async.config.load import validate_config
from impala_async.config.ranks import Place, in_common
from impala_async.errors import ConfigError
from impala_async.learner.agreement import (
    REASONS,
    Word,
    agree,
    join_run,
)
from impala_async.learner.service import EXITS
from impala_async.runs.folder import RunFolder
from impala_async.training.ranks import Ranks
from impala_async.weights import NO_VERSION, Version
from impala_async.wire.keys import Key

WAIT_S = 10.0
CONFIG = validate_config({"env": {"id": "E-v1"}}, {})
LOCAL = BindSection()
OPEN = BindSection(data="tcp://0.0.0.0:5555", weights="tcp://0.0.0.0:5556")


class Threads(Ranks):
    """Ranks as threads of this process, which meet at a barrier."""

    def __init__(self, number, count, barrier, said):
        super().__init__(Place(number, count))
        self._barrier, self._said = barrier, said

    def _all(self, own):
        self._said[self.place.number] = own
        self._barrier.wait(WAIT_S)
        said = list(self._said)
        self._barrier.wait(WAIT_S)
        return said

    def totals(self, *shares):
        return [float(sum(each)) for each in zip(*self._all(shares), strict=True)]

    def gather(self, own):
        return self._all(own)


def at_once(function, *each):
    """The result of each rank, which has one of these arguments."""
    count = len(each)
    barrier, said, found = threading.Barrier(count), [None] * count, [None] * count

    def run(number):
        found[number] = function(Threads(number, count, barrier, said), each[number])

    threads = [threading.Thread(target=run, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return found


def test_all_are_ready_or_nobody_is_and_one_word_is_enough_for_the_rest():
    ready = Word(is_ready=True, num_rows=30, returns=(50.0, 60))
    waits = Word(is_ready=False, returns=(150.0, 40))
    first, second = at_once(agree, ready, waits)
    counts = {"num_joined": (0, 0), "num_sessions": (0, 0), "num_ready": 1}
    none = {"saved": (NO_VERSION, NO_VERSION)}
    assert first == second == Word(False, 30, returns=(200.0, 100), **counts, **none)
    assert first.mean_return == 2.0
    due = {"is_capture_due": True, "is_save_due": True, "is_report_due": True}
    own = ready._replace(num_joined=(7,), num_sessions=(9,))
    first, second = at_once(agree, own, ready._replace(num_rows=5, num_joined=(3,), **due))
    counts = {"num_joined": (7, 3), "num_sessions": (9, 0), "num_ready": 2}
    assert first == second == Word(True, 35, returns=(100.0, 120), **counts, **due, **none)
    first, second, third = at_once(agree, ready, ready, ready._replace(reason="wall_s"))
    assert first == second == third
    assert (third.reason, third.num_rows) == ("wall_s", 90)


def test_of_several_reasons_the_gravest_holds_for_all():
    said = [Word(reason=reason) for reason in ("mean_return", "not_finite", "terminated")]
    assert {word.reason for word in at_once(agree, *said)} == {"not_finite"}
    assert EXITS.keys() <= set(REASONS)


def test_a_checkpoint_is_common_once_all_say_that_it_is_their_newest():
    old, new = Version(3, 10**15), Version(3, 10**15 + 1)
    for said, common in (
        ((old, old), old),
        # Rank 1 may have failed to save the old one, and rank 0 the new one.
        ((old, new), None),
        ((old, NO_VERSION), None),
        ((NO_VERSION, NO_VERSION), None),
        ((Version(1, 0), Version(1, 0)), Version(1, 0)),
        ((new, new, new), new),
        ((new, new, old), None),
    ):
        for word in at_once(agree, *(Word(saved=(own,)) for own in said)):
            assert (word.saved, word.common) == (said, common)
    assert Word().common is None


def test_a_hundred_episodes_of_all_are_a_return():
    assert Word(returns=(99.0, 99)).mean_return is None
    assert Word(returns=(50.0, 100)).mean_return == 0.5


def join(ranks, folder, bind=LOCAL):
    return join_run(ranks, folder, in_common(CONFIG), bind)


def test_all_have_the_run_the_nonce_and_the_starts_of_rank_0_or_of_who_had_most(tmp_path):
    places = [Place(number, 3) for number in range(3)]
    folders = [RunFolder(place.folder(tmp_path)) for place in places]
    for folder in folders:
        folder.path.mkdir(parents=True, exist_ok=True)
        folder.write_settings(CONFIG, run_id=uuid.uuid4().hex)
    folders[2].next_epoch()
    first = folders[0].run_id
    nonces = [start.nonce for start in at_once(join, *folders)]
    assert len(set(nonces)) == 1
    assert len(nonces[0]) == 16
    assert {folder.run_id for folder in folders} == {first}
    assert [folder.next_epoch() for folder in folders] == [2, 2, 2]
    assert folders[1].load_config() == CONFIG
    assert at_once(join, *folders)[0].nonce != nonces[0]


def test_an_error_of_one_ends_all(tmp_path):
    """Else the others would see no more than that it is gone, and be started again for ever."""
    folders = [RunFolder(Place(number, 2).folder(tmp_path)) for number in range(2)]
    folders[0].path.mkdir(exist_ok=True)
    folders[0].write_settings(CONFIG, run_id=uuid.uuid4().hex)
    folders[1] = RunFolder(tmp_path / "other" / "ranks" / "1")

    def told(ranks, folder):
        with pytest.raises(ConfigError) as caught:
            join(ranks, folder)
        return str(caught.value)

    first, second = at_once(told, *folders)
    assert second.startswith("--run-dir: rank 0 has no run in ")
    assert first == f"rank 1 cannot start: {second}"


# -------------------- the key


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Those of two ranks."""
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    made = [RunFolder(Place(number, 2).folder(tmp_path)) for number in range(2)]
    for folder in made:
        folder.path.mkdir(parents=True, exist_ok=True)
        folder.write_settings(CONFIG, run_id=uuid.uuid4().hex)
    return made


def keys(bind, folders):
    return [start.key for start in at_once(lambda r, f: join(r, f, bind), *folders)]


def test_there_is_a_key_where_other_hosts_come_in_and_it_stays(folders):
    kept = folders[0].path / "key"
    assert keys(LOCAL, folders) == [None, None]
    off = OPEN.model_copy(update={"encrypt": "off"})
    assert keys(off, folders) == [None, None]
    assert not kept.exists()
    first, second = keys(OPEN, folders)
    assert first == second == Key(kept.read_text(), "")
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert not (folders[1].path / "key").exists()
    assert keys(OPEN, folders) == [first, first]
    assert keys(LOCAL.model_copy(update={"encrypt": "on"}), folders) == [first, first]
    kept.unlink()
    assert keys(OPEN, folders) != [first, first]


def test_that_of_the_environment_goes_first_and_into_the_folder(folders, monkeypatch):
    before = keys(OPEN, folders)
    monkeypatch.setenv(KEY_VARIABLE, "AB" * 32)
    given = Key("ab" * 32, "")
    for bind in (OPEN, LOCAL):
        assert keys(bind, folders) == [given, given] != before
    assert (folders[0].path / "key").read_text() == "ab" * 32 + "\n"
    assert keys(LOCAL.model_copy(update={"encrypt": "off"}), folders) == [None, None]


def test_a_key_that_other_users_can_read_is_told(folders, caplog):
    kept, told = folders[0].path / "key", "every user of this host may open it"
    keys(OPEN, folders)
    assert keys(OPEN, folders)[0] is not None
    kept.chmod(0o640)
    keys(OPEN, folders)
    assert told not in caplog.text
    kept.chmod(0o644)
    keys(OPEN, folders)
    (said,) = [each for each in caplog.messages if told in each]
    assert said == f"{kept}: {told}: chmod o= it"


def test_a_key_that_is_made_anew_at_a_later_start_is_told(folders, caplog):
    caplog.set_level("INFO")
    kept, told = folders[0].path / "key", "is new: actors of an earlier start that were given"
    keys(OPEN, folders)
    assert told not in caplog.text
    folders[0].next_epoch()
    keys(OPEN, folders)
    assert told not in caplog.text
    kept.unlink()
    keys(OPEN, folders)
    assert f"{kept} {told} another key want this one" in caplog.messages


def test_a_rank_that_alone_would_be_encrypted_is_told_by_all(folders):
    def each(ranks, folder):
        with pytest.raises(ConfigError, match="rank 1 would be encrypted, and rank 0 has no key"):
            join(ranks, folder, LOCAL if ranks.place.is_first else OPEN)

    at_once(each, *folders)
    assert not (folders[0].path / "key").exists()


def test_a_file_that_is_no_key_is_told_with_its_path(folders):
    (folders[0].path / "key").write_text("secret")
    with pytest.raises(
        ConfigError, match=rf"{folders[0].path}/key: wants 64 .* 6 characters: remove the"
    ):
        join(Ranks(Place()), folders[0], OPEN)
    (folders[0].path / "key").write_text("g" * 64)
    with pytest.raises(ConfigError, match="64 characters, which are not all such digits: remove"):
        join(Ranks(Place()), folders[0], OPEN)
