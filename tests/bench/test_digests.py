"""The digests are those of real trainings that repeat to the last bit, and a difference is seen."""

import json

import pytest

from bench import digests
from bench.digests import CASES, EVERYWHERE, main
from impala_async.config.algorithm import ALGORITHMS
from impala_async.config.load import load_config


@pytest.fixture
def play(monkeypatch):
    """Plays two cases, of which the trainings come to what the test says; without it they fail."""

    def set_outcomes(outcomes):
        def train(settings):
            if settings[0] not in outcomes:
                raise RuntimeError("exit code 70: last words")
            return outcomes[settings[0]]

        monkeypatch.setattr(digests, "train", train)

    monkeypatch.setattr(digests, "CASES", {"one": ("one",), "two": ("two",)})
    return set_outcomes


ONE = {"model.safetensors": "aa", "loss/total": 0.1}
TWO = {"model.safetensors": "bb", "loss/total": None}


def test_what_differs_is_named_with_both_values(play, tmp_path, capsys):
    file = str(tmp_path / "digests.json")
    play({"one": ONE, "two": TWO})
    assert main(["--only", "one", "--write", file]) == 0
    for flags, code, told in (
        (["--only", "one", "--compare", file], 0, " same\n"),
        (["--compare", file], 1, "    was not recorded\n"),
        (["--write", file], 0, ""),
        (["--compare", file], 0, " same\n"),
    ):
        assert main(flags) == code
        said = capsys.readouterr().out
        assert told in said
        assert "another" not in said
    play({"one": {**ONE, "loss/total": 0.2}, "two": TWO})
    assert main(["--compare", file]) == 1
    said = capsys.readouterr().out
    assert "    loss/total: 0.2, was 0.1\n" in said
    assert "model.safetensors:" not in said
    assert said.count(" same\n") == 1
    # One that goes away or comes differs too.
    play({"one": {"model.safetensors": "aa"}, "two": {**TWO, "target.safetensors": "cc"}})
    assert main(["--compare", file]) == 1
    said = capsys.readouterr().out
    assert "    loss/total: None, was 0.1\n" in said
    assert "    target.safetensors: cc, was None\n" in said


def test_a_training_that_fails_is_not_recorded_and_the_others_are(play, tmp_path, capsys):
    file = tmp_path / "digests.json"
    play({"two": TWO})
    assert main(["--write", str(file)]) == 1
    assert "    failed: exit code 70: last words\n" in capsys.readouterr().out
    assert json.loads(file.read_text())["cases"] == {"two": TWO}


def test_another_torch_is_said(play, tmp_path, capsys):
    file = tmp_path / "digests.json"
    play({"one": ONE, "two": TWO})
    assert main(["--write", str(file)]) == 0
    content = json.loads(file.read_text())
    content["machine"]["torch"] = "1.0"
    file.write_text(json.dumps(content))
    assert main(["--compare", str(file)]) == 0
    assert "recorded with another torch: 1.0, here it is " in capsys.readouterr().out


def test_a_word_that_no_case_has_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["--only", "nonsense"])
    assert "no case has 'nonsense' in its name" in capsys.readouterr().err


def test_every_algorithm_has_a_case_and_every_case_is_lockstep_on_a_cpu():
    configs = [load_config(None, [*EVERYWHERE, *settings]) for settings in CASES.values()]
    assert {config.algorithm.name for config in configs} == set(ALGORITHMS)
    assert {config.pace.lag for config in configs} == {0, 1}
    assert all(config.pace.is_lockstep for config in configs)
    assert {config.learner.device for config in configs} == {"cpu"}


@pytest.mark.e2e
@pytest.mark.slow
def test_a_real_training_repeats_and_learns(tmp_path, capsys):
    file = tmp_path / "digests.json"
    case = ["--only", "ppo, vtrace, lag 1"]
    assert main([*case, "--write", str(file)]) == 0
    (outcome,) = json.loads(file.read_text())["cases"].values()
    assert {"model.safetensors", "optimizer.safetensors"} <= outcome.keys()
    assert outcome["exit_reason"] == "env_steps"
    assert outcome["updates"] > 20
    assert outcome["loss/total"] != 0
    assert main([*case, "--compare", str(file)]) == 0, capsys.readouterr().out
