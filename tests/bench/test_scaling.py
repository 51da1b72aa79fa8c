"""The benchmark of scaling starts as many actors as it says, and pairs within a round."""

import json
import sys

from bench import scaling


def test_every_number_is_measured_in_every_round(tmp_path, monkeypatch):
    order = []

    def measured(case, num, name, verdicts):
        order.append((case.name, num))
        verdicts[name] = "learner: it is busy"
        return {"per_s": 100.0 * num * (1 if len(order) <= 5 else 3)}

    monkeypatch.setattr(scaling, "measure", measured)
    flags = ["--rounds", "2", "--only", "sleeps", "--write", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["bench", *flags])
    assert scaling.main() == 0
    assert order == [("sleeps 1 ms", num) for num in (1, 2, 4, 8, 16)] * 2
    written = json.loads((tmp_path / "scaling.json").read_text())["figures"]
    figures = {each["name"]: each for each in written}
    assert figures["sleeps 1 ms, 1 actor: env steps/s"]["largest"] == 300
    over = figures["sleeps 1 ms, 8 actors: over 1 actor"]
    assert (over["smallest"], over["largest"]) == (8, 8)
    assert "- sleeps 1 ms, 16 actors: learner: it is busy" in (tmp_path / "scaling.md").read_text()
