"""Why no learner answers at an address, as far as a plain connection can tell.

Runs on: inquiry thread; `why` on the sampler thread
"""

import contextlib
import socket
import threading

CONNECT_S = 3.0
UNKNOWN = "it is not known yet why"


class Inquiry:
    """Asks in a thread, since to look up a name may take long; anew whenever it is asked."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._found = UNKNOWN
        self._thread: threading.Thread | None = None

    def why(self, wait_s: float = 0.2) -> str:
        """What is known now; what is found out later is for the next one to ask."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._ask, name="inquiry", daemon=True)
            self._thread.start()
        self._thread.join(wait_s)
        return self._found

    def _ask(self) -> None:
        self._found = why_silent(self._url)


def why_silent(url: str) -> str:
    """One clause; takes up to `CONNECT_S`, and what it takes to look up the name."""
    host, _, port = url.removeprefix("tcp://").rpartition(":")
    try:
        connection = socket.create_connection((host.strip("[]"), int(port)), CONNECT_S)
    except socket.gaierror:
        return f"the name {host} does not resolve"
    except ConnectionRefusedError:
        return "the connection is refused, nothing listens there"
    except TimeoutError:
        return "there is no answer at all from that host"
    except OSError as error:
        return f"there is no way to it ({error.strerror or error})"
    except (ValueError, UnicodeError):
        return "that is no address"
    with contextlib.closing(connection):
        return "something listens there, but has said nothing: it may be starting, or no learner"
