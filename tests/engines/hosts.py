"""Hosts of a network that is here only: namespaces, joined by a bridge, each with a name, and with
files for its sockets that no other one sees. Needs root."""

import os
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from tempfile import TemporaryDirectory

from tests.e2e.harness import ONE_THREAD

BRIDGE, NETWORK, NAMES = "impala0", "10.213.77", "names"
# No host sees the files of another one in TMPDIR, though all have the same disk.
PRIVATE = (
    'mount -t tmpfs none "$TMPDIR" && mount --bind "$NAMES" /etc/hosts && hostname "$HOST" && '
    'exec "$@"'
)


def ip(*words, check=True):
    return subprocess.run(["ip", *words], check=check, capture_output=True, text=True).stdout


class Host:
    """One namespace, and the processes in it."""

    def __init__(self, number, folder, private):
        """`folder` is on the disk of all, with the names of all; at `private` each has its own."""
        self.name, self.address = f"impala-host-{number}", f"{NETWORK}.{number}"
        self._end = f"impala-v{number}"
        self._folder, self._private, self._processes = folder, private, []

    def make(self):
        ip("netns", "add", self.name)
        ip("link", "add", self._end, "type", "veth", "peer", "name", "eth0", "netns", self.name)
        ip("link", "set", self._end, "master", BRIDGE, "up")
        inside = ("-n", self.name)
        ip(*inside, "link", "set", "lo", "up")
        ip(*inside, "address", "add", f"{self.address}/24", "dev", "eth0")
        ip(*inside, "link", "set", "eth0", "up")

    def open(self, module, *flags, **environment):
        """A process, and the file of what it says."""
        log = self._folder / f"{self.name}-{len(self._processes)}.log"
        own = {"TMPDIR": self._private, "XDG_RUNTIME_DIR": "", "GLOO_SOCKET_IFNAME": "eth0"}
        own |= {"NAMES": str(self._folder / NAMES), "HOST": self.name}
        command = ["ip", "netns", "exec", self.name, "unshare", "--uts", "sh", "-c", PRIVATE, "sh"]
        with log.open("wb") as file:
            process = subprocess.Popen(
                [*command, sys.executable, "-m", module, *flags],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**os.environ, **ONE_THREAD, **own, **environment},
            )
        self._processes.append(process)
        return process, log

    def cut(self, *, is_cut=True):
        ip("link", "set", self._end, "down" if is_cut else "up")

    def received(self):
        """The bytes that have come over its wire."""
        path = f"/sys/class/net/{self._end}/statistics/tx_bytes"
        with open(path) as file:
            return int(file.read())

    def close(self):
        for process in self._processes:
            if process.poll() is None:
                process.terminate()
        for process in self._processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        ip("netns", "del", self.name, check=False)
        ip("link", "del", self._end, check=False)


@contextmanager
def hosts(count, folder):
    folder.mkdir(exist_ok=True)
    with ExitStack() as stack:
        stack.callback(ip, "link", "del", BRIDGE, check=False)
        ip("link", "add", BRIDGE, "type", "bridge")
        ip("link", "set", BRIDGE, "up")
        # Paths of sockets have to be short.
        private = stack.enter_context(TemporaryDirectory(dir="/tmp"))
        found = [Host(number, folder, private) for number in range(1, count + 1)]
        named = "".join(f"{each.address} {each.name}\n" for each in found)
        (folder / NAMES).write_text(f"127.0.0.1 localhost\n{named}")
        for each in found:
            stack.callback(each.close)
            each.make()
        yield found
