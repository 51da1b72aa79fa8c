"""The learner's sections of the config: batches, the ring, limits, periods, where it listens."""

import math
import re
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, field_validator

from impala_async.config.actor import MAX_COLUMNS, Device
from impala_async.config.section import MOST_S, Section, check_count

# ZeroMQ takes no other host.
TCP_URL = re.compile(
    r"tcp://(\[[0-9a-f:.]+(?:%\w+)?\]|\*|[a-z0-9][\w.-]*):(\*|\d{1,5})", re.ASCII | re.IGNORECASE
)
# A learner may listen there, and nobody can dial them.
EVERY_HOST = ("*", "0.0.0.0", "[::]")
NumPasses = Annotated[Annotated[int, Field(ge=1)] | Literal["auto"], BeforeValidator(check_count)]
# The secret of a run: where the environment of a process has it, and the file in a run folder.
KEY_VARIABLE, KEY_FILE = "IMPALA_ASYNC_KEY", "key"
# A batch that is used while nothing new waits teaches little after these.
MOST_PASSES = 16
AUTO_STOP_KL = 0.1


def is_loopback(url: str) -> bool:
    """Whether only processes of this host can reach a tcp url."""
    host = url.removeprefix("tcp://").rpartition(":")[0]
    return host in {"localhost", "[::1]", "::1"} or host.startswith("127.")


def like_url(text: str) -> str | None:
    """The tcp url that may be meant by a port, or by a host and a port."""
    bare = text.removeprefix("tcp:").strip("/")
    urls = (text, f"tcp://{bare}", f"tcp://127.0.0.1:{bare}")
    return next(filter(_is_url, urls), None)


def _is_url(text: str) -> bool:
    found = TCP_URL.fullmatch(text)
    return found is not None and (found[2] == "*" or 0 < int(found[2]) < 65536)


class LearnerSection(Section):
    """The learner: batches, ring, limits and periods."""

    device: Device = "auto"
    """auto, cpu, cuda or cuda:N."""
    threads: int = Field(1, ge=1, le=1024)
    """torch threads of the learner."""
    batch_columns: int = Field(64, ge=1, le=MAX_COLUMNS)
    """B: trajectories per batch; in lockstep all actors'."""
    num_passes: NumPasses = 1
    """How often each batch is used. Not set: 8 in ppo and appo, else 1. auto: while nothing new
    waits, at most 16 times."""
    stop_kl: float | None = Field(None, gt=0)
    """ppo, appo: a batch is used no more once policy/kl is over this; none: 0.1 where num_passes is
    auto, else never."""
    minibatch_buffer_size: int = Field(1, ge=1)
    """Batches replayed side by side."""
    init_num_passes: int | None = Field(None, ge=1)
    """Passes of the ring's first batch; none: num_passes."""
    queue_size: int = Field(1, ge=1)
    """Batches that may wait for the learner, beside the one that is filling; in lockstep 1."""
    max_lag: int = Field(1000, ge=1, le=10_000)
    """A trajectory older than this many updates is never trained on."""
    publish_every_updates: int = Field(1, ge=1)
    """Updates per published version."""
    report_every_s: float = Field(2.0, ge=0.01, le=MOST_S)
    """Seconds between reports."""
    log_updates: bool = False
    """Write `updates.jsonl`, too: the statistics of each pass, where a report has means."""
    stuck_end_s: float = Field(60.0, ge=2, le=1e6)
    """An update or an event loop that takes this long ends the learner, and after half of it the
    stacks of all threads are shown. Until the first update is done it is ten times as long, and
    always three times as long as the longest so far."""
    lease_s: float = Field(10.0, ge=1, le=MOST_S)
    """An actor silent this long loses its credit. It shows that it lives five times as often, and
    at least every 2 s."""

    def broken_rules(self) -> Iterator[str]:
        first, passes = self.init_num_passes, self.num_passes
        if passes == "auto" and (first is not None or self.minibatch_buffer_size > 1):
            yield (
                "num_passes (auto) goes over one batch at a time: drop init_num_passes and "
                "minibatch_buffer_size, or give num_passes as a number"
            )
        if self.publish_every_updates > self.max_lag:
            yield (
                f"publish_every_updates ({self.publish_every_updates}) must not exceed max_lag "
                f"({self.max_lag}), or all data is too old before new weights come out"
            )

    @property
    def least_passes(self) -> int:
        """Those that a batch has though others wait."""
        return 1 if self.num_passes == "auto" else self.num_passes

    @property
    def most_passes(self) -> int:
        return MOST_PASSES if self.num_passes == "auto" else self.num_passes

    @property
    def largest_kl(self) -> float:
        """A batch is used no more beyond it."""
        usual = AUTO_STOP_KL if self.num_passes == "auto" else math.inf
        return usual if self.stop_kl is None else self.stop_kl

    @property
    def heartbeat_s(self) -> float:
        """How often an actor shows that it lives: a few late heartbeats end no lease."""
        return min(2.0, self.lease_s / 5)

    @property
    def starved_after_s(self) -> float:
        """A learner that has waited so long for a batch is starved."""
        return min(5.0, self.lease_s / 2)


