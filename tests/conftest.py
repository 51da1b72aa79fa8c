"""Before anything imports torch: one thread for its kernels.

Its pool spins while it waits, and on few cores that takes them from the processes under test.
"""

import os

from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Other processes share the cores: how long an example takes says nothing.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")
