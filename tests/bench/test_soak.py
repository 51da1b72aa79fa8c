"""The soak looks at all processes of a real run, and growth of any kind is seen."""

import json
import sys

import pytest

from bench import soak
from bench.one_run import CONFIGS, ENDLESS, one_run
from bench.processes import Held
from bench.soak import Record, Times, judge, watch

WHOLE_S = 300
MB = 1_000_000


def steady(second):
    """Three processes that fill caches for a minute, and from then on only tremble."""
    filling = min(second, 60) * MB
    trembling = (second % 5) * MB
    return {
        9: Held("train", 40 * MB, 5, 1),
        10: Held("learner", 200 * MB + filling + trembling, 30 + (second % 60 == 0), 7),
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


def test_a_large_process_may_grow_by_its_share():
    def large(second):
        return {10: Held("learner", 1000 * MB + max(0, second - 120) * MB // 9, 30, 7)}

    growth = judge(recorded(large), Times.of(WHOLE_S))[1]
    assert (growth.at_most, growth.is_held) == (20, True)
    assert 15 < growth.median < 20


@pytest.mark.parametrize(
    ("grown", "what"),
    [
        (lambda s: Held("actor", 150 * MB + s * MB // 10, 16, 6), "RSS"),
        (lambda s: Held("actor", 150 * MB, 16 + s // 150, 6), "descriptors"),
        (lambda s: Held("actor", 150 * MB, 16, 6 + s // 200), "threads"),
    ],
)
def test_growth_of_one_process_is_seen(grown, what):
    record = recorded(lambda second: {**steady(second), 12: grown(second)})
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


def test_less_than_three_minutes_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench", "--minutes", "2"])
    with pytest.raises(SystemExit):
        soak.main()
    assert "wants at least 3" in capsys.readouterr().err


@pytest.mark.e2e
def test_a_real_run_is_watched(tmp_path, monkeypatch):
    monkeypatch.setattr(soak, "LOOK_EVERY_S", 0.1)
    settings = (*ENDLESS, "learner.report_every_s=0.25")
    with one_run(CONFIGS / "cartpole.toml", settings) as run:
        record = watch(run, whole_s=4)
    assert {"train", "learner", "actor 1", "actor 2"} <= record.processes.keys()
    assert record.env_steps[-1] > record.env_steps[0]
    learner = record.processes["learner"]
    assert learner.rss_mb[-1] > 50
    assert learner.descriptors[-1] > 5
    assert learner.threads[-1] > 2
    names = [each.name for each in judge(record, Times((2.0, 3.0), (3.0, 99.0)))]
    assert "actor 2: growth, threads" in names
    record.write(tmp_path / "series.json")
    series = json.loads((tmp_path / "series.json").read_text())["processes"]["actor 1"]
    assert len(series["seconds"]) == len(series["rss_mb"]) == len(series["threads"])
