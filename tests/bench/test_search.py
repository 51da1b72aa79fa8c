"""The search for defaults goes on where it was ended, and ranks without looking at scales."""

import json

import pytest

from bench.learning import search
from bench.learning.search import HELD_OUT, TRAINING, Task, main, mean_ranks, read, table
from bench.machine import about_this_machine


@pytest.fixture
def searched(monkeypatch, tmp_path, capsys):
    """Searches among two candidates on two tasks, and gives what was trained and said."""
    tasks = (Task("A-v0", 1), Task("B-v0", 1), Task("C-v0", 1, "no_such_module"))
    monkeypatch.setattr(search, "TASKS", {"training": tasks, "held-out": (Task("D-v0", 1),)})
    file = tmp_path / "candidates.toml"
    file.write_text('[old]\nset = []\n[new]\nset = ["algorithm.lr=1e-3"]\n')
    monkeypatch.setattr(search, "CANDIDATES", file)
    trained = []

    def train(task, seed, settings):
        trained.append((task.env_id, seed, tuple(settings)))
        if len(trained) == 6:
            raise KeyboardInterrupt
        return float(len(settings))

    monkeypatch.setattr(search, "train", train)

    def run(*flags):
        trained.clear()
        main(["--write", str(tmp_path), *flags])
        return list(trained), capsys.readouterr()

    return run


def test_a_search_goes_on_where_it_was_ended(searched, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        searched("--seeds", "5-6")
    lines = [json.loads(line) for line in (tmp_path / "search.jsonl").read_text().splitlines()]
    assert [(line["candidate"], line["task"], line["seed"]) for line in lines] == [
        ("old", "A-v0", 5),
        ("new", "A-v0", 5),
        ("old", "B-v0", 5),
        ("new", "B-v0", 5),
        ("old", "A-v0", 6),
    ]
    trained, said = searched("--seeds", "5-6")
    assert trained == [
        ("A-v0", 6, ("algorithm.lr=1e-3",)),
        ("B-v0", 6, ()),
        ("B-v0", 6, ("algorithm.lr=1e-3",)),
    ]
    assert "skipped: tasks that need no_such_module" in said.err
    page = (tmp_path / "search.md").read_text()
    assert "- old: nothing set\n- new: `algorithm.lr=1e-3`" in page
    assert "| A-v0 | 2 | 0 | 1 |" in page
    assert "| mean rank |  | **2.00** | **1.00** |" in page
    assert "| D-v0 | 0 | - | - |" in page
    assert f"\nCommits {about_this_machine()['commit']}.\n" in page
    assert searched("--seeds", "5-6")[0] == []
    assert searched("--seeds", "7", "--only", "b-v")[0] == [
        ("B-v0", 7, ()),
        ("B-v0", 7, ("algorithm.lr=1e-3",)),
    ]
    assert "| A-v0 | 2 | 0 | 1 |" in (tmp_path / "search.md").read_text()


def test_a_candidate_that_has_other_settings_now_is_trained_anew(searched, tmp_path):
    assert len(searched("--seeds", "5", "--only", "b-v")[0]) == 2
    (tmp_path / "candidates.toml").write_text('[old]\nset = []\n[new]\nset = ["seed=3"]\n')
    assert searched("--seeds", "5", "--only", "b-v")[0] == [("B-v0", 5, ("seed=3",))]


def test_ranks_are_of_medians_and_equal_ones_share_a_place(tmp_path):
    path = tmp_path / "results.jsonl"
    results = (
        *(("one", "A", seed, value) for seed, value in enumerate((1e6, -5.0, -6.0))),
        *(("two", "A", 0, -4.0), ("three", "A", 0, float("-inf"))),
        *((name, "B", 0, 7.0) for name in ("one", "two", "three")),
        ("one", "C", 0, 1.0),
    )
    keys = ("candidate", "task", "seed", "return")
    path.write_text(
        "".join(
            f"{json.dumps({'set': [], **dict(zip(keys, each, strict=True))})}\n" for each in results
        )
    )
    names, tasks = ["one", "two", "three"], ["A", "B", "C"]
    returns = read(path, {name: [] for name in names})
    # In A they are 2, 1, 3; in B all are 2; C was not tried by all.
    assert mean_ranks(returns, names, tasks) == {"one": 2.0, "two": 1.5, "three": 2.5}
    assert "| C | 0-1 | 1 | - | - |" in table(returns, names, tasks)


def test_no_task_is_on_both_sides():
    assert len({task.env_id for task in (*TRAINING, *HELD_OUT)}) == len(TRAINING) + len(HELD_OUT)
    assert min(len(TRAINING), len(HELD_OUT)) >= 12


@pytest.mark.e2e
def test_a_training_gives_the_mean_of_its_last_episodes(forks):
    found = search.train(Task("CartPole-v1", 200), 0, ["trajectory.rows={env_steps}"])
    assert 8 < found < 200
