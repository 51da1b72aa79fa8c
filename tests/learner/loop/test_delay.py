"""Credit comes late where batches would only wait, and at once where the learner would."""

import heapq
import random

import pytest

from impala_async.learner.loop.delay import SlotDelay

NUM_SLOTS = 4


def simulate(*, actors_s, learner_s, num_batches, jitter=0.0, ring_size=1):
    """Batches that are filled one after the other, each in `actors_s`, and are with the learner for
    `learner_s`. The waits of each batch for the learner, of the learner for each, and delays."""
    rng = random.Random(1)
    delay = SlotDelay(NUM_SLOTS, ring_size)
    empty_at, full_at, filled_at, now = [0.0] * NUM_SLOTS, [], 0.0, 0.0
    waits, idles, delays = [], [], []

    def fill(until):
        nonlocal filled_at
        while empty_at and max(filled_at, empty_at[0]) <= until:
            begun_at = max(filled_at, heapq.heappop(empty_at))
            filled_at = begun_at + actors_s * (1 + jitter * rng.uniform(-1, 1))
            full_at.append(filled_at)

    in_ring, noted = 0, 0
    for number in range(num_batches):
        fill(now)
        if not full_at[number:]:
            fill(float("inf"))
        waits.append(max(0.0, now - full_at[number]))
        idles.append(max(0.0, full_at[number] - now))
        now = max(now, full_at[number]) + learner_s * (1 + jitter * rng.uniform(-1, 1))
        fill(now)
        while noted < len(full_at) and full_at[noted] <= now:
            delay.note_full(full_at[noted])
            noted += 1
        in_ring += 1
        if in_ring == ring_size:
            delay.note_done(now)
            in_ring -= 1
            heapq.heappush(empty_at, now + delay.seconds)
        delays.append(delay.seconds)
    return waits, idles, delays


@pytest.mark.parametrize("actors_s", [0.01, 0.5, 0.8])
def test_batches_wait_no_longer_than_they_must_and_the_learner_not_at_all(actors_s):
    waits, idles, _ = simulate(actors_s=actors_s, learner_s=1.0, num_batches=400)
    # With four slots a batch would wait for two others, and longer where it is filled at once.
    assert waits[8] > 1.5
    assert sum(waits[200:]) / 200 < 0.8
    assert sum(idles[200:]) < 0.01 * 200


def test_what_varies_is_left_room():
    waits, idles, _ = simulate(actors_s=0.5, learner_s=1.0, num_batches=1000, jitter=0.5)
    assert sum(waits[200:]) / 800 < 1.5
    assert sum(idles[200:]) < 0.02 * 800


def test_a_learner_that_waits_has_credit_given_at_once():
    _, idles, delays = simulate(actors_s=2.0, learner_s=1.0, num_batches=100)
    assert delays == [0.0] * 100
    assert idles[50] == pytest.approx(1.0)


def test_a_learner_that_becomes_faster_waits_for_the_delay_only_once():
    delay = SlotDelay(NUM_SLOTS, 1)
    now = 0.0
    for _ in range(3):
        delay.note_full(now)
    for _ in range(3 * 2 * NUM_SLOTS):
        now += 1.0
        delay.note_full(now)
        delay.note_done(now)
    assert delay.seconds > 0.5
    while delay.seconds:
        for _ in range(len(delay._full_at)):
            delay.note_done(now)
        delay.note_full(now)
    assert delay.seconds == 0.0
