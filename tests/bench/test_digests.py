"""The digests are those of real trainings that repeat to the last bit, and a difference is seen."""

import json

import pytest

from bench import digests
from bench.digests import CASES, EVERYWHERE, main
from impala_async.config.algorithm import ALGORITHMS
from impala_async.config.load import load_config

ONE = {"model.safetensors": "aa", "loss/total": 0.1}
TWO = {"model.safetensors": "bb", "loss/total": None}


@pytest.fixture
def compare(monkeypatch, tmp_path, capsys):
    """Trains two cases, of which one may fail, records or compares them, and gives what is said."""
    monkeypatch.setattr(digests, "CASES", {"one": ("one",), "two": ("two",)})

    def run(how, outcomes, *flags):
        def train(settings):
            if settings[0] not in outcomes:
                raise RuntimeError("exit code 70: last words")
            return outcomes[settings[0]]

        monkeypatch.setattr(digests, "train", train)
        code = main([f"--{how}", str(tmp_path / "digests.json"), *flags])
        return code, capsys.readouterr().out

    return run


def test_what_differs_is_named_with_both_values(compare):
    both = {"one": ONE, "two": TWO}
    assert compare("write", both, "--only", "one")[0] == 0
    assert compare("compare", both, "--only", "one")[0] == 0
    code, said = compare("compare", both)
    assert (code, said.count(" same\n")) == (1, 1)
    assert "    was not recorded\n" in said
    assert compare("write", both)[0] == 0
    code, said = compare("compare", both)
    assert (code, said.count(" same\n")) == (0, 2)
    assert "another" not in said
    for changed, told in (
        ({**ONE, "loss/total": 0.2}, "    loss/total: 0.2, was 0.1\n"),
        # One that goes away or comes differs too.
        ({"model.safetensors": "aa"}, "    loss/total: None, was 0.1\n"),
        ({**ONE, "target.safetensors": "cc"}, "    target.safetensors: cc, was None\n"),
    ):
        code, said = compare("compare", {"one": changed, "two": TWO})
        assert (code, said.count(" same\n")) == (1, 1)
        assert told in said
        assert "model.safetensors:" not in said


def test_a_training_that_fails_is_not_recorded_and_another_torch_is_said(compare, tmp_path):
    code, said = compare("write", {"two": TWO})
    assert code == 1
    assert "    failed: exit code 70: last words\n" in said
    file = tmp_path / "digests.json"
    content = json.loads(file.read_text())
    assert content["cases"] == {"two": TWO}
    content["machine"]["torch"] = "1.0"
    file.write_text(json.dumps(content))
    code, said = compare("compare", {"two": TWO}, "--only", "two")
    assert code == 0
    assert "recorded with another torch: 1.0, here it is " in said


def test_every_algorithm_has_a_case_and_every_case_is_lockstep_on_the_device_asked_for(monkeypatch):
    configs = [load_config(None, [*EVERYWHERE, *settings]) for settings in CASES.values()]
    assert {config.algorithm.name for config in configs} == set(ALGORITHMS)
    assert {config.pace.lag for config in configs} == {0, 1}
    assert all(config.pace.is_lockstep for config in configs)
    asked = []
    monkeypatch.setattr(digests, "train", lambda settings: asked.append(settings[-1]) or {})
    main(["--only", "ppo, gru"])
    main(["--only", "ppo, gru", "--device", "cuda"])
    assert asked == ["learner.device=cpu", "learner.device=cuda"]
