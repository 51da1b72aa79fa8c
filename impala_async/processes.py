"""How our processes begin, are asked to end, and end.

Modules that are being imported answer an exception from nowhere with long tracebacks, or worse. So
behind a door a signal ends the process at once, with one word, until a service takes it over.
"""

import atexit
import ctypes
import math
import os
import signal
import stat
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn
from weakref import WeakSet

from impala_async.errors import ConfigError, Exit
from impala_async.output import WRITER, flush_output, write_last

VARIABLE = "IMPALA_ASYNC_LIFELINE"
TORCHRUN = "TORCHELASTIC_RUN_ID"
"""A variable that torchrun sets for the processes that it starts."""
PARENT_POLL_S = 0.5
# A child that has not ended in good order by then ends anyway.
ORPHAN_S = 1.0
CTRL_C = {signal.SIGINT}
# A terminal that is closed asks like SIGTERM, but where we were started to ignore it, as by nohup.
REQUESTS = (
    signal.SIGINT,
    signal.SIGTERM,
    *([] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]),
)
# To a learner that serves: its run is given up, as an actor cannot run. Schedulers send SIGUSR1.
GIVE_UP = signal.SIGRTMIN + 1
# Supervisors may tell a process twice, as one of a group too: what comes again so soon is an echo.
ECHO_S = 0.5
# Threads that end by themselves once Python ends, as those of an idle pool do, need much less.
GRACE_S = 2.0
# Small tensors gain nothing from more threads, and the processes share the cores.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
# So long a process that was asked to end goes on with a start for which others wait.
TERM_PATIENCE_S = 8.0
_undoings: list[Callable[[], object]] = []
# A service that was told to end has done what it was for.
_code_of_term: list[int] = [Exit.DONE]
_is_orphaned = threading.Event()
_leaves_threads = threading.Event()
_SIGEV_THREAD = 2
GROWTH_BYTES, GROWTH_OVER_S = 64 << 20, 10.0
# These are options of mallopt, from malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_NEVER = (1 << 31) - 1
# More than this an older glibc refuses.
_LARGE = 32 << 20


class Lifeline:
    """The parent's side of a pipe: its children end with it, and theirs.

    Nothing is written to it. When the parent is gone, even by SIGKILL, it is closed and every child
    sees it. (The kernel's parent-death signal would follow the thread that started the child.)
    """

    def __init__(self) -> None:
        self._read_fd, self._write_fd = os.pipe()
        _lifelines.add(self)

    def start(
        self, command: Sequence[str], fds: tuple[int, ...] = (), **how: Any
    ) -> "subprocess.Popen[bytes]":
        """A child. It hears no Ctrl-C while it starts: an interpreter would print a traceback."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, CTRL_C)
        try:
            environment = {**ONE_THREAD, **os.environ, VARIABLE: str(self._read_fd)}
            return subprocess.Popen(command, pass_fds=(*fds, self._read_fd), env=environment, **how)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def close(self) -> None:
        _lifelines.discard(self)
        os.close(self._write_fd)
        os.close(self._read_fd)

    def let_go(self) -> None:
        """In a process that foreign code has forked, and that may outlive this one."""
        os.close(self._write_fd)


_lifelines = WeakSet[Lifeline]()


def _let_all_go() -> None:
    for lifeline in _lifelines:
        lifeline.let_go()


os.register_at_fork(after_in_child=_let_all_go)


def inherited_fds() -> tuple[int, ...]:
    """A child passes these on to its own children, whose environment names them already."""
    value = os.environ.get(VARIABLE, "")
    return (int(value),) if value.isdecimal() else ()


def hold() -> None:
    """Let a child end with its parent from now on. Without a lifeline this does nothing, but to
    what torchrun has started, and would leave behind where it is killed: that ends as by SIGTERM.
    """
    is_held = False
    for fd in inherited_fds():
        with suppress(OSError):
            if not stat.S_ISFIFO(os.fstat(fd).st_mode):
                continue  # not a descriptor of ours: the variable came from somewhere else
            # Foreign code may hold the interpreter's lock: then the kernel ends us, a little later.
            call_when_read(fd, "alarm", math.ceil(ORPHAN_S + 0.2))
            threading.Thread(target=_watch, args=(fd,), name="lifeline", daemon=True).start()
            is_held = True
    if TORCHRUN in os.environ and not is_held:
        parent = (os.getppid(),)
        threading.Thread(target=_watch_parent, args=parent, name="parent", daemon=True).start()


def call_when_read(fd: int, function: str, argument: int) -> None:
    """Let the C library call a function of its own when there is a byte to read, or no writer left.

    The read is on a thread that knows no interpreter's lock.
    """
    libc = ctypes.CDLL(None)
    # An older glibc lacks it: nothing is called then. Other libraries lay it out in another way.
    is_glibc = hasattr(libc, "gnu_get_libc_version") and hasattr(libc, "aio_read")
    if not is_glibc or struct.calcsize("P") != 8:
        return
    libc.calloc.restype = ctypes.c_void_p
    # Never freed: the read outlives whoever asked for it.
    request = (ctypes.c_char * 513).from_address(libc.calloc(1, 513))
    start = ctypes.addressof(request)
    called = ctypes.cast(libc[function], ctypes.c_void_p).value
    # struct aiocb of glibc on 64 bits, with its struct sigevent; the byte lies behind it.
    struct.pack_into("=i12xQQ", request, 0, fd, start + 512, 1)
    struct.pack_into("=QiiQQ", request, 32, argument, 0, _SIGEV_THREAD, called, 0)
    libc.aio_read(request)


def _watch_parent(pid: int) -> None:
    while os.getppid() == pid:
        time.sleep(PARENT_POLL_S)
    _is_orphaned.set()
    os.kill(os.getpid(), signal.SIGTERM)


def _watch(fd: int) -> None:
    try:
        while os.read(fd, 1):
            pass
    except OSError:
        return
    _is_orphaned.set()
    os.kill(os.getpid(), signal.SIGTERM)
    # An interpreter that is torn down may let no other thread run: then the kernel ends us.
    signal.setitimer(signal.ITIMER_REAL, ORPHAN_S + 0.2)
    time.sleep(ORPHAN_S)
    os._exit(Exit.TRY_AGAIN)


def begin() -> None:
    """Prepare this process, before anything is opened or started."""
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError("a door opens in a main thread, which hears signals: start a process")
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # Those in process groups of their own say something too, where a terminal has `stty tostop`.
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # it gets the lowest number that is free, which is fd
            os.set_inheritable(fd, True)
            setattr(sys, name, open(fd, "r" if fd == 0 else "w", closefd=False))  # noqa: SIM115
    os.register_at_fork(after_in_child=_be_no_door)


def _be_no_door() -> None:
    """SIGTERM ends what foreign code forks, as it expects, and is not heard by us in its stead:
    the pipe in which Python writes down signals is the parent's."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


