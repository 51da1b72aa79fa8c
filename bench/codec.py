"""The cost of packing and unpacking a trajectory, beside msgpack and pickle of the same arrays.

Every side begins with arrays of an actor and ends with the same columns in a batch of the learner,
whose memory is there already. In between lie the frames that would be sent; no socket is involved.
"""

import pickle
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from bench.door import run
from bench.ingest_ends import CASES, message_bytes
from bench.paired import Figure, Sample, figure, in_turns, new_parser, publish, ratio
from impala_async.schema import Schema
from impala_async.trajectory import columns_over
from impala_async.wire.messages import EPISODE, Data, body_sizes, encode_data, split_inline, unpack

Arrays = dict[str, NDArray[Any]]
Frames = Sequence[Any]

NUM_TIMES = {"stacked": 300, "frames": 1000, "cartpole": 3000}
EPISODES = [(21.0, 800), (-3.5, 411)]
HEADER = Data(bytes(range(16)), 70_000, 1, 35_000, 20, 1, 0, len(EPISODES), None)
NOTES = """
Microseconds are of the processor, so that neighbours matter less; all memory is warm in the cache.
"Pack" is from an actor's arrays to frames, "unpack" from frames to columns in a batch of the
learner, with the header's fields read and, on our side, checked; the values are checked by none of
them here, and by the learner besides. The others get one contiguous
array per leaf: "msgpack" is one map of bytes, "pickle" protocol 5 in one piece, "pickle, apart" the
same with its buffers as frames of their own, which copies nothing when it packs. Ratios are of pack
and unpack together.
"""


class Side(ABC):
    """One way from an actor's arrays to the frames, and from the frames to a batch."""

    def __init__(self, schema: Schema, columns: int) -> None:
        self.schema, self.columns = schema, columns
        self.header = HEADER._replace(rows=schema.rows, columns=columns)
        self.source, self.source_planes = filled_columns(schema, columns)
        self.target, self.target_planes = empty_columns(schema, columns)
        self.episodes: list[tuple[float, int]] = []

    @abstractmethod
    def pack(self) -> Frames:
        """The bytes that would be sent."""

    @abstractmethod
    def unpack(self, frames: Frames) -> None:
        """Into the batch, and the episodes."""


class Ours(Side):
    """Packs as `Client` does, and takes in as `Admission` does, but for its checks of values."""

    def pack(self) -> Frames:
        obs, small = self.source_planes
        return encode_data(self.header, obs, small, EPISODES)

    def unpack(self, frames: Frames) -> None:
        data = unpack(frames[0])
        assert isinstance(data, Data)
        layout = self.schema.layout
        sizes = body_sizes(layout, data.columns, data.num_episodes)
        obs, small = frames[1:] if data.body is None else split_inline(data.body, sizes)
        num_small = data.columns * layout.small_bytes
        for plane, part in zip(self.target_planes, (obs, small[:num_small]), strict=True):
            plane.reshape(-1)[:] = np.frombuffer(part, np.uint8)
        self.episodes = np.frombuffer(small[num_small:], EPISODE).tolist()


class Msgpack(Side):
    """A map of bytes, in one piece."""

    def pack(self) -> Frames:
        leaves = {name: array.data for name, array in self.source.items()}
        return [msgpack.packb({"header": self.header, "episodes": EPISODES, "leaves": leaves})]

    def unpack(self, frames: Frames) -> None:
        message = msgpack.unpackb(frames[0], use_list=False)
        for name, target in self.target.items():
            found = np.frombuffer(message["leaves"][name], target.dtype)
            target[...] = found.reshape(target.shape)
        self.episodes = list(message["episodes"])


class Pickle(Side):
    """Protocol 5, in one piece."""

    def pack(self) -> Frames:
        return [pickle.dumps((tuple(self.header), EPISODES, self.source), protocol=5)]

    def unpack(self, frames: Frames) -> None:
        self._take(pickle.loads(frames[0]))

    def _take(self, message: tuple[Any, list[tuple[float, int]], Arrays]) -> None:
        _, self.episodes, leaves = message
        for name, target in self.target.items():
            target[...] = leaves[name]


