"""Session tables and peers for the tests of the protocol, with as few words as possible."""

import itertools

from impala_async.weights import Lineage, Version
from impala_async.wire.messages import PROTOCOL, Data, Hello
from impala_async.wire.peer import PROVEN
from impala_async.wire.session import SessionTable

RUN = b"R" * 16
NOW = Version(3, 1000)
LEASE_S = 10.0
MAX_LAG = 20


def actor_id(number):
    return number.to_bytes(16, "big")


def new_table(lineage=None, run_id=RUN, num_actors=None):
    sessions = itertools.count(1)
    return SessionTable(
        run_id=run_id,
        lineage=lineage or Lineage(1).resumed(3, 900),
        lease_s=LEASE_S,
        max_lag=MAX_LAG,
        new_id=lambda: b"session" + next(sessions).to_bytes(9, "big"),
        num_actors=num_actors,
    )


def hello_of(actor, **changes):
    return Hello(PROTOCOL, actor_id(actor), "0.1.0", RUN, 0, 0)._replace(**changes)


def greet(table, actor, now=0.0, **changes):
    """A session without a schema yet."""
    return table.hello(hello_of(actor, **changes), b"route-%d" % actor, now)


def join(table, actor, columns=1, streams=1, now=0.0):
    """A session that may have credit, and uses it at once."""
    peer = newcomer(table, actor, columns, streams, now)
    peer.usual_s, peer.is_brisk, peer.num_used = 0.0, True, PROVEN
    return peer


def newcomer(table, actor, columns=1, streams=1, now=0.0):
    """A session that may have credit."""
    peer = greet(table, actor, now)
    assert table.join(peer, columns, streams, gives_way=True)
    return peer


def data_of(peer, seq, version=NOW, columns=None):
    columns = peer.columns if columns is None else columns
    return Data(peer.session, seq, *version, 50, columns, 0, 0, None)


def send(table, peer, seq, version=NOW):
    """A trajectory arrives whole; its verdict."""
    verdict = table.reserve(peer, data_of(peer, seq, version), NOW)
    if verdict != "duplicate":
        table.settle(peer, seq, verdict)
    return verdict
