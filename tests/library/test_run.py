"""A run from a program: its settings, its flags, its end, and all that its folder holds."""

import asyncio
import io
import os
import signal
import sys
import threading
from contextlib import nullcontext

import numpy as np
import pytest

from impala_async.config.load import load_config
from impala_async.config.packaged import packaged_configs
from impala_async.errors import CheckpointError, ConfigError, ServiceError
from impala_async.library import run as module
from impala_async.library.run import Run, run
from impala_async.runs.folder import RunFolder

HELLO = "héllo"
RANGE = [float("nan"), float("inf"), -float("inf")]


class Train:
    """Stands in for the train door: a process of Python with this code, and the flags it got."""

    def __init__(self, code):
        self.code, self.flags = code, None

    def __call__(self, door, flags, lifeline, output):
        assert door == "train"
        self.flags = flags
        command = [sys.executable, "-c", self.code, *flags]
        return lifeline.start(command, stdout=output, stderr=output, process_group=0)

    def values(self, flag):
        pairs = zip(self.flags, self.flags[1:], strict=False)
        return [value for name, value in pairs if name == flag]


TOLD_TO_END = pytest.raises(
    ServiceError, match=r"told the run to end, and .*: it is saved in .*run$"
)


@pytest.fixture
def train(monkeypatch):
    def made(code):
        stand_in = Train(code)
        monkeypatch.setattr(module, "spawn", stand_in)
        return stand_in

    return made


def begun(path, *lines, summary=None):
    """The folder of a run with these reports."""
    folder = RunFolder(path)
    folder.begin(load_config(packaged_configs()["cartpole"]))
    folder.let_go()
    folder.metrics.write_text("".join(f"{line}\n" for line in lines))
    if summary is not None:
        folder.write_json("summary.json", summary)
    return folder


# -------------------- what a folder holds


def test_a_folder_gives_its_summary_and_its_metrics_by_name(tmp_path):
    begun(
        tmp_path / "run",
        '{"env_steps_trained": 10, "updates": 1, "lag/quantiles": [0, 1], "mean_return": null}',
        '{"env_steps_trained": 30, "updates": 3, "mean_return": 7.5}',
        '{"env_steps_trained": 40, "upda',
        summary={"exit_reason": "env_steps"},
    )
    opened = Run(tmp_path / "run")
    assert opened.folder == tmp_path / "run"
    assert opened.summary == {"exit_reason": "env_steps"}
    metrics = opened.metrics
    # The names that others know them by, too.
    assert set(metrics) > {"env_steps_trained", "updates", "mean_return"}
    np.testing.assert_array_equal(metrics["env_steps_trained"], [10, 30])
    np.testing.assert_array_equal(metrics["mean_return"], [np.nan, 7.5])
    assert {array.dtype for array in metrics.values()} == {np.dtype(np.float64)}


def test_what_holds_no_run_or_no_end_is_told(tmp_path):
    begun(tmp_path / "run")
    assert Run(tmp_path / "run").metrics == {}
    with pytest.raises(CheckpointError, match=r"has no summary\.json: the run has not ended yet"):
        _ = Run(tmp_path / "run").summary
    with pytest.raises(CheckpointError, match="wants the folder of a run"):
        Run(tmp_path)


# -------------------- settings


def test_overrides_become_the_flags_that_say_the_same(tmp_path, train, monkeypatch):
    monkeypatch.chdir(tmp_path)
    door = train("raise SystemExit(3)")
    overrides = {
        "env.id": "CartPole-v1",
        "env.kwargs": {"a b": [1, "2\x7f"], "path": tmp_path, "deep": {"is": True}, "range": RANGE},
        "stop.mean_return": None,
        "stop.env_steps": np.int64(7),
        "algorithm.lr": 1e-3,
        "model.hidden_sizes": (8, 8),
        "model.activation": "tanh",
    }
    with pytest.raises(ServiceError):
        run(overrides=overrides)
    config = load_config(None, door.values("--set"))
    plain = {"a b": [1, "2\x7f"], "path": str(tmp_path), "deep": {"is": True}}
    # One nan equals no other.
    assert repr(config.env.kwargs) == repr(plain | {"range": RANGE})
    assert config.stop.mean_return is None
    assert (config.stop.env_steps, config.algorithm.lr) == (7, 1e-3)
    assert (config.model.hidden_sizes, config.model.activation) == ((8, 8), "tanh")
    assert door.values("--config") == []
    (folder,) = door.values("--run-dir")
    assert folder.startswith("runs/CartPole-v1-")


