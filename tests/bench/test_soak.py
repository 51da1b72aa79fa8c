"""The soak looks at all processes of a run, and growth of any kind is seen."""

import json
from types import SimpleNamespace

import pytest

from bench import soak
from bench.processes import Held
from bench.soak import Record, Times, judge, watch

WHOLE_S = 300
MB = 1_000_000


def steady(second):
    """Processes that fill caches for a minute, and from then on only tremble."""
    memory = (200 + min(second, 60) + second % 5) * MB
    return {
        9: Held("train", 40 * MB, 5, 1),
        10: Held("learner", memory, 30 + (second % 60 == 0), 7),
        11: Held("actor", 150 * MB, 16, 6),
        12: Held("actor", 150 * MB, 16, 6),
    }


def recorded(held=steady):
    record = Record()
    for second in range(WHOLE_S + 1):
        record.add(second, 1000 * second, held(second))
    return record


def missed(record):
    return [each.name for each in judge(record, Times.of(WHOLE_S)) if not each.is_held]


def test_nothing_grows():
    figures = judge(recorded(), Times.of(WHOLE_S))
    assert all(each.is_held for each in figures)
    by_name = {each.name: each for each in figures}
    assert by_name["learner: RSS in minute two"].median == 262
    assert by_name["actor 2: growth, RSS"].at_most == 8
    assert by_name["trained env steps/s, last fifth over minute two"].median == 1
    assert len(figures) == 4 * 4 + 2


def test_growth_of_one_process_is_seen():
    # A large one may grow by its share.
    large = recorded(
        lambda second: {10: Held("learner", (1000 + max(0, second - 120) // 10) * MB, 30, 7)}
    )
    growth = judge(large, Times.of(WHOLE_S))[1]
    assert (growth.at_most, growth.is_held) == (20, True)
    for what, grown in (
        ("RSS", lambda second: Held("actor", (150 + second // 10) * MB, 16, 6)),
        ("descriptors", lambda second: Held("actor", 150 * MB, 16 + second // 150, 6)),
        ("threads", lambda second: Held("actor", 150 * MB, 16, 6 + second // 200)),
    ):
        record = recorded(lambda second, grown=grown: {**steady(second), 12: grown(second)})
        assert missed(record) == [f"actor 2: growth, {what}"]


def test_processes_that_come_and_go_are_seen_after_the_first_minute():
    def restarted(second):
        held = steady(second)
        if second >= 200:
            held[13] = held.pop(12)
        return held

    def probed(second):
        return steady(second) | ({13: Held("other", MB, 3, 1)} if second < 60 else {})

    record = recorded(restarted)
    assert list(record.processes) == ["train", "learner", "actor 1", "actor 2", "actor 3"]
    assert missed(record) == ["processes that came or went after minute one"]
    assert missed(recorded(probed)) == []


def test_a_run_is_watched_from_its_first_update(tmp_path, monkeypatch):
    def running():
        """A run with reports from the second look on, and updates from the third one on."""
        told = [{"learner/wall_s": n, "env_steps_trained": 100 * n} for n in range(7)]
        reports = iter([None, {"learner/wall_s": None}, *told])
        run = SimpleNamespace(pid=9, last_report=lambda: next(reports))
        run.moments = lambda *args, **how: range(9)
        return run

    monkeypatch.setattr(soak, "held_by_each", lambda pid: steady(0) if pid == 9 else {})
    record = watch(running(), whole_s=4)
    assert record.seconds == record.processes["actor 1"].seconds == [0, 1, 2, 3, 4]
    record.write(tmp_path / "series.json")
    assert json.loads((tmp_path / "series.json").read_text())["seconds"] == record.seconds
    with pytest.raises(RuntimeError, match="ended by itself"):
        watch(running(), whole_s=7)
