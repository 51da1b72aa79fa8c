"""The ring against its table of emissions, slow sources, and a plain count of passes."""

import queue

import pytest

from impala_async.errors import ConfigError
from impala_async.learner.minibatch_buffer import Draw, MinibatchBuffer

# size, passes, init, what comes out; `*` is the last pass.
TABLE = [
    (1, 1, 1, "A* B* C* D*"),
    (2, 2, 2, "A B A* B* C D C* D*"),
    (1, 3, 1, "A* B B* C C C* D D D*"),
    (2, 3, 3, "A B A B A* B* C D C D C* D*"),
    (2, 2, 1, "A* B C B* C* D E D* E*"),
    (3, 2, 2, "A B C A* B* C* D E F D* E* F*"),
    # The ramp goes on over the whole ring, also where one place is filled twice first.
    (2, 3, 1, "A* B C B* C D C* D E D*"),
]


class Script:
    """A source that hands out the letters of a script, and is empty at its dots."""

    def __init__(self, script):
        self.script = iter(script)
        self.timeouts = []

    def get(self, *, timeout):
        self.timeouts.append(timeout)
        letter = next(self.script)
        if letter == ".":
            raise queue.Empty
        return letter


def spell(draw):
    return f"{draw.item}{'*' if draw.is_last_pass else ''}"


def test_emission_also_from_a_source_that_is_empty_at_times():
    for size, passes, init, emission in TABLE:
        for script in ("ABCDEFGH", ".A..B.C...D.E..F."):
            source = Script(script)
            buffer = MinibatchBuffer(source, size, passes, init, timeout_s=0.25)
            wanted, got = emission.split(), []
            while len(got) < len(wanted):
                num_live = len(buffer)
                try:
                    got.append(spell(buffer.get()))
                except queue.Empty:
                    assert len(buffer) == num_live
            assert got == wanted
            assert set(source.timeouts) == {0.25}


def test_a_queue_is_a_source_and_a_live_place_asks_it_for_nothing():
    source = queue.Queue()
    for item in (0, "", None, False):
        # Items that are false are items.
        buffer = MinibatchBuffer(source, 1, 2, timeout_s=0.0)
        with pytest.raises(queue.Empty):
            buffer.get()
        source.put(item)
        assert [buffer.get(), buffer.get()] == [Draw(item, 0, 2), Draw(item, 1, 2)]
    unlimited = Script("A" + "." * 9)
    buffer = MinibatchBuffer(unlimited, 1, 3)
    for _ in range(3):
        buffer.get()
    # Without a timeout the source may block.
    assert unlimited.timeouts == [None]


def test_an_item_may_end_before_it_had_all_its_passes():
    buffer = MinibatchBuffer(Script("ABCDE"), 2, 3)
    items = [buffer.get().item, buffer.get().item]
    buffer.end(items[1])
    assert [spell(buffer.get()) for _ in range(5)] == ["A", "C", "A*", "C", "D"]


def test_drain_gives_the_items_in_the_order_of_their_turn_and_leaves_the_source_alone():
    buffer = MinibatchBuffer(Script("ABCDE"), 3, 3, 2)
    assert buffer.drain() == []
    assert [spell(buffer.get()) for _ in range(4)] == ["A", "B", "C", "A*"]
    assert buffer.drain() == ["B", "C"]
    assert (len(buffer), buffer.drain()) == (0, [])
    assert spell(buffer.get()) == "D"
    buffer = MinibatchBuffer(Script("ABC"), 3, 3)
    assert [spell(buffer.get()) for _ in range(4)] == ["A", "B", "C", "A"]
    assert buffer.drain() == ["B", "C", "A"]


def test_a_wrong_argument_is_named():
    right = {"size": 2, "num_passes": 3, "init_num_passes": 2, "timeout_s": 1.0}
    for wrong, names in (
        ({"size": 0}, ["size", "0"]),
        ({"num_passes": 0, "init_num_passes": None}, ["init_num_passes", "num_passes = 0"]),
        ({"init_num_passes": 0}, ["init_num_passes", "0"]),
        ({"init_num_passes": -1}, ["init_num_passes", "-1"]),
        ({"init_num_passes": 4}, ["init_num_passes", "4", "num_passes = 3"]),
    ):
        with pytest.raises(ConfigError) as error:
            MinibatchBuffer(Script("A"), **(right | wrong))
        message = str(error.value)
        assert message.startswith(names[0] + ":")
        assert all(name in message for name in names)
