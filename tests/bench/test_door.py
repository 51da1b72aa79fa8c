"""A benchmark that is ended says so in a line, and takes with it what it began."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from bench.__main__ import BENCHES
from bench.door import run
from impala_async.errors import Exit
from tests import matrix
from tests.e2e.harness import wait_until
from tests.e2e.zygote import Forked


def test_it_ends_with_the_code_of_its_benchmark():
    with pytest.raises(SystemExit) as ended:
        run(lambda: 3)
    assert ended.value.code == 3


@pytest.mark.parametrize("number", matrix.REQUESTS)
@pytest.mark.parametrize(
    ("command", "num_processes"),
    [
        ("bench.weights --rounds 1", 1),
        ("bench.learner --only CartPole --rounds 1", 4),
        ("bench.peers --only impala --seeds 0 --cartpole-s 60 --pong-s 0", 4),
    ],
)
@pytest.mark.e2e
def test_all_ends_with_it(number, command, num_processes, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    # A fork has it already, which looks for its cache now.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/tmp/torchinductor")
    told = [sys.executable, "-m", *command.split()]
    with Forked(told, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as bench:
        parent = psutil.Process(bench.pid)
        # Asleep, it waits for them: none is half started.
        family = wait_until(
            "what it starts",
            lambda: (
                len(found := parent.children(recursive=True)) >= num_processes
                and parent.status() == psutil.STATUS_SLEEPING
                and found
            ),
        )
        bench.send_signal(number)
        _, said = bench.communicate(timeout=60)
    assert bench.returncode == Exit.INTERRUPTED
    assert said.splitlines()[-1] == "interrupted"
    assert "Traceback" not in said
    assert not psutil.wait_procs(family, timeout=20)[1]
    assert list(tmp_path.iterdir()) == []


def test_every_benchmark_has_a_name_and_what_it_is():
    found = {
        path.stem
        for path in Path(__file__).parents[2].glob("bench/*.py")
        if "    run(main)\n" in path.read_text()
    }
    assert found | {"learning", "peers"} == BENCHES.keys()
