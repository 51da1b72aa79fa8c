"""The addresses at which a learner listens."""

import json
import re
from collections.abc import Iterator

from pydantic import Field, field_validator

from impala_async.config.section import Section

TCP_URL = re.compile(
    r"tcp://(\[[0-9a-f:.]+(?:%\w+)?\]|[^\s:/\[\]]+):(\*|\d{1,5})", re.ASCII | re.IGNORECASE
)
# Hosts that stand for every interface of a machine.
EVERY_HOST = ("tcp://*", "tcp://0.0.0.0", "tcp://[::]")


def is_loopback(url: str) -> bool:
    """Whether only processes of this host can reach a tcp url."""
    host = url.removeprefix("tcp://").rpartition(":")[0]
    return host in {"localhost", "[::1]", "::1"} or host.startswith("127.")


def like_url(text: str) -> str | None:
    """The tcp url that may be meant by a port, or by a host and a port."""
    urls = (text, f"tcp://{text}", f"tcp://127.0.0.1:{text}")
    return next(filter(_is_url, urls), None)


def _is_url(text: str) -> bool:
    found = TCP_URL.fullmatch(text)
    return found is not None and (found[2] == "*" or 0 < int(found[2]) < 65536)


class BindSection(Section):
    """Where the learner listens, over tcp. `*` as the port takes a free one.

    Actors of its own host move to ipc by themselves.
    """

    data: str = Field("tcp://127.0.0.1:5555", description="Trajectories come in here.")
    weights: str = Field("tcp://127.0.0.1:5556", description="Weights are pulled from here.")

    @field_validator("data", "weights", mode="before")
    @classmethod
    def _is_tcp(cls, value: object) -> str:
        url = str(value)
        if value == url and _is_url(url):
            return url
        wanted = "tcp://HOST:PORT, or tcp://HOST:* for any free port"
        if url.removeprefix("tcp://").count(":") > 1:
            wanted += "; an IPv6 address stands in brackets, as in tcp://[::1]:5555"
        hint = f"; did you mean {like}?" if (like := like_url(url)) else ""
        raise ValueError(f"wants {wanted}, got {json.dumps(value, default=str)[:200]}{hint}")

    def broken_rules(self) -> Iterator[str]:
        (host, _, port), (other_host, _, other_port) = (
            url.rpartition(":") for url in (self.data, self.weights)
        )
        is_shared = host == other_host or not {host, other_host}.isdisjoint(EVERY_HOST)
        if port == other_port != "*" and is_shared:
            yield (
                f"data and weights each need a port of their own, got {self.data} and "
                f"{self.weights}"
            )
