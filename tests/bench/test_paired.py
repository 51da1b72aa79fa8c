"""Figures are medians of what was measured in turns, and limits are kept or said to be missed."""

import json

import pytest

from bench.paired import Figure, figure, in_turns, publish, ratio


def test_sides_are_measured_in_turns():
    order = []

    def side(name, value):
        order.append(name)
        return {"per_s": value * len(order)}

    samples = in_turns({"a": lambda: side("a", 1.0), "b": lambda: side("b", 2.0)}, 2)
    assert order == ["a", "b", "a", "b"]
    assert samples == {"a": [{"per_s": 1.0}, {"per_s": 3.0}], "b": [{"per_s": 4.0}, {"per_s": 8.0}]}
    both = ratio("a over b", samples["a"], samples["b"], "per_s")
    assert (both.median, both.smallest, both.largest) == (0.3125, 0.25, 0.375)


@pytest.mark.parametrize(
    ("limits", "is_held"),
    [({}, True), ({"at_least": 2.0}, True), ({"at_least": 2.1}, False), ({"at_most": 1.9}, False)],
)
def test_a_limit_is_one_of_the_median(limits, is_held):
    made = figure("speed", [1.0, 2.0, 9.0], unit="µs", **limits)
    assert made.is_held == is_held
    assert ("**missed**" in made.row()) != is_held
    assert made.row().startswith("| speed | 2 µs")
    assert "| 1 to 9 |" in made.row()


def test_what_is_published(tmp_path, capsys):
    figures = [Figure("speed", 1234.5, 1.0, 9.0, at_least=2000)]
    code = publish("Name", figures, notes="Why.", is_json=True, folder=tmp_path)
    assert code == 1
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "name.json").read_text())
    assert printed["figures"][0]["is_held"] is False
    assert printed["bench"] == "name"
    page = (tmp_path / "name.md").read_text()
    assert "| speed | 1,234 **missed** | 1 to 9 | at least 2000 |" in page
    assert "Why." in page
    assert publish("Name", [], notes="", is_json=False, folder=None) == 0
    publish("Name", figures, notes="", is_json=False, folder=tmp_path, gpu="GPU 7")
    page = (tmp_path / "name_cuda.md").read_text()
    assert page.startswith("# Name\n\n`python -m bench.name")
    assert " and GPU 7, torsos for images in " in page
    assert (tmp_path / "name_cuda.json").exists()
