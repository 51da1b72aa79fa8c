"""Progress on fake terminals and fake logs, with a clock that the test turns."""

import errno
import io
import logging

import pytest
from rich.console import Console

from impala_async.config.run import StopSection
from impala_async.metrics.console import ConsoleSink, describe
from impala_async.metrics.names import Value, undeclared

REPORT: dict[str, Value] = {
    "time_s": 200.0,
    "learner/wall_s": 12.3,
    "env_steps_trained": 12345,
    "env_steps_per_s": 3210.4,
    "frames_per_s": 3210.4,
    "mean_return": 123.44,
    "episodes/count": 250,
    "lag/mean": 1.24,
    "lag/max": 4.0,
    "learner_queue/size_mean": 0.96,
    "learner_queue/capacity": 2,
    "num_actors": 3,
    "bottleneck": "learner: updates take 97 % of its time",
}
NO_STOP = StopSection()


class Clock:
    now_s = 50.0

    def __call__(self):
        return self.now_s


class Stream(io.StringIO):
    """A log or a terminal, which may fail."""

    def __init__(self, is_terminal=False):
        super().__init__()
        self.is_terminal = is_terminal
        self.error: OSError | None = None

    def isatty(self):
        return self.is_terminal

    def write(self, text):
        if self.error is not None:
            raise self.error
        return super().write(text)


@pytest.fixture(autouse=True)
def term(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)


def sink_on(stream, stop=NO_STOP, **settings):
    console = Console(file=stream, force_terminal=stream.isatty(), width=80, color_system=None)
    return ConsoleSink(stop, console, **settings)


def shown(**changes):
    """What a terminal shows of one report."""
    stream = Stream(is_terminal=True)
    sink = sink_on(stream)
    sink.write(REPORT | changes)
    sink.close()
    return stream.getvalue()


def at(update):
    return REPORT | {"env_steps_trained": update}


def test_one_plain_line():
    assert undeclared(REPORT) == set()
    assert describe(REPORT, NO_STOP) == (
        "200 s  steps 12,345  3,210 steps/s  return 123  lag 1.2 (max 4)  queue 1.0 / 2  "
        "actors 3  bottleneck learner: updates take 97 % of its time"
    )
    # Frames are named where a step takes several.
    line = describe(REPORT | {"frames_per_s": 12841.6}, NO_STOP)
    assert "  3,210 steps/s (12,842 frames/s)  return" in line
    # Goals stand behind what goes towards them.
    line = describe(REPORT, StopSection(env_steps=500_000, mean_return=475.0, wall_s=600.0))
    assert line.startswith("12 / 600 s  steps 12,345 / 500,000  3,210 steps/s  return 123 / 475  ")
    early = REPORT | {"mean_return": 0.8996, "episodes/count": 12}
    line = describe(early, StopSection(mean_return=0.9))
    assert "  return 0.8996 / 0.9 (12 episodes)  " in line
    for unknown in ({}, dict.fromkeys(REPORT)):
        assert describe(unknown, StopSection(mean_return=475.0)) == (
            "- s  steps -  - steps/s  return - / 475  lag - (max -)  queue -  actors -  "
            "bottleneck -"
        )


@pytest.mark.parametrize(
    ("reports_s", "lines"),
    [
        ([], []),
        ([0.0], [0]),
        ([0.0, 2.0, 4.0, 9.9, 10.0, 12.0, 19.9, 20.0, 22.0], [0, 4, 7, 8]),
        # It does not go back to a line that was passed over.
        ([0.0, 5.0, 10.0], [0, 2]),
    ],
)
def test_a_log_has_the_first_line_then_one_each_period_then_the_last(reports_s, lines):
    clock, stream = Clock(), Stream()
    sink = sink_on(stream, every_s=10.0, clock=clock)
    for number, at_s in enumerate(reports_s):
        clock.now_s = 50.0 + at_s
        sink.write(at(number))
    sink.close()
    sink.close()
    assert stream.getvalue().splitlines() == [describe(at(number), NO_STOP) for number in lines]


def test_a_terminal_is_redrawn_with_every_report():
    stream = Stream(is_terminal=True)
    sink = sink_on(stream, StopSection(env_steps=20_000), clock=Clock())
    for update in (111, 222):
        sink.write(at(update))
        assert f"steps {update} / 20,000" in stream.getvalue()
    sink.close()
    text = stream.getvalue()
    assert "bottleneck learner: updates take 97 % of its time" in text
    assert "\x1b[1A" in text, "the second picture goes over the first"
    assert text.endswith("\x1b[?25h"), "the cursor is given back"


@pytest.mark.parametrize(("term", "is_live"), [("xterm", True), ("dumb", False), ("", False)])
def test_the_stream_decides(term, is_live, monkeypatch):
    monkeypatch.setenv("TERM", term)
    text = shown(bottleneck="odd: [red]x[/nope]")
    assert ("\x1b[" in text) == is_live
    assert "12,345" in text
    assert "odd: [red]x[/nope]" in text, "square brackets are text and no markup"


@pytest.mark.parametrize("is_terminal", [True, False])
@pytest.mark.parametrize("is_closed", [True, False])
def test_a_stream_that_is_gone_silences_only_the_sink(is_terminal, is_closed, caplog):
    clock, stream = Clock(), Stream(is_terminal)
    sink = sink_on(stream, clock=clock)
    stream.error = OSError(errno.EIO, "Input/output error")
    if is_closed:
        stream.close()
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            sink.write(REPORT)
            clock.now_s += 60.0
        sink.close()
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_full_disk_silences_it_until_there_is_room(caplog):
    clock, stream = Clock(), Stream()
    sink = sink_on(stream, clock=clock)
    stream.error = OSError(errno.ENOSPC, "No space left on device")
    sink.write(at(1))
    stream.error = None
    clock.now_s += 60.0
    sink.write(at(20))
    assert "steps 20" in stream.getvalue()
    assert caplog.messages == []