def test_a_config_is_a_name_or_a_file_and_without_any_it_is_cartpole(tmp_path, train):
    door = train("raise SystemExit(3)")
    own = tmp_path / "own.toml"
    own.write_text('[env]\nid = "Acrobot-v1"\n')
    for config, path in (
        (None, packaged_configs()["cartpole"]),
        ("cartpole_ppo", packaged_configs()["cartpole_ppo"]),
        (own, own),
        (str(own), own),
    ):
        with pytest.raises(ServiceError):
            run(config, {"seed": 4}, run_dir=tmp_path / "run")
        assert door.values("--config") == [str(path)]
        assert door.values("--run-dir") == [str(tmp_path / "run")]
        assert door.values("--set") == ["seed=4"]


def test_a_folder_in_the_home_folder_is_found_where_the_run_was(tmp_path, train, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    begun(tmp_path / "run")
    door = train("")
    assert run(run_dir="~/run").folder == tmp_path / "run"
    assert door.values("--run-dir") == [str(tmp_path / "run")]


def test_a_wrong_setting_starts_nothing(tmp_path, train):
    door = train("")
    for config, overrides, says in (
        (None, {"algorithm.lrr": 1}, "algorithm.lrr"),
        ("no_such", None, "no_such: cannot read this config file"),
        ("cartpol", None, "config: there is no file cartpol; did you mean cartpole?"),
        ({"algorithm.lr": 1}, None, "config: wants a file or a name, and overrides by their keys"),
        (3, None, "config: wants a file or a name, and overrides by their keys"),
        (None, ["algorithm.lr=1"], "config: wants a file or a name, and overrides by their keys"),
        (None, {"algorithm": {"lr": 1}}, "algorithm: wants dotted keys, like algorithm.lr, got {"),
        (None, {"env.kwargs": {"a": None}}, "env.kwargs: wants a value as TOML has it"),
        (None, {"algorithm.lr": float("nan")}, "algorithm.lr: wants a number over 0, got NaN"),
        (None, {"env.kwargs": object()}, "env.kwargs: wants a value as TOML has it"),
    ):
        with pytest.raises(ConfigError) as caught:
            run(config, overrides, run_dir=tmp_path / "run")
        assert says in str(caught.value)
        assert "\n" not in str(caught.value)
    for path in (3, "", b"x"):
        with pytest.raises(ConfigError, match=f"^run_dir: wants a path, got {path!r}$"):
            run(run_dir=path)
        with pytest.raises(ConfigError, match=f"^folder: wants a path, got {path!r}$"):
            Run(path)
    assert door.flags is None


# -------------------- its end


SAYS = "import sys; sys.stdout.buffer.write({!r}.encode()); sys.stdout.flush(); {}"


def test_all_that_it_says_is_shown_and_a_fault_is_raised_with_its_reason(tmp_path, train, capsys):
    for code, kind, says in (
        (2, ConfigError, "env.id: no such"),
        (70, ServiceError, "env.id: no such"),
        (130, KeyboardInterrupt, ""),
    ):
        train(SAYS.format(f"{HELLO}\nerror: env.id: no such\n", f"sys.exit({code})"))
        with pytest.raises(kind) as caught:
            run(run_dir=tmp_path / "run")
        assert str(caught.value) == says
    assert capsys.readouterr().err == 3 * f"{HELLO}\nerror: env.id: no such\n"
    train(SAYS.format("one\ntwo", "sys.exit(75)"))
    with pytest.raises(ServiceError, match="the run ended with exit code 75; its last line: two"):
        run(run_dir=tmp_path / "run")


def test_a_run_that_somebody_else_ends_is_not_taken_for_one_that_came_to_its_end(tmp_path, train):
    train("")
    for reason, ended in (("mean_return", nullcontext()), ("terminated", TOLD_TO_END)):
        folder = begun(tmp_path / reason / "run", summary={"exit_reason": reason}).path
        with ended:
            assert run(run_dir=folder).summary == {"exit_reason": reason}


def test_a_run_that_somebody_ends_before_it_has_begun_leaves_no_folder_to_read(tmp_path, train):
    train("")
    with pytest.raises(ServiceError, match=r"told the run to end, .*: nothing was trained yet"):
        run(run_dir=tmp_path / "run")


def test_a_reason_that_was_logged_is_raised_without_its_time(tmp_path, train):
    for level, says in (
        ("ERROR", "it hangs"),
        ("INFO", "the run ended with exit code 75; its last line: it hangs"),
    ):
        train(SAYS.format(f"one\n05:32:40 {level} it hangs\n", "sys.exit(75)"))
        with pytest.raises(ServiceError) as caught:
            run(run_dir=tmp_path / "run")
        assert str(caught.value) == says


def test_words_that_nobody_takes_end_no_run(tmp_path, train, monkeypatch):
    begun(tmp_path / "run")
    with open("/dev/full", "wb", buffering=0) as full:
        closed = io.StringIO()
        closed.close()
        for stderr in (io.TextIOWrapper(full, write_through=True), None, closed):
            train(SAYS.format("one", ""))
            monkeypatch.setattr(sys, "stderr", stderr)
            assert run(run_dir=tmp_path / "run").folder == tmp_path / "run"


def test_its_exit_code_is_known_where_the_end_of_children_is_ignored(tmp_path, train):
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    train(SAYS.format("error: no more\n", "sys.exit(75)"))
    try:
        with pytest.raises(ServiceError, match="no more"):
            run(run_dir=tmp_path / "run")
        assert signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_what_it_leaves_running_is_not_waited_for(tmp_path, train, capsys):
    begun(tmp_path / "run")
    train("import subprocess as s; print(s.Popen(['sleep', '60']).pid, flush=True)")
    assert run(run_dir=tmp_path / "run").folder == tmp_path / "run"
    os.kill(int(capsys.readouterr().err), signal.SIGKILL)


STAYS = """
import signal, sys, time
heard = []
def hear(*_):
    heard.append(1)
    print("heard", flush=True)
signal.signal(signal.SIGINT, hear)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
print("ready", flush=True)
while len(heard) < {wanted}:
    time.sleep(0.01)
print("saved", flush=True)
sys.exit(130)
"""


class Pressing(io.StringIO):
    """Ctrl-C, each time that one of these words is said."""

    def __init__(self, *words):
        super().__init__()
        self.words = list(words)

    def write(self, text):
        num_written = super().write(text)
        if self.words and self.words[0] in text:
            self.words.pop(0)
            os.kill(os.getpid(), signal.SIGINT)
        return num_written


@pytest.mark.parametrize("is_in_a_loop", [False, True])
def test_an_interrupt_is_passed_on_and_raised_when_the_run_has_ended(
    tmp_path, train, monkeypatch, is_in_a_loop
):
    async def within():
        return run(run_dir=tmp_path / "run")

    before = signal.getsignal(signal.SIGINT)
    for presses in (["ready"], ["ready", "heard"]):
        train(STAYS.format(wanted=len(presses)))
        monkeypatch.setattr(sys, "stderr", said := Pressing(*presses))
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(within()) if is_in_a_loop else run(run_dir=tmp_path / "run")
        assert said.getvalue().splitlines()[-1] == "saved"
        assert said.getvalue().count("heard") == len(presses)
    assert signal.getsignal(signal.SIGINT) is before


def test_another_exception_ends_its_processes(tmp_path, train, monkeypatch):
    class Failing(io.StringIO):
        def write(self, text):
            raise RuntimeError(text)

    started = []
    door = train(STAYS.format(wanted=1))
    monkeypatch.setattr(module, "spawn", lambda *how: started.append(door(*how)) or started[-1])
    monkeypatch.setattr(sys, "stderr", Failing())
    with pytest.raises(RuntimeError, match="ready"):
        run(run_dir=tmp_path / "run")
    assert [process.poll() for process in started] == [-signal.SIGTERM]


def test_another_thread_may_start_one(tmp_path, train):
    begun(tmp_path / "run")
    train("")
    found = []
    thread = threading.Thread(target=lambda: found.append(run(run_dir=tmp_path / "run")))
    thread.start()
    thread.join(30)
    assert [each.folder for each in found] == [tmp_path / "run"]
