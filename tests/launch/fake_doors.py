"""Real processes behind fake doors: the folder that they start in holds a package of that name."""

import json
import os
import signal
import threading
import time
from contextlib import contextmanager
from pathlib import Path

WITHIN_S = 10.0

START = """
import json, os, signal, sys, time
from pathlib import Path

me = Path(__file__).stem

def note(**what):
    line = json.dumps({"who": me, "at": time.monotonic(), "pid": os.getpid(), **what})
    with open("events", "a") as file:
        file.write(line + "\\n")

def count(who):
    return sum(json.loads(line)["who"] == who for line in Path("events").read_text().splitlines())

def serve():
    Path("run/service.json").write_text(json.dumps({"pid": os.getpid()}))

def hear():
    # As behind a door.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

def wait_for(is_there):
    give_up_at = time.monotonic() + 20
    while not is_there() and time.monotonic() < give_up_at:
        time.sleep(0.005)
"""
ACTOR_UNTIL_KILLED = """
note(flags=sys.argv[1:])
wait_for(lambda: False)
"""


def make_doors(**doors):
    """Let each of these modules be what a process of that door runs."""
    package = Path("impala_async")
    package.mkdir(exist_ok=True)
    (package / "__init__.py").touch()
    for door, text in doors.items():
        (package / f"{door}.py").write_text(START + text)


def events(who, *keys):
    noted = [json.loads(line) for line in Path("events").read_text().splitlines()]
    return [e for e in noted if e["who"] == who and e.keys() >= set(keys)]


@contextmanager
def signals(*numbers, when):
    """Send signals to this process, each once `when` is true of what was sent before.

    The run must have taken them over before, or they would end the tests.
    """
    before = {number: signal.getsignal(number) for number in numbers}

    def send():
        give_up_at = time.monotonic() + WITHIN_S
        for n, number in enumerate(numbers):
            while signal.getsignal(number) is before[number] or not when(n):
                assert time.monotonic() < give_up_at
                time.sleep(0.001)
            os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    yield
    thread.join()
