"""The relay from its start to its end: where it listens, what it waits for, what it says.

Runs on: main thread
"""

import logging
import signal
import time
from dataclasses import astuple, replace

from impala_async.config_bind import is_loopback
from impala_async.errors import EXIT_DONE, EXIT_INTERRUPTED, ConfigError
from impala_async.interrupts import REQUESTS
from impala_async.relay.exchange import Exchange
from impala_async.relay.welcome import Translator
from impala_async.wire.local_link import LocalLink
from impala_async.wire.messages import MAX_MESSAGE_BYTES
from impala_async.wire.sockets import AddressError, Poller, Router, new_context

logger = logging.getLogger(__name__)

TICK_S = 0.5
# While something waits for a connection.
RETRY_S = 0.02
STATUS_EVERY_S = 10.0


class RelayService:
    """Owns the context, the two ports and the folder for ipc."""

    def __init__(self, learner_url: str, bind_url: str) -> None:
        self._signal: int | None = None
        self._context = new_context()
        self._link = LocalLink()
        self._data, self._weights = self._bind(bind_url)
        self._poller = Poller()
        is_far = not is_loopback(learner_url)
        self._exchange = Exchange(
            self._context,
            learner_url,
            (self._data, self._weights),
            self._poller,
            Translator(self._link, self._weights.port, is_far),
        )
        url = self._data.connectable_url()
        logger.info("start actors with --learner %s (the learner is at %s)", url, learner_url)
        if not is_loopback(bind_url):
            logger.warning(
                "--bind %s leaves this host, and connections are neither encrypted nor "
                "authenticated: use it only inside a network that you trust",
                bind_url,
            )

    def run(self) -> int:
        """Until a signal comes; the exit code."""
        for number in REQUESTS:
            signal.signal(number, self._on_signal)
        try:
            self._serve()
        finally:
            self._close()
        return EXIT_INTERRUPTED if self._signal == signal.SIGINT else EXIT_DONE

    def _serve(self) -> None:
        exchange, said = self._exchange, replace(self._exchange.counts)
        next_tick = next_status = time.monotonic()
        while self._signal is None:
            self._poller.wait(RETRY_S if exchange.is_late else TICK_S)
            exchange.flush()
            now = time.monotonic()
            if now >= next_tick:
                exchange.sweep(now)
                next_tick = now + TICK_S
            if now >= next_status and exchange.counts != said:
                said, next_status = replace(exchange.counts), now + STATUS_EVERY_S
                self._say_status()
        self._say_status()

    def _say_status(self) -> None:
        logger.info(
            "%d actors; messages: %d up, %d down, %d bad, %d lost; weights: %d served, %d fetched",
            self._exchange.num_actors,
            *astuple(self._exchange.counts),
        )

    def _bind(self, bind_url: str) -> tuple[Router, Router]:
        host = bind_url.rpartition(":")[0]
        ends = ((bind_url, self._link.data_path), (f"{host}:*", self._link.weights_path))
        routers: list[Router] = []
        try:
            for url, ipc_path in ends:
                routers.append(Router(self._context, url, ipc_path, MAX_MESSAGE_BYTES))
        except AddressError as error:
            for router in routers:
                router.close()
            self._context.term()
            self._link.close()
            raise ConfigError(f"--bind: {error}") from None
        return routers[0], routers[1]

    def _close(self) -> None:
        self._exchange.close()
        self._data.close()
        self._weights.close()
        self._context.term()
        self._link.close()

    def _on_signal(self, number: int, frame: object) -> None:
        if self._signal is not None:
            raise KeyboardInterrupt
        self._signal = number
