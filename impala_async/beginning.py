"""The beginning of a process: what whoever has started it may have left in a bad way is mended.

Descriptors 0 to 2 may be closed: what we open would land there, and our children take it for their
streams. The end of children may be ignored: then nobody learns with which code they ended.
"""

import os
import signal
import sys


def begin() -> None:
    """Before anything is opened or started. Twice does no harm."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # it gets the lowest number that is free, which is fd
            os.set_inheritable(fd, True)
            setattr(sys, name, open(fd, "r" if fd == 0 else "w", closefd=False))  # noqa: SIM115
