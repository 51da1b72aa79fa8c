"""The example of docs/protocol.md, read by the rules of that page and by nothing of the package."""

import hashlib
import json
import math
import re
import struct
import zlib
from pathlib import Path

import msgpack
import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "protocol.md"
FORMATS = {"bool": "B", "uint8": "B", "int32": "i", "float32": "f"}
ARRAY_ALIGNMENT, PLANE_ALIGNMENT = 8, 64
Said = list[bytes]


@pytest.fixture(scope="module")
def said():
    """The frames of each message of the example, by its title."""
    block = PAGE.read_text(encoding="utf-8").split("## An example in bytes")[1].split("```")[1]
    messages = {}
    for line in block.strip().splitlines():
        if not line.startswith("  "):
            messages[line] = frames = []
        elif hexadecimal := re.fullmatch(r"  ([0-9a-f]{4})  ([0-9a-f ]+)", line):
            if int(hexadecimal[1], 16) == 0:
                frames.append(b"")
            assert len(frames[-1]) == int(hexadecimal[1], 16)
            frames[-1] += bytes.fromhex(hexadecimal[2])
        else:
            frames.append(line.strip().encode())
    return messages


def header(said, title):
    fields = msgpack.unpackb(said[title][0])
    assert isinstance(fields, list)
    return fields


def digest(frame):
    return hashlib.sha256(frame).digest()[:16]


def padded(size, alignment):
    return math.ceil(size / alignment) * alignment


def plane(arrays, body):
    """The arrays of one plane, flat, and where it ends."""
    found, at = {}, 0
    for name, shape, dtype in arrays:
        form = f"<{math.prod(shape)}{FORMATS[dtype]}"
        found[name] = struct.unpack_from(form, body, at)
        end = at + struct.calcsize(form)
        at = padded(end, ARRAY_ALIGNMENT)
        assert not any(body[end:at]), "padding is zero"
    return found, padded(at, PLANE_ALIGNMENT)


def column(schema, body):
    """The one column of a body, and what follows it."""
    rows = schema["rows"]
    obs = [
        (leaf["name"], [rows + 1, *leaf["shape"]], leaf["dtype"])
        for leaf in schema["obs"]["leaves"]
    ]
    small = [(leaf["name"], leaf["shape"], "float32") for leaf in schema["state"]]
    small += [("log_prob", [rows], "float32"), ("reward", [rows], "float32")]
    for part in schema["action"]["parts"]:
        dtype = "int32" if part["kind"] == "discrete" else "float32"
        small.append((f"action {part['name']}", [rows, *part["shape"]], dtype))
    small += [(flag, [rows], "bool") for flag in ("terminated", "truncated", "mask")]
    seen, obs_bytes = plane(obs, body)
    rest, small_bytes = plane(small, body[obs_bytes:])
    return {"obs": seen, **rest}, body[obs_bytes + small_bytes :]


def test_the_session_is_one_session(said):
    kinds = [msgpack.unpackb(frames[0])[0] for frames in said.values()]
    assert kinds == [0, 1, 2, 3, 9, 3, 6, 7, 5, 3, 10, 11]
    session = header(said, "learner, data: Welcome (and a frame of settings)")[3]
    for title in ("actor, data: Spec, and the schema", "actor, weights: Get", "actor, data: ByeOk"):
        assert header(said, title)[1] == session


def test_the_schema_has_its_digest(said):
    title = "actor, data: Spec, and the schema"
    _, _, schema_digest, layout_digest, columns, streams, gives_way = header(said, title)
    assert schema_digest == digest(said[title][1])
    assert (layout_digest, columns, streams, gives_way) == (bytes(16), 1, 1, 1)


def test_weights_have_the_layout_that_was_told(said):
    layout = said["learner, data: Grant, and the layout"][1]
    title = "learner, weights: WeightsReply, and the buffer"
    _, epoch, update, layout_digest, content_digest = header(said, title)
    buffer = said[title][1]
    assert (epoch, update, layout_digest) == (1, 0, digest(layout))
    quarters = [buffer[at : at + 9] for at in range(0, 36, 9)]
    assert content_digest == b"".join(zlib.crc32(each).to_bytes(4, "big") for each in quarters)
    arrays, at = {}, 0
    for array in json.loads(layout):
        size = math.prod(array["shape"])
        arrays[array["name"]] = struct.unpack_from(f"<{size}f", buffer, at)
        at += 4 * size
    assert at == len(buffer)
    assert arrays == {"policy_head.weight": (0, 1, 2, 3, 4, 5), "policy_head.bias": (6, 7, 8)}


def test_the_trajectory_is_where_the_page_says(said):
    schema = json.loads(said["actor, data: Spec, and the schema"][1])
    fields = header(said, "actor, data: Data with an inline body")
    assert fields[2:9] == [0, 1, 0, schema["rows"], 1, 0, 1]
    rows, tail = column(schema, fields[9])
    assert rows == {
        "obs": {"": (0.5, 1, 0.25, 2, 8, 3, 16, 4)},
        "log_prob": (-1, 0, -0.5),
        "reward": (1.5, 0, 2),
        "action ": (2, 0, 1),
        "terminated": (1, 0, 0),
        "truncated": (0, 0, 0),
        "mask": (1, 0, 1),
    }
    assert struct.unpack("<fi", tail) == (1.5, 7)