class Interrupted(KeyboardInterrupt):
    """One of `REQUESTS` with its number: foreign code may raise a KeyboardInterrupt too."""


def interrupt(number: int, frame: object) -> None:
    raise Interrupted(number)


def without_echo(
    handle: Callable[..., object], clock: Callable[[], float] = time.monotonic
) -> Callable[..., None]:
    """A handler for which a signal and its echo are one."""
    heard_at: dict[object, float] = {}

    def hear(*told: object) -> None:
        if (now := clock()) - heard_at.get(told[:1], -math.inf) >= ECHO_S:
            heard_at[told[:1]] = now
            handle(*told)

    return hear


def answer_requests(handler: Callable[..., object] | signal.Handlers) -> None:
    """Let this answer whatever asks this process to end."""
    for number in REQUESTS:
        signal.signal(number, handler)


def last_word(*numbers: int) -> tuple[str, int]:
    """The last word and the exit code of a process that such signals have ended."""
    if numbers and signal.SIGINT not in numbers:
        return "terminated\n", _code_of_term[-1]
    return "interrupted\n", Exit.INTERRUPTED


def is_ctrl_c(error: BaseException) -> bool:
    """Whether a user has raised it. Where Python's own handler is left, anybody may have."""
    is_left = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return isinstance(error, KeyboardInterrupt if is_left else Interrupted)


@contextmanager
def signals_kept() -> Iterator[None]:
    """A context that leaves our signals to those who had them: many a simulator takes them."""
    before = {number: signal.getsignal(number) for number in REQUESTS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def quit_at_once() -> Iterator[None]:
    """A context in which a signal ends this process at once, unless somebody takes it over."""
    with signals_kept():
        answer_requests(_quit)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, CTRL_C)
        yield


@contextmanager
def result_wanted() -> Iterator[None]:
    """A context in which a request to end is none that can be met, as there is no result then; and
    stdout waits for the reader of the result, also where a parent has made it not wait."""
    stdout = os.dup(1)  # of the same open file, whatever becomes of 1
    was_blocking = os.get_blocking(stdout)
    os.set_blocking(stdout, True)
    _code_of_term.append(Exit.TRY_AGAIN)
    try:
        yield
    finally:
        _code_of_term.pop()
        with suppress(OSError):  # somebody may have closed it
            os.set_blocking(stdout, was_blocking)  # the parent has it, too
            os.close(stdout)


