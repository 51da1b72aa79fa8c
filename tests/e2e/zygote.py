"""A process that has imported torch once, and forks the processes of the end-to-end tests.

An import takes two seconds of a core, a fork a hundredth of one. `Forked` is a `subprocess.Popen`
for `python -m impala_async.DOOR ...` whose process the zygote forks, and in such a process Popen
itself is one: `train` forks its learner and its actors. A fork has the arguments, environment,
folder, descriptors, signals and process group that a started interpreter would have. Three things
differ: the hash seed and the command line that others see are those of the zygote, and modules are
imported already. A test that is about these starts an interpreter.
"""

import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import inspect
import json
import logging
import os
import pkgutil
import platform
import runpy
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil

import impala_async

# Beside all modules of the package: what they import only when they need it.
IMPORTED_LATE = (
    # An optimizer's first step imports it, which takes nearly as long as torch itself.
    "torch._dynamo",
    *("matplotlib.pyplot", "matplotlib.backends.backend_agg", "rich.logging", "rich.table"),
    *("uvloop", "gymnasium.vector"),
)
# No thread is started, and nothing of CUDA, which no fork could use then.
ALONE = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
CLONE_PARENT = 0x8000
NR_CLONE = {"x86_64": 56, "aarch64": 220}
MOST_BYTES, MOST_DESCRIPTORS = 1 << 18, 64
OWN_GROUP, SAME_GROUP = 0, -1
OURS = ("impala_async.", "bench.")
ROOT = Path(__file__).resolve().parents[2]
# Where an interpreter finds modules that is told nothing.
OWN_PATHS = []
# From sys/prctl.h.
PR_SET_PDEATHSIG = 1
Started = subprocess.Popen
_SIGNATURE = inspect.signature(subprocess.Popen._execute_child)
_start = subprocess.Popen._execute_child


class Job(NamedTuple):
    """The things that a new process is given, and the numbers of its descriptors."""

    program: str
    """A module, or a file of Python."""
    flags: Sequence[str]
    environment: dict[str, str]
    folder: str
    process_group: int
    blocked: Sequence[int]
    numbers: Sequence[int]


