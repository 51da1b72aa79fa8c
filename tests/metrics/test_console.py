"""Progress on fake terminals and fake logs, with a clock that the test turns."""

import errno
import io

import pytest
from rich.console import Console

from impala_async.config.run import StopSection
from impala_async.metrics.console import ConsoleSink
from impala_async.metrics.names import undeclared

REPORT = {
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
        self.error = None
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


def line_of(report, **stop):
    screen = Screen(stop=StopSection(**stop))
    screen.sink.write(report)
    return screen.getvalue().removesuffix("\n")


def test_one_plain_line():
    assert undeclared(REPORT) == set()
    assert line_of(REPORT) == (
        "200 s  steps 12,345  3,210 steps/s  return 123  lag 1.2 (max 4)  queue 1.0 / 2  "
        "actors 3  bottleneck learner: updates take 97 % of its time"
    )
    # Frames are named where a step takes several.
    line = line_of(REPORT | {"frames_per_s": 12841.6})
    assert "  3,210 steps/s (12,842 frames/s)  return" in line
    # Goals stand behind what goes towards them.
    line = line_of(REPORT, env_steps=500_000, mean_return=475.0, wall_s=600.0)
    assert line.startswith("12 / 600 s  steps 12,345 / 500,000  3,210 steps/s  return 123 / 475  ")
    early = REPORT | {"mean_return": 0.8996, "episodes/count": 12}
    assert "  return 0.8996 / 0.9 (12 episodes)  " in line_of(early, mean_return=0.9)
    evaluated = REPORT | {"evaluate/sampled_return": 12.5}
    assert "  return 123  eval 12.5  lag" in line_of(evaluated)
    both = evaluated | {"evaluate/greedy_return": 474.9}
    assert "  return 123  eval 474.9 / 475  lag" in line_of(both, eval_return=475.0)
    for unknown in ({}, dict.fromkeys(REPORT)):
        assert line_of(unknown, mean_return=475.0) == (
            "- s  steps -  - steps/s  return - / 475  lag - (max -)  queue -  actors -  "
            "bottleneck -"
        )


def test_a_log_has_the_first_line_then_one_each_period():
    screen = Screen()
    # It does not go back to a line that was passed over.
    for number, at_s in enumerate([0.0, 2.0, 4.0, 9.9, 10.0, 12.0, 19.9, 25.0, 34.0, 35.0]):
        screen.now_s = 50.0 + at_s
        screen.sink.write(at(number))
    screen.sink.close()
    assert screen.getvalue().splitlines() == [line_of(at(number)) for number in (0, 4, 7, 9)]


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


def test_a_stream_that_is_gone_ends_nothing_and_a_log_may_have_room_again():
    for is_terminal in (True, False):
        screen = Screen(is_terminal)
        screen.sink.write(at(1))
        screen.error = OSError(errno.ENOSPC, "No space left on device")
        screen.now_s += 60.0
        screen.sink.write(at(2))
        screen.error = None
        screen.now_s += 60.0
        screen.sink.write(at(30))
        # rich would keep the text that a terminal has missed.
        assert ("steps 30" in screen.getvalue()) == (not is_terminal)
        screen.close()
        screen.now_s += 60.0
        screen.sink.write(at(4))
        screen.sink.close()
