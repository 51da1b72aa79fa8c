"""Before anything imports torch: one thread for its kernels.

Its pool spins while it waits, and on few cores that takes them from the processes under test.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
