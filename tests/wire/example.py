"""The example session of docs/protocol.md: every message of it, as the code writes it."""

import numpy as np

from impala_async.schema import ArraySpec
from impala_async.weights import Version, Weights, WeightsLayout
from impala_async.wire import messages as wire
from tests.columns import Planes
from tests.learner.columns import small_schema

ACTOR, RUN, SESSION, NONCE = (bytes(range(first, first + 16)) for first in (0xA0, 0xB0, 0xC0, 0xD0))
SCHEMA = small_schema()
LAYOUT = WeightsLayout(
    (
        ArraySpec("policy_head.weight", (3, 2), "float32"),
        ArraySpec("policy_head.bias", (3,), "float32"),
    )
)
WEIGHTS = Weights(Version(1, 0), np.arange(9, dtype=np.float32).view(np.uint8))
EPISODES = [(1.5, 7)]
WIDTH = 16


def session():
    """The frames of each message, from the first word to the last."""
    places = (RUN, 1, SESSION, 0, 5556, "", "", "", NONCE)
    welcome = wire.Welcome(*places, lease_s=10.0, heartbeat_s=2.0, max_columns=16)
    spec = wire.Spec(SESSION, SCHEMA.digest, wire.NO_LAYOUT, 1, 1, gives_way=1)
    grant = wire.Grant(SESSION, 2, 0, 1, 0, [])
    reply = wire.WeightsReply(1, 0, LAYOUT.digest, WEIGHTS.digest())
    return {
        "actor, data: Hello": [
            wire.pack(wire.Hello(wire.PROTOCOL, ACTOR, "mine 1", bytes(16), 0, 0))
        ],
        "learner, data: Welcome (and a frame of settings)": [wire.pack(welcome)],
        "actor, data: Spec, and the schema": [wire.pack(spec), SCHEMA.to_json()],
        "learner, data: Grant, and the layout": [wire.pack(grant), LAYOUT.to_json()],
        "actor, weights: Heartbeat": [wire.pack(wire.Heartbeat(SESSION, {"env_time_ms": 0.5}))],
        "learner, weights: Grant": [wire.pack(grant)],
        "actor, weights: Get": [wire.pack(wire.Get(SESSION, 0, 0))],
        "learner, weights: WeightsReply, and the buffer": [wire.pack(reply), WEIGHTS.buffer.data],
        "actor, data: Data with an inline body": data_frames(),
        "learner, data: Grant": [wire.pack(wire.Grant(SESSION, 3, 1, 1, 4, []))],
        "learner, data: Bye": [wire.pack(wire.Bye(SESSION, 0))],
        "actor, data: ByeOk": [wire.pack(wire.ByeOk(SESSION))],
    }


def data_frames():
    """An episode ends in row 0; row 1 shows its last observation; row 2 begins the next one."""
    planes = Planes(SCHEMA, 1)
    columns = planes.columns
    columns.obs[""][0] = [[0.5, 1], [0.25, 2], [8, 3], [16, 4]]
    columns.log_probs_CT[0] = [-1, 0, -0.5]
    columns.rewards_CT[0] = [1.5, 0, 2]
    columns.actions[""][0] = [2, 0, 1]
    columns.terminated_CT[0] = [True, False, False]
    columns.mask_CT[0] = [True, False, True]
    data = wire.Data(SESSION, 0, 1, 0, 3, 1, 0, 0, None)
    return wire.encode_data(data, planes.obs, planes.small, EPISODES)


def example_text():
    """The session as a block of the page: texts in quotes, all other frames in hexadecimal."""
    lines = ["```"]
    for title, frames in session().items():
        lines.append(title)
        for frame in map(bytes, frames):
            if frame[:1] in (b"{", b"["):
                lines.append(f"  {frame.decode()}")
            else:
                parts = ((at, frame[at : at + WIDTH]) for at in range(0, len(frame), WIDTH))
                lines += [f"  {at:04x}  {part.hex(' ')}" for at, part in parts]
    return "\n".join([*lines, "```", "", *_body_table()])


def _body_table():
    """The places of the arrays in the body of `Data`."""
    layout, start = SCHEMA.layout, {"obs": 0, "small": SCHEMA.layout.obs_bytes}
    rows = [
        (start[leaf.plane] + leaf.stretch.start, name.rstrip("/"), f"{leaf.dtype} {[*leaf.shape]}")
        for name, leaf in layout.leaves.items()
    ]
    tail = layout.column_bytes
    rows += [(tail, "return of an episode", "float32"), (tail + 4, "its length", "int32")]
    return [
        "| offset in the body | what | dtype and shape |",
        "|---|---|---|",
        *(f"| {at} | {what} | {dtype} |" for at, what, dtype in rows),
        "",
    ]
