"""Runs of several seeds: a line for each, and a band where all of them have a curve."""

import json

import pytest
from matplotlib import pyplot as plt

from impala_async.runs.seeds import band, describe_seeds, draw_seeds

SUMMARY = {
    **{"seed": 3, "exit_reason": "updates", "mean_return": 20.0, "best_eval_return": None},
    **{"env_steps_trained": 1000, "run_s": 2.0},
}


def test_the_table_has_a_line_for_each_seed_and_their_means():
    other = SUMMARY | {"seed": 11, "mean_return": 40.0, "best_eval_return": 7.5, "run_s": 3.0}
    assert describe_seeds([SUMMARY, other], [SUMMARY, other]).splitlines() == [
        "seed  ended    mean return  best evaluation  env steps  seconds",
        "3     updates  20.0         -                1,000      2.0",
        "11    updates  40.0         7.50             1,000      3.0",
        "mean           30.0         7.50 of 1        1,000      2.5",
    ]


def test_means_are_of_those_that_were_not_cut_short():
    cut = SUMMARY | {"exit_reason": "interrupted", "mean_return": -90.0}
    *_, cut_line, mean = describe_seeds([SUMMARY, SUMMARY, cut], [SUMMARY, SUMMARY]).splitlines()
    assert cut_line.split()[1:3] == ["interrupted", "-90.0"]
    assert mean.split()[:4] == ["mean", "of", "2", "20.0"]
    assert "mean of" not in describe_seeds([cut], [])


def test_a_band_lies_where_all_have_a_curve():
    steps, mean, low, high = band([[(0, 0.0), (100, 100.0)], [(50, 0.0), (80, 30.0), (200, 30.0)]])
    assert (steps[0], steps[-1]) == (50, 100)
    assert (mean[0], low[0], high[0]) == (25.0, 0.0, 50.0)
    assert (mean[-1], low[-1], high[-1]) == (65.0, 30.0, 100.0)


@pytest.fixture
def folders(tmp_path):
    for seed, shift in enumerate((0, 20)):
        folder = tmp_path / f"seed-{seed}"
        folder.mkdir()
        lines = [
            {
                "env_steps_trained": steps,
                "mean_return": steps + shift,
                "mean_return_100": None,
                **{"evaluate/sampled_return": 5.0, "evaluate/env_steps": steps},
                # One of the runs alone was evaluated so.
                **({"evaluate/greedy_return": 1.0} if shift else {}),
            }
            for steps in (10, 20, 30)
        ]
        (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(x)}\n" for x in lines))
    return sorted(tmp_path.iterdir())


def test_the_picture_has_each_curve_of_the_runs_that_have_it(folders, monkeypatch):
    kept = []
    monkeypatch.setattr(plt, "close", kept.append)
    assert draw_seeds(folders, "A $b$ c$").startswith(b"\x89PNG")
    (axes,) = kept[0].axes
    line, greedy, sampled = axes.lines
    assert line.get_label() == "last 100 episodes: mean of 2 seeds"
    assert greedy.get_label() == "evaluation, greedy: mean of 1 seed"
    assert sampled.get_label() == "evaluation, sampled: mean of 2 seeds"
    assert (line.get_ydata()[0], line.get_ydata()[-1]) == (20.0, 40.0)
    filled, *_ = axes.collections
    box = filled.get_datalim(axes.transData)
    assert (box.y0, box.y1) == (10.0, 50.0)
    monkeypatch.undo()
    plt.close("all")


def test_runs_without_a_curve_are_left_out_and_without_any_there_is_no_picture(
    folders, monkeypatch
):
    (folders[0] / "metrics.jsonl").unlink()
    kept = []
    monkeypatch.setattr(plt, "close", kept.append)
    assert draw_seeds(folders, "").startswith(b"\x89PNG")
    assert kept[0].axes[0].lines[0].get_label() == "last 100 episodes: mean of 1 seed"
    monkeypatch.undo()
    plt.close("all")
    (folders[1] / "metrics.jsonl").write_text('{"env_steps_trained": 9}\n')
    assert draw_seeds(folders, "") is None


def test_runs_without_a_stretch_in_common_are_drawn_one_by_one(folders, monkeypatch):
    later = folders[1] / "metrics.jsonl"
    later.write_text(json.dumps({"env_steps_trained": 90, "mean_return": 1.0}) + "\n")
    kept = []
    monkeypatch.setattr(plt, "close", kept.append)
    assert draw_seeds(folders, "none").startswith(b"\x89PNG")
    first, second, _ = kept[0].axes[0].lines
    assert second.get_label() == f"last 100 episodes: {folders[1].name}"
    assert (len(first.get_xdata()), [*second.get_xydata()[0]]) == (3, [90.0, 1.0])
    monkeypatch.undo()
    plt.close("all")
