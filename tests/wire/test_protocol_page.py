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
SPEC, DATA = "actor, data: Spec, and the schema", "actor, data: Data with an inline body"


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
    return list(msgpack.unpackb(said[title][0]))


def digest(frame):
    return hashlib.sha256(frame).digest()[:16]


def plane(arrays, body):
    """The arrays of one plane, flat, and what follows it."""
    found, at = {}, 0
    for name, shape, dtype in arrays:
        form = f"<{math.prod(shape)}{FORMATS[dtype]}"
        found[name] = struct.unpack_from(form, body, at)
        end = at + struct.calcsize(form)
        at = math.ceil(end / ARRAY_ALIGNMENT) * ARRAY_ALIGNMENT
        assert not any(body[end:at]), "padding is zero"
    return found, body[math.ceil(at / PLANE_ALIGNMENT) * PLANE_ALIGNMENT :]


def test_the_session_is_one_session(said):
    kinds = [header(said, title)[0] for title in said]
    assert kinds == [0, 1, 2, 3, 9, 3, 6, 7, 5, 3, 10, 11]
    session = header(said, "learner, data: Welcome (and a frame of settings)")[3]
    for title in (SPEC, "actor, weights: Get", "actor, data: ByeOk"):
        assert header(said, title)[1] == session
    # The schema has its digest; the actor has no model, one column and one stream, and gives way.
    assert header(said, SPEC)[2:] == [digest(said[SPEC][1]), bytes(16), 1, 1, 1]


def test_weights_have_the_layout_that_was_told(said):
    layout = said["learner, data: Grant, and the layout"][1]
    title = "learner, weights: WeightsReply, and the buffer"
    buffer, arrays, at = said[title][1], {}, 0
    crcs = [zlib.crc32(buffer[start : start + 9]) for start in range(0, 36, 9)]
    content_digest = b"".join(crc.to_bytes(4, "big") for crc in crcs)
    assert header(said, title)[1:] == [1, 0, digest(layout), content_digest]
    for array in json.loads(layout):
        size = math.prod(array["shape"])
        arrays[array["name"]] = struct.unpack_from(f"<{size}f", buffer, at)
        at += 4 * size
    assert at == len(buffer)
    assert arrays == {"policy_head.weight": (0, 1, 2, 3, 4, 5), "policy_head.bias": (6, 7, 8)}


def test_the_trajectory_is_where_the_page_says(said):
    schema = json.loads(said[SPEC][1])
    rows, leaves = schema["rows"], schema["obs"]["leaves"]
    fields = header(said, DATA)
    assert fields[2:9] == [0, 1, 0, rows, 1, 0, 1]
    obs = [(leaf["name"], [rows + 1, *leaf["shape"]], leaf["dtype"]) for leaf in leaves]
    small = [(leaf["name"], leaf["shape"], "float32") for leaf in schema["state"]]
    small += [("log_prob", [rows], "float32"), ("reward", [rows], "float32")]
    for part in schema["action"]["parts"]:
        dtype = "int32" if part["kind"] == "discrete" else "float32"
        small.append((f"action {part['name']}", [rows, *part["shape"]], dtype))
    small += [(flag, [rows], "bool") for flag in ("terminated", "truncated", "mask")]
    seen, rest = plane(obs, fields[9])
    found, tail = plane(small, rest)
    assert seen == {"": (0.5, 1, 0.25, 2, 8, 3, 16, 4)}
    assert found == {
        "log_prob": (-1, 0, -0.5),
        "reward": (1.5, 0, 2),
        "action ": (2, 0, 1),
        "terminated": (1, 0, 0),
        "truncated": (0, 0, 0),
        "mask": (1, 0, 1),
    }
    assert struct.unpack("<fi", tail) == (1.5, 7)
