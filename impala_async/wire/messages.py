"""The messages of protocol version 1, to frames and back, and the limits of every field.

A header is a msgpack array `[kind, field, ...]`. Nothing in it is trusted: it is unpacked with
explicit limits, and each field is checked as its annotation says before a message exists. The sizes
of bodies come from the agreed schema. docs/protocol.md says who sends what to whom.
"""

import math
import reprlib
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple, get_args, get_type_hints

import msgpack
import numpy as np
import zstandard
from numpy.typing import NDArray

from impala_async.errors import ConfigError, ProtocolError
from impala_async.schema import Bytes2D, ColumnLayout

PROTOCOL = 1
MAX_HEADER_BYTES = 4096
# A body below this goes inside the header: one frame costs half of what three do.
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
PLAIN, ZSTD = 0, 1
EPISODE_BYTES = 8
EPISODE = np.dtype([("total", "<f4"), ("length", "<i4")])

# Why a seq was refused for good. The order is the wire's: append only.
VERDICTS = ("duplicate", "invalid", "nonfinite", "unknown_session", "stale", "dead_branch")
# Why a session was refused, and whether the actor should come again.
REJECT_CODES = (
    *("hello_again", "full", "protocol", "mismatch", "not_allowed", "bad_message"),
    *("wrong_port", "elsewhere"),
)
BYE_REASONS = ("finished", "restarting", "leaving", "moving")

Frame = bytes | memoryview
Check = Callable[[Any], bool]

# One zstd frame, at the level that costs least, that says how long its content is.
compress = zstandard.ZstdCompressor(level=1).compress
_decompressor = zstandard.ZstdDecompressor()
# Compression must make data this much smaller, or its time is better spent on acting.
WORTH = 0.8


def _uint(largest: int, smallest: int = 0) -> Check:
    return lambda value: type(value) is int and smallest <= value <= largest


def _text(longest: int) -> Check:
    return lambda value: type(value) is str and len(value) <= longest


def _number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and abs(value) < 1e12


# How many timers and verdicts there are, and how long a body is, `unpack` limits for all.
def _timers(value: Any) -> bool:
    is_name = _text(32)
    return type(value) is dict and all(is_name(key) and _number(value[key]) for key in value)


def _verdicts(value: Any) -> bool:
    is_seq, is_verdict = _uint(2**62), _uint(len(VERDICTS) - 1)
    return type(value) is list and all(
        type(pair) is list and len(pair) == 2 and is_seq(pair[0]) and is_verdict(pair[1])
        for pair in value
    )


Id = Annotated[bytes, lambda value: type(value) is bytes and len(value) == 16]
Count = Annotated[int, _uint(2**62)]
Epoch = Annotated[int, _uint(2**31)]
Byte = Annotated[int, _uint(255)]
Flag = Annotated[int, _uint(1)]
Short = Annotated[int, _uint(65535, 1)]
Columns = Annotated[int, _uint(MAX_COLUMNS, 1)]
Path = Annotated[str, _text(255)]
Span = Annotated[float, lambda value: _number(value) and value > 0]


class Hello(NamedTuple):
    """An actor asks for a session: the run that it knows, what it holds, its starter's number."""

    protocol: Byte
    actor: Id
    build: Annotated[str, _text(64)]
    run_id: Id
    epoch: Epoch
    # This limit is lower: the seqs that a learner grants from there on must still be seqs.
    lowest_unsettled: Annotated[int, _uint(2**60)]
    number: Annotated[int, _uint(MAX_COLUMNS, NO_NUMBER)] = NO_NUMBER


class Welcome(NamedTuple):
    """The learner opens a session, and says where all is. Settings are in the second frame."""

    run_id: Id
    epoch: Epoch
    session: Id
    number: Annotated[int, _uint(2**31)]
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
    """Seqs below `granted` may be sent; those below `settled` are done with. A later one
    replaces it. Seq `again` came when there was no room for it, and now there is. Seq `cut` is
    waited for: it is to be sent with the rows that it has."""

    session: Id
    granted: Count
    settled: Annotated[int, _uint(2**61)]
    epoch: Epoch
    update: Count
    verdicts: Annotated[list[list[int]], _verdicts]
    again: Annotated[int, _uint(2**62, NO_SEQ)] = NO_SEQ
    cut: Annotated[int, _uint(2**62, NO_SEQ)] = NO_SEQ

    @property
    def refused(self) -> list[str]:
        """The verdict on each message that it tells of."""
        return [VERDICTS[verdict] for _, verdict in self.verdicts]


class Reject(NamedTuple):
    """The learner refuses. The actor may try again after `retry_after_s`; below zero, never."""

    code: Byte
    text: Annotated[str, _text(MAX_TEXT_BYTES)]
    retry_after_s: Annotated[float, _number]


