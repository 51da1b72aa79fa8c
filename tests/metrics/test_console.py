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


class Screen(io.StringIO):
    """A log or a terminal, which may fail, and its sink, with a clock that the test turns."""

    def __init__(self, is_terminal=False, stop=NO_STOP):
        super().__init__()
        self.is_terminal = is_terminal
        self.error: OSError | None = None
        self.now_s = 50.0
        console = Console(file=self, force_terminal=is_terminal, width=80, color_system=None)
        self.sink = ConsoleSink(stop, console, clock=lambda: self.now_s)

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
    screen = Screen()
    for number, at_s in enumerate(reports_s):
        screen.now_s = 50.0 + at_s
        screen.sink.write(at(number))
    screen.sink.close()
    screen.sink.close()
    assert screen.getvalue().splitlines() == [describe(at(number), NO_STOP) for number in lines]


def test_a_terminal_is_redrawn_with_every_report():
    screen = Screen(is_terminal=True, stop=StopSection(env_steps=20_000))
    for update in (111, 222):
        screen.sink.write(at(update))
        assert f"steps {update} / 20,000" in screen.getvalue()
    screen.sink.close()
    text = screen.getvalue()
    assert "bottleneck learner: updates take 97 % of its time" in text
    assert "\x1b[1A" in text, "the second picture goes over the first"
    assert text.endswith("\x1b[?25h"), "the cursor is given back"


@pytest.mark.parametrize(("term", "is_live"), [("xterm", True), ("dumb", False), ("", False)])
def test_the_stream_decides(term, is_live, monkeypatch):
    monkeypatch.setenv("TERM", term)
    screen = Screen(is_terminal=True)
    screen.sink.write(REPORT | {"bottleneck": "odd: [red]x[/nope]"})
    screen.sink.close()
    assert ("\x1b[" in screen.getvalue()) == is_live
    assert "odd: [red]x[/nope]" in screen.getvalue(), "square brackets are text and no markup"


@pytest.mark.parametrize("is_terminal", [True, False])
@pytest.mark.parametrize("is_closed", [True, False])
def test_a_stream_that_is_gone_silences_only_the_sink(is_terminal, is_closed, caplog):
    screen = Screen(is_terminal)
    screen.error = OSError(errno.EIO, "Input/output error")
    if is_closed:
        screen.close()
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            screen.sink.write(REPORT)
            screen.now_s += 60.0
        screen.sink.close()
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_full_disk_silences_it_until_there_is_room(caplog):
    screen = Screen()
    screen.error = OSError(errno.ENOSPC, "No space left on device")
    screen.sink.write(at(1))
    screen.error = None
    screen.now_s += 60.0
    screen.sink.write(at(20))
    assert "steps 20" in screen.getvalue()
    assert caplog.messages == []