class BindSection(Section):
    """Where the learner listens, over tcp; port `*` takes a free one. Local actors move to ipc."""

    data: str = "tcp://127.0.0.1:5555"
    """Trajectories come in here."""
    weights: str = "tcp://127.0.0.1:5556"
    """Weights are pulled from here."""
    host: str | None = None
    """The learner's name or address for actors, as `service.json` has it; none: the one that it
    listens on, and where that is every one, that of its default route."""
    encrypt: Literal["auto", "on", "off"] = "auto"
    """Over tcp all is encrypted, and nobody is heard who has not got the key of the run, which its
    folder keeps or IMPALA_ASYNC_KEY has. auto: where other hosts reach a port, or that is set."""

    @field_validator("host")
    @classmethod
    def _is_dialled(cls, value: str | None) -> str | None:
        if value is not None and (value in EVERY_HOST or not _is_url(f"tcp://{value}:1")):
            raise ValueError(
                "wants the name or the address by which other hosts know this one, without a port, "
                f"where IPv6 stands in brackets, got {value[:200]!r}"
            )
        return value

    @field_validator("data", "weights", mode="before")
    @classmethod
    def _is_tcp(cls, value: object) -> object:
        if isinstance(value, int) and 0 < value < 65536:
            value = str(value)
        if not isinstance(value, str) or _is_url(value):
            return value
        hint = f"; did you mean {like}?" if (like := like_url(value)) else ""
        raise ValueError(
            "wants tcp://HOST:PORT, or tcp://HOST:* for any free port, where HOST may be [IPv6], "
            f"got {value[:200]!r}{hint}"
        )

    def broken_rules(self) -> Iterator[str]:
        if self.host is not None and (is_loopback(self.data) or is_loopback(self.weights)):
            yield (
                f"host ({self.host}) is for other hosts, which do not reach {self.data} and "
                f"{self.weights}: set data and weights to tcp://0.0.0.0:PORT, or drop it"
            )

    @property
    def open_urls(self) -> list[str]:
        """Where other hosts reach it."""
        return [url for url in (self.data, self.weights) if not is_loopback(url)]

    def warnings(self) -> Iterator[str]:
        if len(found := self.open_urls) == 1:
            other = self.weights if found[0] == self.data else self.data
            yield (
                f"bind: other hosts reach {found[0]} and not {other}, and their actors want both: "
                "set bind.data and bind.weights to tcp://0.0.0.0:PORT"
            )
        if self.encrypt == "off" and (found := self.open_urls):
            yield (
                f"bind: other hosts reach {' and '.join(found)}, and with bind.encrypt=off "
                "connections are neither encrypted nor authenticated: use it only inside a network "
                "that you trust"
            )
