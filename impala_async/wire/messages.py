"""The messages of protocol version 1: their fields, and the limits of every field.

A header is a msgpack array `[kind, field, ...]`. Nothing in it is trusted: it is unpacked with
explicit limits, and each field is checked for type and range, as its annotation says, before a
message exists. Who sends what to whom:

    actor → learner   Hello  Spec  Data  Get  Heartbeat  Bye  ByeOk
    learner → actor   Welcome  Grant  Reject  WeightsReply  NotModified  Bye  ByeOk
"""

import math
import reprlib
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple, get_args, get_type_hints

import msgpack

from impala_async.errors import ProtocolError

PROTOCOL = 1
MAX_HEADER_BYTES = 4096
MAX_INLINE_BYTES = 8192
MAX_SETTINGS_BYTES = 65536
MAX_TEXT_BYTES = 2000
MAX_COLUMNS = 4096
MAX_TIMERS = 16
MAX_WHY = 500
NO_NUMBER = -1
NO_SEQ = -1
# An actor that has no model says this digest: it is told the layout of the weights.
NO_LAYOUT = bytes(16)
MAX_VERDICTS = 64
# This limits every frame from a peer of whom nothing is known.
MAX_MESSAGE_BYTES = 1 << 30
# Large frames are waited for as long as they take on such a line.
SLOWEST_BYTES_PER_S = 200_000

# Why a seq was refused for good. The order is the wire's: append only.
VERDICTS = ("duplicate", "invalid", "nonfinite", "unknown_session", "stale", "dead_branch")
# Why a session was refused, and whether the actor should come again.
REJECT_CODES = (
    *("hello_again", "full", "protocol", "mismatch", "not_allowed", "bad_message"),
    "wrong_port",
)
BYE_REASONS = ("finished", "restarting", "leaving")

Check = Callable[[Any], bool]


def _uint(largest: int, smallest: int = 0) -> Check:
    return lambda value: type(value) is int and smallest <= value <= largest


def _text(longest: int) -> Check:
    return lambda value: type(value) is str and len(value) <= longest


def _number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and abs(value) < 1e12


# How many timers and verdicts there are, and how long a body is, `unpack` limits for all.
def _timers(value: Any) -> bool:
    return type(value) is dict and all(
        _text(32)(key) and _number(seconds) for key, seconds in value.items()
    )


def _verdicts(value: Any) -> bool:
    is_seq, is_verdict = _uint(2**62), _uint(len(VERDICTS) - 1)
    return type(value) is list and all(
        type(pair) is list and len(pair) == 2 and is_seq(pair[0]) and is_verdict(pair[1])
        for pair in value
    )


Id = Annotated[bytes, lambda value: type(value) is bytes and len(value) == 16]
Count = Annotated[int, _uint(2**62)]
# This limit is lower: the seqs that a learner grants from there on must still be seqs.
FirstSeq = Annotated[int, _uint(2**61)]
MaybeSeq = Annotated[int, _uint(2**62, NO_SEQ)]
Epoch = Annotated[int, _uint(2**31)]
Byte = Annotated[int, _uint(255)]
Flag = Annotated[int, _uint(1)]
Short = Annotated[int, _uint(65535, 1)]
Columns = Annotated[int, _uint(MAX_COLUMNS, 1)]
Path = Annotated[str, _text(255)]
Span = Annotated[float, lambda value: _number(value) and value > 0]
Body = Annotated[bytes | None, lambda value: value is None or type(value) is bytes]


class Hello(NamedTuple):
    """An actor asks for a session; it says which run it knows and what it still holds, and the
    number by which it is known to who started it, if that gave it one."""

    protocol: Byte
    actor: Id
    build: Annotated[str, _text(64)]
    run_id: Id
    epoch: Epoch
    lowest_unsettled: FirstSeq
    number: Annotated[int, _uint(MAX_COLUMNS, NO_NUMBER)] = NO_NUMBER


class Welcome(NamedTuple):
    """A session, and where things are. The second frame holds the actor's settings."""

    run_id: Id
    epoch: Epoch
    session: Id
    rank: Annotated[int, _uint(2**31)]
    weights_port: Short
    ipc_data: Path
    ipc_weights: Path
    nonce_path: Path
    nonce: Id
    lease_s: Span
    heartbeat_s: Span
    max_columns: Columns


class Spec(NamedTuple):
    """Says what the actor's environments look like (second frame: the schema), how many columns
    each of its messages has, how many messages it writes side by side, and whether it understands
    `Grant.again`: then it gives way to others, and they to it."""

    session: Id
    schema_digest: Id
    layout_digest: Id
    columns: Columns
    streams: Columns
    gives_way: Flag = 0


