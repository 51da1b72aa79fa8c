"""Sinks by name: how each is made, and that none of them keeps a run waiting or ends it."""

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from impala_async.config.run import ReportSection
from impala_async.errors import ConfigError
from impala_async.metrics import sinks as sinks_module
from impala_async.metrics.sinks import ChosenSinks, Run

MODULE = """
TAKEN = []

class Keeps:
    def __init__(self, run, factor=1):
        self.run, self.factor = run, factor

    def write(self, report):
        TAKEN.append((self.run.run_id, report["updates"] * self.factor))

    def close(self):
        TAKEN.append("closed")

class Empties(Keeps):
    def write(self, report):
        for value in report.values():
            if isinstance(value, list):
                value.clear()
        report.clear()

class Fails(Keeps):
    def write(self, report):
        raise SystemExit("no more")

class FailsToClose(Keeps):
    def close(self):
        raise OSError("not today")

class OnlyWrites:
    def __init__(self, run):
        pass

    def write(self, report):
        pass

def breaks(run):
    return {}["key"]

A_NUMBER = 3
"""
Make = Callable[..., ChosenSinks]


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A user's module with sinks of many kinds."""
    (tmp_path / "own_sinks.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    import own_sinks

    yield own_sinks
    del sys.modules["own_sinks"]


@pytest.fixture
def make(module):
    """Makes sinks from what stands in a config; they are closed at the end."""
    made = []

    def make_chosen(*sinks):
        section = ReportSection.model_validate({"sinks": list(sinks)})
        made.append(ChosenSinks(section, Run(Path("run"), "ab", {}, 0)))
        return made[-1]

    yield make_chosen
    for one in made:
        one.close()


def test_a_sink_of_ones_own_takes_all_reports_in_order(module, make):
    sinks = make({"name": "own_sinks:Keeps", "kwargs": {"factor": 10}})
    for number in range(5):
        sinks.write({"updates": number})
    sinks.close()
    sinks.close()
    assert [*(("ab", 10 * number) for number in range(5)), "closed"] == module.TAKEN


@pytest.mark.parametrize(
    ("sink", "says"),
    [
        ("no_such_module:Sink", "failed to import .*; Python looks for no_such_module among"),
        ("own_sinks:Keep", r"own_sinks has no 'Keep'. Did you mean: `Keeps`\?"),
        ("own_sinks:A_NUMBER", "is of type int, and cannot be called"),
        ("own_sinks:OnlyWrites", r"which is no sink: it must have write\(report\) and close"),
        ("own_sinks:breaks", r"failed when it was made, at .*own_sinks\.py:\d+: KeyError"),
        ({"name": "own_sinks:Keeps", "kwargs": {"facto": 1}}, "TypeError: .*'facto'"),
        ("subprocess:Popen", "comes with Python"),
        ("tensorboard", r"tensorboard failed .*; pip install 'impala-async\[tensorboard\]'$"),
        ("wandb", r"wandb failed .*; pip install 'impala-async\[wandb\]'$"),
    ],
)
def test_what_is_no_sink_is_told_at_the_start(make, monkeypatch, sink, says):
    for package in ("tensorboardX", "wandb"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=f"^report.sinks: .*{says}"):
        make(sink)


def test_one_that_fails_is_told_of_once_and_the_others_go_on(module, make, caplog):
    names = ("Empties", "Fails", "Keeps", "FailsToClose")
    sinks = make(*(f"own_sinks:{name}" for name in names))
    reports: list[dict[str, Any]] = [
        {"updates": number, "lag/quantiles": [0.0, 1.0]} for number in range(3)
    ]
    for report in reports:
        sinks.write(report)
    sinks.close()
    assert reports == [{"updates": number, "lag/quantiles": [0.0, 1.0]} for number in range(3)]
    kept = [taken for taken in module.TAKEN if taken != "closed"]
    assert sorted(kept) == [("ab", number) for number in (0, 0, 1, 1, 2, 2)]
    assert module.TAKEN.count("closed") == 2
    first, second = sorted(record.getMessage() for record in caplog.records)
    assert "own_sinks:Fails failed to take a report" in first
    assert "SystemExit: no more; it gets no more reports, and training goes on" in first
    assert "own_sinks:FailsToClose failed to close" in second


def test_one_that_hangs_keeps_nobody_waiting(module, make, monkeypatch, caplog):
    may_go_on, has_begun = threading.Event(), threading.Event()

    def hang(self, report):
        has_begun.set()
        may_go_on.wait()
        module.TAKEN.append(report["updates"])

    monkeypatch.setattr(module.Keeps, "write", hang)
    monkeypatch.setattr(sinks_module, "CLOSE_WITHIN_S", 0.05)
    monkeypatch.setattr(sinks_module, "MAX_WAITING", 3)
    sinks = make("own_sinks:Keeps")
    sinks.write({"updates": 0})
    assert has_begun.wait(10)
    before = time.monotonic()
    for number in range(1, 9):
        sinks.write({"updates": number})
    sinks.close()
    assert time.monotonic() - before < 5
    assert caplog.messages == [
        "report.sinks: own_sinks:Keeps is too slow, and misses some reports",
        "report.sinks: own_sinks:Keeps has not closed in time, and is left alone",
    ]
    may_go_on.set()
    (thread,) = (one for one in threading.enumerate() if one.name == "sink-own_sinks:Keeps")
    thread.join(10)
    # The oldest of those that waited gave way, the last of all to the end itself.
    assert module.TAKEN == [0, 7, 8, "closed"]
