"""Progress on fake terminals and fake logs, with a clock that the test turns."""

import errno
import io
import logging
from typing import Any

import pytest
from rich.console import Console

from impala_async.config.run import StopSection
from impala_async.metrics.console import ConsoleSink, describe, progress
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


class Clock:
    now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Gone(io.StringIO):
    """A terminal that hung up."""

    def write(self, text: str) -> int:
        raise OSError(5, "Input/output error")


def at(update: int) -> dict[str, Value]:
    return REPORT | {"env_steps_trained": update}


@pytest.fixture(autouse=True)
def term(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")


def terminal_console() -> Console:
    return Console(file=Terminal(), force_terminal=True, width=80, color_system=None)


def shown(console: Console) -> str:
    file: Any = console.file
    return str(file.getvalue())


def test_the_test_uses_declared_names() -> None:
    assert undeclared(REPORT) == set()


def test_plain_line_without_targets() -> None:
    assert describe(REPORT, StopSection()) == (
        "200 s  steps 12,345  3,210 steps/s  return 123  lag 1.2 (max 4)  queue 1.0 / 2  "
        "actors 3  bottleneck learner: updates take 97 % of its time"
    )


def test_frames_are_named_where_a_step_takes_several() -> None:
    line = describe(REPORT | {"frames_per_s": 12841.6}, StopSection())
    assert "  3,210 steps/s (12,842 frames/s)  return" in line


def test_plain_line_with_targets() -> None:
    line = describe(REPORT, StopSection(env_steps=500_000, mean_return=475.0, wall_s=600.0))
    assert line.startswith("12 / 600 s  steps 12,345 / 500,000  3,210 steps/s  return 123 / 475  ")


def test_a_mean_of_few_episodes_is_shown_with_their_number() -> None:
    early = REPORT | {"mean_return": 0.8996, "episodes/count": 12}
    assert "  return 0.8996 / 0.9 (12 episodes)  " in describe(early, StopSection(mean_return=0.9))


@pytest.mark.parametrize("report", [{}, dict.fromkeys(REPORT)])
def test_what_is_not_known_yet_is_a_dash(report: dict[str, Value]) -> None:
    assert describe(report, StopSection(mean_return=475.0)) == (
        "- s  steps -  - steps/s  return - / 475  lag - (max -)  queue -  actors -  bottleneck -"
    )


def test_progress_is_that_of_the_nearest_stop() -> None:
    report: dict[str, Value] = {"env_steps_trained": 100, "time_s": 200.0, "learner/wall_s": 90.0}
    assert progress(report, StopSection()) is None
    assert progress(report, StopSection(mean_return=475.0)) is None
    assert progress(report, StopSection(env_steps=400)) == 0.25
    assert progress(report, StopSection(env_steps=400, wall_s=100.0)) == 0.9
    assert progress(report, StopSection(env_steps=50)) == 1.0
    assert progress({"updates": 3}, StopSection(updates=4)) == 0.75
    assert progress({}, StopSection(env_steps=50)) is None


def test_log_has_first_line_then_one_each_period_then_the_last() -> None:
    clock, stream = Clock(), io.StringIO()
    sink = ConsoleSink(StopSection(), Console(file=stream), every_s=10.0, clock=clock)
    for update in range(13):
        sink.write(at(update))
        clock.now_s += 2.0
    lines = stream.getvalue().splitlines()
    assert lines == [describe(at(update), StopSection()) for update in (0, 5, 10)]
    sink.close()
    assert stream.getvalue().splitlines()[3:] == [describe(at(12), StopSection())]


def test_last_line_is_not_printed_twice() -> None:
    clock, stream = Clock(), io.StringIO()
    sink = ConsoleSink(StopSection(), Console(file=stream), clock=clock)
    sink.write(at(1))
    sink.close()
    sink.close()
    assert stream.getvalue().count("\n") == 1


def test_close_does_not_go_back_to_a_line_passed_over() -> None:
    clock, stream = Clock(), io.StringIO()
    sink = ConsoleSink(StopSection(), Console(file=stream), every_s=10.0, clock=clock)
    for update in (1, 2, 3):
        sink.write(at(update))
        clock.now_s += 5.0
    sink.close()
    assert stream.getvalue().splitlines() == [
        describe(at(update), StopSection()) for update in (1, 3)
    ]


def test_nothing_written_nothing_printed() -> None:
    stream = io.StringIO()
    ConsoleSink(StopSection(), Console(file=stream)).close()
    assert stream.getvalue() == ""


def test_terminal_is_redrawn_with_every_report() -> None:
    console = terminal_console()
    sink = ConsoleSink(StopSection(env_steps=20_000), console)
    for update in (111, 222):
        sink.write(at(update))
        assert f"steps {update} / 20,000" in shown(console)
    sink.close()
    text = shown(console)
    assert "bottleneck learner: updates take 97 % of its time" in text
    assert "\x1b[1A" in text, "the second picture goes over the first"
    assert text.endswith("\x1b[?25h"), "the cursor is given back"
    assert text.count("steps 222") >= 1


def test_terminal_without_foreseeable_end_has_no_bar() -> None:
    with_bar, without = terminal_console(), terminal_console()
    for console, targets in ((with_bar, StopSection(env_steps=10)), (without, StopSection())):
        sink = ConsoleSink(targets, console)
        sink.write(REPORT)
        sink.close()
    assert "━" in shown(with_bar)
    assert "━" not in shown(without)


def test_square_brackets_are_text_and_no_markup() -> None:
    console = terminal_console()
    sink = ConsoleSink(StopSection(), console)
    sink.write(REPORT | {"bottleneck": "odd: [red]x[/nope]"})
    sink.close()
    assert "odd: [red]x[/nope]" in shown(console)


@pytest.mark.parametrize(("term", "is_live"), [("xterm", True), ("dumb", False), ("", False)])
def test_the_stream_decides(term: str, is_live: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", term)
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = Terminal()
    sink = ConsoleSink(StopSection(), Console(file=stream))
    sink.write(REPORT)
    sink.close()
    assert ("\x1b[" in stream.getvalue()) == is_live
    assert "12,345" in stream.getvalue()


@pytest.mark.parametrize("is_live", [True, False])
def test_a_terminal_that_hangs_up_silences_only_the_sink(
    is_live: bool, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    stream = Gone()
    stream.isatty = lambda: is_live  # type: ignore[method-assign]
    console = Console(file=stream, force_terminal=True)
    sink = ConsoleSink(StopSection(), console, clock=clock)
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            sink.write(REPORT)
            clock.now_s += 60.0
        sink.close()
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_full_disk_silences_it_until_there_is_room(caplog):
    class Full(io.StringIO):
        room = False

        def flush(self):
            if not self.room:
                raise OSError(errno.ENOSPC, "No space left on device")

    stream, clock = Full(), Clock()
    sink = ConsoleSink(StopSection(), Console(file=stream), clock=clock)
    sink.write(at(1))
    stream.room = True
    clock.now_s += 60.0
    sink.write(at(20))
    assert "steps 20" in stream.getvalue()
    assert caplog.messages == []


def test_a_closed_log_silences_only_the_sink(caplog: pytest.LogCaptureFixture) -> None:
    stream = io.StringIO()
    sink = ConsoleSink(StopSection(), Console(file=stream))
    stream.close()
    sink.write(REPORT)
    sink.close()
    assert len(caplog.records) == 1
