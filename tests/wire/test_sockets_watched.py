"""A dealer that is watched knows of the connection that it speaks over."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import zmq

from impala_async.wire.sockets import Dealer, NoSocketError, Router
from tests.proxy import HOST, LEARNER_HOST, Proxy, proxy
from tests.wire.ends import DEADLINE_S, Ends, take, until


@pytest.fixture
def router(ends: Ends) -> Router:
    return ends.router()


@pytest.fixture
def watched(ends: Ends, router: Router) -> Iterator[tuple[Dealer, Proxy]]:
    """A dealer that knows its connection, and the network between it and the router."""
    with proxy(router.url) as network:
        dealer = Dealer(ends.context, router.url.replace(LEARNER_HOST, HOST))
        yield dealer, network
        dealer.close()


def test_a_connection_that_broke_is_greeted_over_again(
    watched: tuple[Dealer, Proxy], router: Router
) -> None:
    dealer, network = watched
    assert not dealer.is_greeted
    for _ in range(3):
        until(lambda: dealer.greet([b"hello"]))
        assert dealer.is_greeted
        assert take(router)[1] == b"hello"
        network.reset()
        until(lambda: not dealer.is_greeted)


def test_a_wait_ends_with_the_connection(watched: tuple[Dealer, Proxy]) -> None:
    dealer, network = watched
    until(lambda: dealer.greet([b"hello"]))
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(dealer.receive, 10 * DEADLINE_S)
        network.reset()
        assert waiting.result(DEADLINE_S) is None


@pytest.mark.parametrize("num_sockets", [1, 2])
def test_a_dealer_that_cannot_be_watched_leaves_nothing_open(num_sockets: int) -> None:
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, num_sockets)
    for _ in range(3):
        with pytest.raises(NoSocketError):
            Dealer(context, "tcp://127.0.0.1:1")
    context.term()
