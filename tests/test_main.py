import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from impala_async import __version__, evaluate
from impala_async.__main__ import DOORS, main

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(("args", "code"), [([], 2), (["--help"], 0), (["-h"], 0)])
def test_it_lists_the_doors_and_says_its_version(args, code, capsys):
    assert main(args) == code
    said = capsys.readouterr().out
    assert said.startswith("usage: impala-async DOOR")
    for door, (_, purpose) in DOORS.items():
        assert any(line.split() == [door, *purpose.split()] for line in said.splitlines())
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"impala-async {__version__}\n"


def test_an_unknown_door_is_told_with_those_there_are(capsys):
    assert main(["trian", "--help"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: there is no door 'trian'; did you mean train?\n")
    assert "evaluate" in said.err


@pytest.mark.parametrize("door", DOORS)
def test_the_rest_of_the_arguments_is_the_door_s(door, monkeypatch):
    taken = []

    def open_door(args):
        taken.append(args)
        return 75

    monkeypatch.setattr(importlib.import_module(DOORS[door][0]), "main", open_door)
    monkeypatch.setattr("sys.argv", ["impala-async", door, "--help", "-x"])
    assert main() == 75
    assert taken == [["--help", "-x"]]


def test_environments_in_the_current_folder_are_found_and_one_that_is_gone_is_told(
    monkeypatch, tmp_path, capsys
):
    folder = tmp_path / "mine"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.path", [])
    seen = []
    monkeypatch.setattr(evaluate, "main", lambda args: len(seen.append(list(sys.path)) or args))
    for _ in range(2):
        assert main(["evaluate"]) == 0
    assert seen == [[str(folder)]] * 2
    folder.rmdir()
    assert main(["evaluate"]) == 2
    told = "error: the current folder was removed: change to one that is there\n"
    assert capsys.readouterr().err == told


@pytest.mark.parametrize(
    ("module", "unbuffered"), [("impala_async", "1"), ("impala_async.train", "")]
)
def test_a_reader_that_has_gone_is_no_error(module, unbuffered):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as nobody:
        ended = subprocess.run(
            [sys.executable, "-m", module, "--help"],
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            stdout=nobody,
            stderr=subprocess.PIPE,
            timeout=60,
        )
    assert (ended.returncode, ended.stderr) == (0, b"")
