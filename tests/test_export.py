"""The export door says what it wrote; what it cannot write is one line."""

import errno
import os
from unittest.mock import patch

import numpy as np
import pytest
import torch

from examples.custom_model import MyTorso
from impala_async.export import main
from tests.library.test_loaded_policy import CASES, TEAM, begin
from tests.torches import wants_torch

pytestmark = wants_torch(2, 7)
GRU = {"core": "gru", "core_size": 7}


def one_error(capsys):
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    return lines[0]


@pytest.mark.filterwarnings("ignore")  # of an older torch
def test_it_writes_a_file_and_says_what_that_takes_and_gives(tmp_path, capsys):
    folder, _ = begin(tmp_path, {"id": "examples.nested_spaces:SortingArm"}, GRU)
    file = tmp_path / "policy.pt2"
    assert main([str(folder.path), "--torch", str(file)]) == 0
    said = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [(line[0], line[1]) for line in said] == [
        *(("takes", f"obs/{name}") for name in ("arm/at", "parcel/at", "parcel/kind")),
        ("takes", "state/hidden"),
        *(("gives", name) for name in ("parameters", "action/bin", "action/go_to")),
        *(("gives", name) for name in ("log_prob", "next_state/hidden")),
    ]
    arrays = (torch.zeros(3, 2), torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64))
    given = torch.export.load(file).module()(*arrays, torch.zeros(3, 7))
    assert len(given) == 5


def test_a_member_of_a_team_is_exported(tmp_path, capsys):
    folder, team = begin(tmp_path, {"id": "tests.envs.test_agents:Lives"}, policies=TEAM)
    file = tmp_path / "policy.pt2"
    assert main([str(folder.path), "--torch", str(file), "--policy", "other"]) == 0
    obs = np.float32([[1, 2, 3], [0, 1, 0]])
    log_probs = torch.export.load(file).module()(torch.from_numpy(obs))[2]
    expected = team.members["other"].act({"": obs}, {}).log_probs
    np.testing.assert_allclose(log_probs.detach().numpy(), expected, atol=1e-6)
    capsys.readouterr()
    assert main([str(folder.path), "--torch", str(file)]) == 2
    assert "policy: wants one of this team: main, other" in one_error(capsys)


class Wanders(MyTorso):
    def __init__(self, *args):
        super().__init__(*args)
        os.chdir("elsewhere")


def test_it_writes_where_it_was_begun_though_a_torso_changes_the_folder(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    folder, _ = begin(tmp_path, CASES["mlp"][0], {"name": f"{__name__}:Wanders"})
    os.chdir(tmp_path)
    (tmp_path / "newest.pt2").symlink_to("policy.pt2")
    (tmp_path / "policy.pt2").write_text("the one before")
    assert main([str(folder.path), "--torch", "newest.pt2"]) == 0
    # Others read it by its own name, and by that of the link.
    assert (tmp_path / "policy.pt2").stat().st_size > 1000
    assert (tmp_path / "newest.pt2").is_symlink()


def test_what_cannot_be_written_is_told(tmp_path, capsys, monkeypatch):
    folder, _ = begin(tmp_path, *CASES["mlp"])
    assert main([str(tmp_path), "--torch", "x"]) == 2
    assert "wants the folder of a run" in one_error(capsys)
    os.mkfifo(tmp_path / "pipe")
    for file, says in (
        (f"{tmp_path}/no/x.pt2", ": there is no such folder"),
        (".", " is a folder: wants a file"),
        (f"{tmp_path}/pipe", " is there, and no regular file: wants a file"),
    ):
        # Nothing is traced first, which takes seconds.
        with patch("impala_async.library.exported.trace", side_effect=AssertionError):
            assert main([str(folder.path), "--torch", file]) == 2
        assert one_error(capsys) == f"error: --torch: {file}{says}"
    file = str(tmp_path / "x.pt2")
    with patch.object(os, "fsync", side_effect=OSError(errno.ENOSPC, "the disk is full")):
        assert main([str(folder.path), "--torch", file]) == 75
    assert one_error(capsys) == f"error: [Errno 28] the disk is full: '{file}'"
    monkeypatch.setattr("impala_async.library.exported.find_spec", lambda name: None)
    assert main([str(folder.path), "--onnx", str(tmp_path / "x.onnx")]) == 2
    assert "pip install 'impala-async[export]'" in one_error(capsys)
    for flags in ([], ["--torch", "a", "--onnx", "b"]):
        with pytest.raises(SystemExit) as caught:
            main([str(folder.path), *flags])
        assert caught.value.code == 2
