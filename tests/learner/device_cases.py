"""What a device loader must do on any device; collected where a `device` fixture says on which."""

import queue

import pytest
import torch

from impala_async.learner.handoff import ClosedError
from tests.learner.device_bench import DeviceBench, holds


def test_batches_come_in_order_and_are_what_was_put_in(device: torch.device) -> None:
    bench = DeviceBench(device)
    for seed in range(10):
        planes = bench.put(seed)
        loaded = bench.loader.get(timeout=5.0)
        assert holds(loaded, planes)
        assert loaded.batch == seed + 1
        assert loaded.updates_B.tolist() == [seed] * 4
        assert loaded.valid_rows_B.tolist() == [3] * 4
        bench.loader.note_launch(loaded)
        bench.loader.release(loaded)
    assert bench.loader.load_timer.count == 10
    bench.close()


def test_a_host_slot_comes_back_when_it_is_copied(device: torch.device) -> None:
    bench = DeviceBench(device, num_slots=1, num_device_slots=3)
    sent = [bench.put(seed) for seed in range(3)]
    # One host slot carried all three; nothing on the device changed with it.
    batches = [bench.loader.get(timeout=5.0) for _ in range(3)]
    assert all(holds(loaded, planes) for loaded, planes in zip(batches, sent, strict=True))
    assert [loaded.updates_B.tolist() for loaded in batches] == [[0] * 4, [1] * 4, [2] * 4]
    bench.close()


def test_a_device_slot_is_not_filled_again_before_it_is_released(device: torch.device) -> None:
    bench = DeviceBench(device, num_slots=3, num_device_slots=2)
    sent = [bench.put(seed) for seed in range(4)]
    first, second = bench.loader.get(timeout=5.0), bench.loader.get(timeout=5.0)
    with pytest.raises(queue.Empty):
        bench.loader.get(timeout=0.05)
    assert holds(first, sent[0])
    assert holds(second, sent[1])
    # One waits on its way to the device, one in the queue.
    bench.until(lambda: bench.loader.num_waiting() == 2)
    bench.loader.note_launch(second)
    bench.loader.release(second)
    third = bench.loader.get(timeout=5.0)
    assert third.place == second.place
    assert holds(third, sent[2])
    assert holds(first, sent[0])
    bench.close()


@pytest.mark.parametrize("num_taken", [0, 1, 2])
def test_at_the_close_every_batch_is_somewhere(device: torch.device, num_taken: int) -> None:
    bench = DeviceBench(device, num_slots=3, num_device_slots=2)
    for seed in range(5):
        bench.put(seed)
    taken = [bench.loader.get(timeout=5.0).batch for _ in range(num_taken)]
    bench.close()
    assert isinstance(bench.ends[0], ClosedError)
    assert sorted(taken + bench.loader.leftovers()) == [1, 2, 3, 4, 5]
    with pytest.raises(ClosedError):
        bench.loader.get(timeout=None)


def test_a_drained_loader_hands_out_what_was_there_at_the_close(device: torch.device) -> None:
    bench = DeviceBench(device, is_drained=True)
    sent = [bench.put(seed) for seed in range(5)]
    bench.loader.close()
    for number, planes in enumerate(sent):
        loaded = bench.loader.get(timeout=5.0)
        assert loaded.batch == number + 1
        assert holds(loaded, planes)
        bench.loader.note_launch(loaded)
        bench.loader.release(loaded)
    with pytest.raises(ClosedError):
        bench.loader.get(timeout=None)
    bench.join()
    assert bench.loader.leftovers() == []


@pytest.mark.parametrize("is_closed_first", [True, False])
def test_a_drained_loader_ends_when_nobody_takes_batches_any_more(
    device: torch.device, is_closed_first: bool
) -> None:
    bench = DeviceBench(device, is_drained=True)
    for seed in range(5):
        bench.put(seed)
    taken = bench.loader.get(timeout=5.0).batch
    ends = [bench.loader.close, bench.loader.abandon]
    for end in ends if is_closed_first else reversed(ends):
        end()
    bench.join()
    assert isinstance(bench.ends[0], ClosedError)
    assert [taken, *sorted(bench.loader.leftovers())] == [1, 2, 3, 4, 5]


def test_a_place_that_nobody_filled_is_not_alive(device: torch.device) -> None:
    bench = DeviceBench(device, num_slots=1)
    bench.slots[0].filled_B[1:3] = False
    bench.put(0)
    loaded = bench.loader.get(timeout=5.0)
    # The host slot came back, and its next batch may be whole.
    bench.until(lambda: bool(bench.released))
    bench.slots[0].filled_B.fill(True)
    assert loaded.alive_B.tolist() == [True, False, False, True]
    bench.close()


def test_its_report_has_both_queues(device: torch.device) -> None:
    bench = DeviceBench(device)
    bench.put(0)
    bench.loader.get(timeout=5.0)
    report = bench.loader.report()
    assert report["queue/full_capacity"] == 3
    assert report["queue/ready_capacity"] == 2
    bench.close()