class Data(NamedTuple):
    """One message of trajectory columns; the body is inline, or two more frames. The last
    `num_cut` rows of each column are masked, as it was cut."""

    session: Id
    seq: Count
    epoch: Epoch
    update: Count
    rows: Short
    columns: Columns
    codec: Flag
    num_episodes: Annotated[int, _uint(2**28)]
    body: Annotated[bytes | None, lambda value: value is None or type(value) is bytes]
    num_cut: Annotated[int, _uint(65535)] = 0


class Get(NamedTuple):
    """The actor asks for weights newer than this version."""

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
    """The actor has the newest weights."""

    epoch: Epoch
    update: Count


class Heartbeat(NamedTuple):
    """The actor says that it lives, and where its time goes."""

    session: Id
    timers: Annotated[dict[str, float], _timers]


class Bye(NamedTuple):
    """The sender ends the session; an actor that dies says what of."""

    session: Id
    reason: Annotated[int, _uint(len(BYE_REASONS) - 1)]
    text: Annotated[str, _text(MAX_WHY)] = ""


class ByeOk(NamedTuple):
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
    """The name of the code; a later release may have one that is not known here."""
    return REJECT_CODES[refusal.code] if refusal.code < len(REJECT_CODES) else "unknown"


def is_lost_on_them(message: object) -> bool:
    """Whether the other side could do nothing with what it was told: no answer, as the connection
    may lead to another port than it should."""
    return isinstance(message, Reject) and code_of(message) == "bad_message"


def pack(message: Message) -> bytes:
    fields: list[Any] = [_KINDS[type(message)], *message]
    # Fields that were appended later stay away while they say nothing: older peers know the rest.
    appended = list(message._field_defaults.values())
    while appended and fields[-1] == appended.pop():
        fields.pop()
    return bytes(msgpack.packb(fields))


def unpack(frame: Frame) -> Message:
    """The message of a header frame; ProtocolError (`malformed_header`, `unknown_type`) if none."""
    limits = {"max_str_len": MAX_TEXT_BYTES, "max_bin_len": MAX_INLINE_BYTES, "max_ext_len": 0}
    try:
        fields = msgpack.unpackb(
            frame, max_array_len=MAX_VERDICTS, max_map_len=MAX_TIMERS, **limits
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


class BodySizes(NamedTuple):
    """How long the parts of a body must be: the planes of observations, all else."""

    obs: int
    small: int


def body_sizes(layout: ColumnLayout, columns: int, num_episodes: int) -> BodySizes:
    tail_bytes = num_episodes * EPISODE_BYTES
    return BodySizes(columns * layout.obs_bytes, columns * layout.small_bytes + tail_bytes)


def encode_data(
    data: Data,
    obs: Bytes2D,
    small: Bytes2D,
    episodes: Sequence[tuple[float, int]] | NDArray[np.void],
    *,
    is_compressed: bool = False,
) -> list[Frame]:
    """The frames of one trajectory message; big ones are views of the planes, not copies.

    Compressed are the observations of a message that is not inline, where that makes them smaller.
    """
    data = data._replace(num_episodes=len(episodes))
    tail = np.array(episodes, EPISODE).tobytes() if len(episodes) else b""
    obs_frame, small_frame = obs.data.cast("B"), b"".join((small.data.cast("B"), tail))
    if len(obs_frame) + len(small_frame) < MAX_INLINE_BYTES:
        return [pack(data._replace(body=b"".join((obs_frame, small_frame))))]
    if is_compressed and len(compressed := compress(obs_frame)) <= WORTH * len(obs_frame):
        return [pack(data._replace(body=None, codec=ZSTD)), compressed, small_frame]
    return [pack(data._replace(body=None)), obs_frame, small_frame]


def split_inline(body: Frame, sizes: BodySizes) -> tuple[memoryview, memoryview]:
    if len(body) != sum(sizes):
        raise ProtocolError("wrong_size", f"the body has {len(body)} bytes, not {sum(sizes)}")
    view = memoryview(body)
    return view[: sizes.obs], view[sizes.obs :]


def decompress_into(target: memoryview, frame: memoryview) -> None:
    """Unpack a frame that must fill the target exactly; ProtocolError if it does not."""
    try:
        size = zstandard.get_frame_parameters(frame).content_size
        if size != len(target):
            raise ProtocolError("wrong_size", f"it unpacks to {size} bytes, not {len(target)}")
        target[:] = _decompressor.decompress(frame, max_output_size=size, allow_extra_data=False)
    except (zstandard.ZstdError, ValueError) as error:
        raise ProtocolError("wrong_size", f"it cannot be unpacked: {error}") from None


def encode_settings(settings: dict[str, object]) -> bytes:
    """The second frame of `Welcome`. Raises ConfigError for what cannot travel."""
    try:
        frame: bytes = msgpack.packb(settings)
    except (ValueError, TypeError, OverflowError) as error:
        raise ConfigError(f"env.kwargs: the actor's settings cannot be sent: {error}") from None
    if len(frame) > MAX_SETTINGS_BYTES:
        raise ConfigError(f"env.kwargs: the actor's settings take {len(frame)} bytes: shorten them")
    return frame
