"""A benchmark that is ended says so in a line, and takes with it what it began."""

import signal
import subprocess
import sys
import time

import psutil
import pytest

from bench.door import run
from impala_async.errors import EXIT_INTERRUPTED
from tests import matrix


def test_it_ends_with_the_code_of_its_benchmark():
    with pytest.raises(SystemExit) as ended:
        run(lambda: 3)
    assert ended.value.code == 3


@pytest.mark.parametrize("number", matrix.REQUESTS)
@pytest.mark.parametrize(
    ("arguments", "least"),
    [
        (["bench.scaling", "--only", "CartPole", "--rounds", "1"], 4),
        (["bench.weights", "--rounds", "1"], 1),
        (["bench.learner", "--only", "CartPole", "--rounds", "1"], 4),
    ],
)
@pytest.mark.e2e
def test_all_ends_with_it(number, arguments, least, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    # Where it is ignored, as behind nohup, it would be so below.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    command = [sys.executable, "-m", *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as bench:
        parent, give_up_at = psutil.Process(bench.pid), time.monotonic() + 60
        while len(family := parent.children(recursive=True)) < least:
            assert time.monotonic() < give_up_at
            time.sleep(0.05)
        bench.send_signal(number)
        _, said = bench.communicate(timeout=60)
    assert bench.returncode == EXIT_INTERRUPTED
    assert said.splitlines()[-1] == "interrupted"
    assert "Traceback" not in said
    assert not psutil.wait_procs(family, timeout=20)[1]
    assert list(tmp_path.iterdir()) == []
