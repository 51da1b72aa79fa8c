"""Who reaches a port may say anything: the learner lives, and the actors at work feel little."""

import subprocess
import sys

import pytest

from tests.wire import raw_peer

pytestmark = pytest.mark.e2e

# A router that reads only when it is told to, as a learner that builds a model.
ROUTER = """
import sys
from impala_async.wire.sockets import Router, new_context
router = Router(new_context(), "tcp://127.0.0.1:*", None, 1 << 20)
print(router.url, flush=True)
sys.stdin.readline()
router.has_input()
print("lives", flush=True)
"""
# Longer than any heartbeat that was ever set.
BEAT_S = 6.0


def test_who_hangs_up_while_its_messages_wait_ends_nobody() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", ROUTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as router:
        assert router.stdout is not None
        url = router.stdout.readline().strip()
        for _ in range(40):
            raw = raw_peer.connect(url)
            raw.sendall(raw_peer.message(b"hello") * 3000)
            raw_peer.hang_up(raw)
        with pytest.raises(subprocess.TimeoutExpired):
            router.wait(BEAT_S)
        assert router.communicate("\n", timeout=20.0)[0] == "lives\n"
        assert router.returncode == 0