@functools.cache
def zygote():
    """This process's end of a socket to it, and its pid. It ends when this process does."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = Started(
            [sys.executable, "-m", __name__, str(theirs.fileno())],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            env={**os.environ, **ALONE},
            process_group=OWN_GROUP,
        )
    # Its exit is nobody's concern.
    process.returncode = 0
    return ours, process.pid


def children():
    """The processes that this one has started, and theirs; the zygote is not one of them."""
    own_pid = zygote()[1] if zygote.cache_info().currsize else None
    found = psutil.Process().children(recursive=True)
    return [process for process in found if process.pid != own_pid]


class Forked(Started):
    """A child of this process: the zygote has forked `python PROGRAM FLAG ...`.

    Another command is started, so that this may be Popen itself.
    """

    def _execute_child(self, *given):
        args = _SIGNATURE.bind(self, *given).arguments["args"]
        if args[0] == sys.executable and args[1] != "-c":
            _execute(self, given, self._ask)
        else:
            _start(self, *given)

    @staticmethod
    def _ask(job, descriptors):
        asking, _ = zygote()
        socket.send_fds(asking, [json.dumps(job).encode()], descriptors)
        answer = asking.recv(MOST_BYTES)
        assert answer, "the zygote has ended: what it said is on stderr"
        return int(answer)


def _execute(popen, given, start):
    """Do as `Popen._execute_child`, but let `start` make the process and give its pid."""
    asked = _SIGNATURE.bind(popen, *given).arguments
    environment = os.environ if asked["env"] is None else asked["env"]
    program, *flags = asked["args"][1 + (asked["args"][1] == "-m") :]
    folder = os.path.abspath(asked["cwd"] or ".")
    blocked = [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())]
    streams, kept = ("p2cread", "c2pwrite", "errwrite"), asked["pass_fds"]
    job = Job(
        *(program, flags, dict(environment), folder),
        *(asked["process_group"], blocked, [*range(len(streams)), *kept]),
    )
    own = [number if asked[name] < 0 else asked[name] for number, name in enumerate(streams)]
    popen.pid = start(job, [*own, *kept])
    popen._child_created = True
    popen._close_pipe_fds(
        *(asked[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite")),
        *(asked["errread"], asked["errwrite"]),
    )


def _execute_within(popen, *given):
    """Popen in a forked process: it forks too, where no thread could hold a lock meanwhile."""
    args = _SIGNATURE.bind(popen, *given).arguments["args"]
    is_ours = [*args[:2]] == [sys.executable, "-m"] and args[2].startswith(OURS)
    # The thread that waits for the end of its parent holds nothing.
    num_idle = sum(each.name == "lifeline" for each in threading.enumerate())
    if is_ours and len(os.listdir("/proc/self/task")) == 1 + num_idle:
        _execute(popen, given, _fork)
    else:
        _start(popen, *given)


def _fork(job, descriptors):
    sys.stdout.flush()
    # A signal that is heard while Python forks is told to nobody.
    held = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    pid = os.fork()
    signal.pthread_sigmask(signal.SIG_SETMASK, held)
    if pid == 0:
        _become(job, descriptors)
        _run(job)
    return pid


def main(fd):
    """The zygote: fork what is asked for, until nobody can ask any more."""
    for name in (*IMPORTED_LATE, *_modules()):
        with contextlib.suppress(ModuleNotFoundError):  # an extra that is not installed here
            importlib.import_module(name)
    named = {os.getcwd(), *os.environ.get("PYTHONPATH", "").split(os.pathsep)}
    sys.path[:] = OWN_PATHS[:] = [path for path in sys.path if path not in named]
    warnings.filterwarnings("ignore", "This process .* is multi-threaded")
    assert len(os.listdir("/proc/self/task")) == 1, "a thread would be lost in a fork"
    subprocess.Popen._execute_child = _execute_within
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=fd) as asking:
        while True:
            message, descriptors, _, _ = socket.recv_fds(asking, MOST_BYTES, MOST_DESCRIPTORS)
            if not message:
                return
            job = Job(*json.loads(message))
            if (pid := _clone_parent()) == 0:
                break
            asking.send(str(pid).encode())
            for descriptor in descriptors:
                os.close(descriptor)
    # A test that is killed leaves nobody behind.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    _become(job, descriptors)
    _run(job)


def _modules():
    """The names of the package's modules, but for doors, which only run, and sinks, which may want
    an extra."""
    for module in pkgutil.walk_packages(impala_async.__path__, "impala_async."):
        if not module.name.endswith(".__main__") and ".sinks." not in module.name:
            yield module.name


def _clone_parent():
    """Fork, but make the new process a child of this one's parent, which may wait for it."""
    ctypes.pythonapi.PyOS_BeforeFork()
    flags = CLONE_PARENT | signal.SIGCHLD
    # PyDLL keeps the interpreter's lock.
    pid = ctypes.PyDLL(None).syscall(NR_CLONE[platform.machine()], flags, 0, 0, 0, 0)
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    else:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
        assert pid > 0, "the kernel refuses another process"
    return int(pid)


def _become(job, descriptors):
    """Take over what exec would have given; the process that it came from is forgotten."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if signal.getsignal(number) is not signal.SIG_IGN:  # a started program ignores it too
            is_python = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if is_python else signal.SIG_DFL)
    if job.process_group != SAME_GROUP:
        os.setpgid(0, job.process_group)
    signal.pthread_sigmask(signal.SIG_SETMASK, job.blocked)
    free = max(job.numbers) + 1
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, free) for descriptor in descriptors]
    for number, descriptor in zip(job.numbers, moved, strict=True):
        os.dup2(descriptor, number)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number not in job.numbers:
            with contextlib.suppress(OSError):  # that which listed them
                os.close(number)
    # Those of the zygote believe that they can seek, or that nobody reads line by line.
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
    logging.root.handlers.clear()
    # Python's own generator does so by itself.
    np.random.seed(None)
    os.chdir(job.folder)
    os.environ.clear()
    os.environ.update(job.environment)
    first = os.path.dirname(job.program) if job.program.endswith(".py") else os.getcwd()
    named = filter(None, job.environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = [first, *named, *OWN_PATHS]


def _run(job):
    """The program as an interpreter runs it, and its end: the stack below never goes on."""
    sys.argv = [job.program, *job.flags]
    if not hasattr(sys.modules.get(job.program), "__path__"):
        # It runs as `__main__`, also where somebody has imported it.
        sys.modules.pop(job.program, None)
    code = 0
    try:
        if job.program.endswith(".py"):
            runpy.run_path(job.program, run_name="__main__")
        else:
            runpy.run_module(job.program, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        code = ended.code
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    if isinstance(code, str):
        sys.stderr.write(f"{code}\n")
        code = 1
    ctypes.pythonapi.Py_Exit(int(code or 0))
    raise AssertionError


if __name__ == "__main__":
    main(int(sys.argv[1]))
