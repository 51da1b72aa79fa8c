"""How a benchmark ends: by its exit code, or by a signal in one line, with all that it began."""

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from bench.machine import commit_of
from impala_async.errors import Exit


def run(main: Callable[[], int]) -> NoReturn:
    """SIGTERM ends it as Ctrl-C does: what it has launched ends, and its folders go."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        commit_of(Path.cwd())  # what is measured, whatever is committed meanwhile
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(Exit.INTERRUPTED)