class Grant(NamedTuple):
    """Seqs below `granted` may be sent; those below `settled` are done with. Cumulative. Seq
    `again` came when there was no room for it, and now there is."""

    session: Id
    granted: Count
    settled: Count
    epoch: Epoch
    update: Count
    verdicts: Annotated[list[list[int]], _verdicts]
    again: MaybeSeq = NO_SEQ


class Reject(NamedTuple):
    """No. `retry_after_s` below zero means never."""

    code: Byte
    text: Annotated[str, _text(MAX_TEXT_BYTES)]
    retry_after_s: Annotated[float, _number]


class Data(NamedTuple):
    """One message of trajectory columns; the body is inline, or two more frames."""

    session: Id
    seq: Count
    epoch: Epoch
    update: Count
    rows: Short
    columns: Columns
    codec: Flag
    num_episodes: Annotated[int, _uint(2**28)]
    body: Body


class Get(NamedTuple):
    """Weights newer than this version, please."""

    session: Id
    epoch: Epoch
    update: Count


class WeightsReply(NamedTuple):
    """The newest weights; the second frame is the flat buffer."""

    epoch: Epoch
    update: Count
    layout_digest: Id
    content_digest: Id


class NotModified(NamedTuple):
    """You have the newest weights."""

    epoch: Epoch
    update: Count


class Heartbeat(NamedTuple):
    """I live; and this is where my time goes."""

    session: Id
    timers: Annotated[dict[str, float], _timers]


class Bye(NamedTuple):
    """The sender ends the session; an actor that dies says what of."""

    session: Id
    reason: Annotated[int, _uint(len(BYE_REASONS) - 1)]
    text: Annotated[str, _text(MAX_WHY)] = ""


class ByeOk(NamedTuple):
    """The end of the session is understood."""

    session: Id


# A kind is the position here: append only.
Message = (
    Hello
    | Welcome
    | Spec
    | Grant
    | Reject
    | Data
    | Get
    | WeightsReply
    | NotModified
    | Heartbeat
    | Bye
    | ByeOk
)


# Each with the checks of its fields.
_FORMS = tuple(
    (form, [hint.__metadata__[0] for hint in get_type_hints(form, include_extras=True).values()])
    for form in get_args(Message)
)
_KINDS = {form: kind for kind, (form, _) in enumerate(_FORMS)}


def code_of(refusal: Reject) -> str:
    """By name; of a later release it may be one that is not known here."""
    return REJECT_CODES[refusal.code] if refusal.code < len(REJECT_CODES) else "unknown"


def plain(text: str) -> str:
    """Return what somebody else wrote as one line without control characters."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def pack(message: Message) -> bytes:
    """A message as its header frame."""
    fields: list[Any] = [_KINDS[type(message)], *message]
    # Fields that were appended later stay away while they say nothing: older peers know the rest.
    appended = list(message._field_defaults.values())
    while appended and fields[-1] == appended.pop():
        fields.pop()
    packed: bytes = msgpack.packb(fields)
    return packed


def unpack(frame: bytes | memoryview) -> Message:
    """The message of a header frame.

    Raises:
        ProtocolError: with reason `malformed_header` or `unknown_type`.
    """
    try:
        fields = msgpack.unpackb(
            frame,
            max_str_len=MAX_TEXT_BYTES,
            max_bin_len=MAX_INLINE_BYTES,
            max_array_len=MAX_VERDICTS,
            max_map_len=MAX_TIMERS,
            max_ext_len=0,
        )
    except (ValueError, RecursionError, TypeError):
        fields = None
    if type(fields) is not list or not fields:
        raise ProtocolError("malformed_header", "the header is not a msgpack array")
    kind = fields.pop(0)
    if not _uint(len(_FORMS) - 1)(kind):
        raise ProtocolError("unknown_type", f"no message has the kind {reprlib.repr(kind)}")
    form, checks = _FORMS[kind]
    # A later release may have appended more fields: what is not known is not looked at.
    del fields[len(checks) :]
    if len(fields) < len(checks) - len(form._field_defaults):
        text = f"{form.__name__} has {len(checks)} fields, not {len(fields)}"
        raise ProtocolError("malformed_header", text)
    for name, check, value in zip(form._fields, checks, fields, strict=False):
        if not check(value):
            # Not repr: what is nested deep enough would end the recursion, and us with it.
            text = f"{form.__name__}.{name} = {reprlib.repr(value)}"
            raise ProtocolError("malformed_header", text)
    message: Message = form(*fields)
    return message