@contextmanager
def terms_later() -> Iterator[None]:
    """A context at whose end this process first hears what asked it to end meanwhile, but for
    Ctrl-C: others wait for it, and would not be told. It hears it before that if it is asked once
    more, if the context is too long, or if nobody is there any more for whom it works."""
    before = {int(number): signal.getsignal(number) for number in {*REQUESTS} - CTRL_C}
    heard = list[int]()

    def hear(number: int, frame: FrameType | None) -> None:
        answer = before[number]
        if (heard or _is_orphaned.is_set()) and callable(answer):
            answer(number, frame)
        elif not heard:
            heard.append(number)
            again.start()

    again = threading.Timer(TERM_PATIENCE_S, lambda: os.kill(os.getpid(), heard[0]))
    again.daemon = True
    later = without_echo(hear)
    for number in before:
        signal.signal(number, later)
    try:
        yield
    finally:
        again.cancel()
        for number, answer in before.items():
            if signal.getsignal(number) is later:  # else somebody has taken it over
                signal.signal(number, answer)
        if heard:
            os.kill(os.getpid(), heard[0])


@contextmanager
def undone(undo: Callable[[], object]) -> Iterator[None]:
    """A context that calls `undo` before a signal ends this process at once in it."""
    _undoings.append(undo)
    try:
        yield
    finally:
        _undoings.remove(undo)


def end_silently() -> None:
    """Let Ctrl-C end this process without a word: it belongs to one that has heard it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, CTRL_C)


def _quit(number: int, frame: object) -> None:
    answer_requests(signal.SIG_IGN)  # another one must not cut this short
    word, code = last_word(number)
    try:
        for undo in reversed(_undoings):
            with suppress(OSError):
                undo()
        write_last(word)
    finally:
        os._exit(code)


def end_at_signal(code: int) -> None:
    """Let a signal end this process at once, with that exit code and without a word."""
    answer_requests(lambda *_: os._exit(code))


def leave_threads() -> None:
    """From now on Python tears nothing down beneath a thread that is left: torch would abort the
    process, whatever its exit code was."""
    _leaves_threads.set()


def leave(code: int) -> NoReturn:
    """End this process within `GRACE_S`: many a simulator leaves what Python would wait for."""
    is_left = any(each.daemon and each.name != WRITER for each in threading.enumerate())
    if _leaves_threads.is_set() and is_left:
        flush_output()
        os._exit(code)
    end_at_signal(code)
    # Python takes its handlers away before the process is gone.
    atexit.register(_pass_over_requests)
    if _left():
        threading.Thread(target=_insist, args=(code,), name="leave", daemon=True).start()
    sys.exit(code)


def _pass_over_requests() -> None:
    for number in REQUESTS:
        signal.signal(number, signal.SIG_IGN)


def _insist(code: int) -> None:
    time.sleep(GRACE_S)
    left = _left()
    if not left:
        return  # it ends by itself
    flush_output()
    names = ", ".join(f"{type(each).__name__} {each.name}" for each in left)
    write_last(f"ending without what the environment left running: {names}\n")
    for each in left:
        if not isinstance(each, threading.Thread):
            each.terminate()
    os._exit(code)


def _left() -> list[Any]:
    found: list[Any] = threading.enumerate()
    if "multiprocessing" in sys.modules:
        found += sys.modules["multiprocessing"].active_children()
    return [each for each in found if not each.daemon and each is not threading.main_thread()]


def keep_freed_memory() -> None:
    """Keep freed memory for the next batch; before the first thread, which would get an arena.

    glibc would unmap a large block at once, and a learner pay for each in page faults. The top of
    another thread's arena is never given back. Another C library is left as it is.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    mallopt(_ARENA_MAX, 1)
    # Without the first, the second would only end glibc's own adapting, for the worse.
    if mallopt(_MMAP_THRESHOLD, _NEVER) or mallopt(_MMAP_THRESHOLD, _LARGE):
        mallopt(_TRIM_THRESHOLD, _NEVER)


def give_back_freed_memory() -> None:
    """Give what is free now to the kernel, after a flood that will not come again."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


class Growth:
    """Whether this process has grown of late by more than what it is told by honest peers."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def is_seen(self, expected_bytes: int = 0) -> bool:
        """Asked some times a second. So many bytes it may have taken for itself."""
        now = time.monotonic()
        try:
            with open("/proc/self/statm") as file:
                num_bytes = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except OSError:  # no descriptor is left for it
            return False
        self._seen.append((now, num_bytes))
        while self._seen[0][0] < now - GROWTH_OVER_S:
            self._seen.popleft()
        return num_bytes - min(seen for _, seen in self._seen) > GROWTH_BYTES + expected_bytes