class PickleApart(Pickle):
    """Protocol 5, each array a frame of its own."""

    def pack(self) -> Frames:
        buffers: list[pickle.PickleBuffer] = []
        message = (tuple(self.header), EPISODES, self.source)
        head = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
        return [head, *(buffer.raw() for buffer in buffers)]

    def unpack(self, frames: Frames) -> None:
        self._take(pickle.loads(frames[0], buffers=frames[1:]))


SIDES: dict[str, type[Side]] = {
    "ours": Ours,
    "msgpack": Msgpack,
    "pickle": Pickle,
    "pickle, apart": PickleApart,
}


def filled_columns(schema: Schema, columns: int) -> tuple[Arrays, list[NDArray[np.uint8]]]:
    """The same noise twice: as contiguous arrays, and as the planes of a message."""
    target, planes = empty_columns(schema, columns)
    rng = np.random.default_rng(0)
    arrays: Arrays = {}
    for name, view in target.items():
        arrays[name] = rng.integers(0, 2, view.shape).astype(view.dtype)
        view[...] = arrays[name]
    return arrays, planes


def empty_columns(schema: Schema, columns: int) -> tuple[Arrays, list[NDArray[np.uint8]]]:
    """Typed views by name, and the planes that they look at."""
    layout = schema.layout
    planes = [
        np.zeros((columns, num_bytes), np.uint8)
        for num_bytes in (layout.obs_bytes, layout.small_bytes)
    ]
    return dict(layout.views(*planes)), planes


def check_equal(side: Side) -> None:
    """Check that the same arrived as was sent."""
    frames = side.pack()
    side.unpack([bytes(frame) for frame in frames])
    seen = columns_over(side.schema, *side.target_planes)
    assert seen.mask_CT.dtype == np.bool_
    for name, array in side.source.items():
        assert np.array_equal(side.target[name], array), name
    assert [tuple(episode) for episode in side.episodes] == EPISODES


def one_turn(side: Side, num_times: int) -> Sample:
    """Microseconds of a message; what is unpacked is what a socket would have given: bytes."""
    received = [bytes(frame) for frame in side.pack()]
    begun = time.thread_time()
    for _ in range(num_times):
        side.pack()
    packed = time.thread_time()
    for _ in range(num_times):
        side.unpack(received)
    pack_us, unpack_us = (
        (end - begin) / num_times * 1e6
        for begin, end in ((begun, packed), (packed, time.thread_time()))
    )
    return {"pack_us": pack_us, "unpack_us": unpack_us, "both_us": pack_us + unpack_us}


def measure(case: str, rounds: int) -> dict[str, list[Sample]]:
    sides = {name: make(*CASES[case]) for name, make in SIDES.items()}
    for side in sides.values():
        check_equal(side)
        one_turn(side, NUM_TIMES[case] // 10)
    turns = {
        name: lambda side=side: one_turn(side, NUM_TIMES[case]) for name, side in sides.items()
    }
    return in_turns(turns, rounds)


def figures_of(samples: dict[str, dict[str, list[Sample]]]) -> list[Figure]:
    names = {
        "cartpole": f"CartPole, {message_bytes('cartpole') / 1000:.1f} kB",
        "stacked": "stacked Atari, 593 kB",
        "frames": "each frame once, 177 kB",
    }
    figures = []
    for case, name in names.items():
        sides = samples[case]
        for part in ("pack", "unpack"):
            spent_us = [each[f"{part}_us"] for each in sides["ours"]]
            figures.append(figure(f"{name}: {part}", spent_us, unit="µs"))
        figures += [
            ratio(f"the same: {other} over ours", samples, sides["ours"], "both_us", at_least=1.0)
            for other, samples in sides.items()
            if other != "ours"
        ]
    return figures


def main() -> int:
    """Measure all cases; 1 if a limit was missed."""
    args = new_parser("Codec", __doc__, rounds=7, has_cases=False).parse_args()
    samples = {case: measure(case, args.rounds) for case in CASES}
    return publish("Codec", figures_of(samples), notes=NOTES, is_json=args.json, folder=args.write)


if __name__ == "__main__":
    run(main)
