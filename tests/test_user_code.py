"""An error of foreign code becomes one of ours, unless it is one already; how code is found."""

import re
import signal
import sys

import pytest

from impala_async.errors import ConfigError, EnvError
from impala_async.processes import Interrupted
from impala_async.user_code import UserCode, import_callable, one_line

BLAME = UserCode(f"env.id: {__name__}:B", "to step", EnvError)


class Unprintable(Exception):
    """An error whose text needs what its maker was not given."""

    def __str__(self):
        return self.missing


class Leaving(Exception):
    """An error whose text would end the process."""

    def __str__(self):
        raise SystemExit(0)


def test_what_is_blamed_has_its_cause_and_one_line():
    assert one_line(RuntimeError()) == "RuntimeError"
    assert one_line(ValueError("x" * 10**6)) == f"ValueError: {'x' * 2000} ..."
    # An exception that would end the process is blamed, too.
    for cause, says in (
        (RuntimeError("first\n  second"), "RuntimeError: first second"),
        (SystemExit(0), "SystemExit: 0"),
        (GeneratorExit("done"), "GeneratorExit: done"),
        (Unprintable(), "Unprintable"),
        (Leaving(), "Leaving"),
    ):
        place = rf"\({re.escape(__file__)}:\d+\)"
        text = rf"^env.id: {__name__}:B failed to step: {says} {place}$"
        with pytest.raises(EnvError, match=text) as caught, BLAME:
            raise cause
        assert caught.value.__cause__ is cause


def test_a_place_is_in_the_code_that_is_named_and_not_in_a_library(folder, monkeypatch):
    (folder / "mine_calls.py").write_text("import json\ndef make():\n    json.loads('')\n")
    make = named("mine_calls:make")
    blame = UserCode("model.name: mine_calls:make", "when it was made")
    with pytest.raises(ConfigError, match=r" made: JSOND.* \(\S*mine_calls\.py:3\)$"), blame:
        make()
    # A name of gymnasium's names no package: it is in what is not installed.
    with (
        pytest.raises(ConfigError, match=r"JSOND.* \(\S*mine_calls\.py:3\)$"),
        UserCode("Pole-v1", "in"),
    ):
        make()
    # Nor in ours, which has called it wrongly.
    monkeypatch.setattr("impala_async.user_code.INSTALLED", {"tests"})
    with pytest.raises(ConfigError, match=r" made: TypeError: make\(\) .* given$"), blame:
        make(1)


def test_what_is_not_blamed_and_what_is_no_error_passes(monkeypatch):
    # As in a program that uses the package: there Ctrl-C is Python's own.
    monkeypatch.setattr("signal.getsignal", lambda number: signal.default_int_handler)
    for error in (EnvError("of my own"), KeyboardInterrupt(), Interrupted()):
        with pytest.raises(type(error)) as caught, BLAME:
            raise error
        assert caught.value is error


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder whose modules can be imported."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def named(name):
    return import_callable(f"model.name: {name}", name)


@pytest.mark.parametrize(
    ("source", "name", "says"),
    [
        ("x = 1", "Net", r"mine has no 'Net'\."),
        ("class Nett: ...", "Net", r"mine has no 'Net'\. Did you mean: `Nett`\?"),
        ("Net = 3", "Net", "is of type int, and cannot be called"),
        ("from os import system as Net", "Net", "comes with Python, or with what .* is not called"),
        ("from numpy.testing import runstring as Net", "Net", "with what impala-async needs"),
        (
            "import no_such",
            "Net",
            r"failed to import mine: Mod.*mine\.py:1\); Python looks for no_such among",
        ),
        ("import mujoco", "Net", r"; pip install 'impala-async\[mujoco\]'"),
        ("1 / 0", "Net", r"import mine: ZeroDivisionError: division by zero \(\S*mine\.py:1\)$"),
        ("def", "Net", "failed to import mine: SyntaxError"),
        ("raise SystemExit", "Net", r"failed to import mine: SystemExit \(\S*mine\.py:1\)$"),
    ],
)
def test_what_no_name_stands_for_is_told(folder, monkeypatch, source, name, says):
    monkeypatch.setitem(sys.modules, "mujoco", None)
    (folder / "mine.py").write_text(source)
    try:
        with pytest.raises(ConfigError, match=f"^model.name: mine:{name}.*{says}"):
            named(f"mine:{name}")
    finally:
        sys.modules.pop("mine", None)


def test_a_missing_module_is_told_with_the_folders_that_were_looked_in(tmp_path, monkeypatch):
    for path, says in (
        (["", *sys.path], "on this host, in the current folder, and on PYTHONPATH$"),
        (["/scripts"], "on this host, in /scripts, not the current folder, and on PYTHONPATH$"),
    ):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "path", path)
        with pytest.raises(ConfigError, match=says):
            named("no_such:Net")


def test_a_name_that_no_process_could_import_is_told_how_to_be_written():
    for typed, says in (
        ("net.py:Net", "a file is named as Python imports it, .* net:Net, "),
        ("./my/net.py:Net", "a file is named as Python imports it, .* my.net:Net, "),
        ("__main__:Net", "every process .*: put Net into a module of its own$"),
    ):
        with pytest.raises(ConfigError, match=f"^model.name: {typed}: {says}"):
            named(typed)
