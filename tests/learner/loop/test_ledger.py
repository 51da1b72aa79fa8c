"""The accounts hold at every moment, whatever happens in whatever order."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from impala_async.learner.loop.ledger import Ledger, Settlement
from impala_async.metrics.names import DROP_REASONS
from impala_async.wire.messages import VERDICTS

BATCH = 4


def check(ledger: Ledger) -> dict[str, Any]:
    report: dict[str, Any] = ledger.report()
    at = {name.removeprefix("trajectories/"): report[name] for name in report}
    assert at["received"] == at["admitted"] + at["rejected"]
    assert at["admitted"] == at["trained"] + at["dropped"] + at["in_slots"]
    assert at["rejected"] == sum(report[f"rejected/{reason}"] for reason in VERDICTS)
    assert at["dropped"] == sum(report[f"dropped/{reason}"] for reason in DROP_REASONS)
    assert report["passes/partial"] == sum(report[f"partial/{reason}"] for reason in DROP_REASONS)
    return report


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("arstx"), st.integers(0, 4), st.integers(0, 2))))
def test_the_identities_hold_after_every_step(steps):
    ledger, alive = Ledger(), list[int]()
    filling = num_batches = 0
    for action, columns, choice in steps:
        if action == "a" and filling + columns <= BATCH:
            ledger.admit(columns)
            filling += columns
            if filling == BATCH:
                num_batches += 1
                ledger.submit(num_batches, BATCH)
                alive.append(num_batches)
                filling = 0
        elif action == "r":
            ledger.reject(columns, VERDICTS[choice])
        elif action == "t" and alive:
            dropped = {DROP_REASONS[choice]: columns} if columns else {}
            trained = BATCH - columns
            done = 2 * trained + columns
            partial = {DROP_REASONS[choice]: columns} if columns else {}
            batch = alive.pop(choice % len(alive))
            ledger.settle(Settlement(batch, trained, dropped, done, 0, partial))
        elif action == "x":
            # Whoever resumes from here has lost what is in slots.
            resumed = Ledger()
            resumed.restore(ledger.save())
            assert check(resumed)["trajectories/in_slots"] == 0
        report = check(ledger)
        assert report["trajectories/in_slots"] == ledger.in_slots == filling + BATCH * len(alive)
        passes = 2 * report["trajectories/trained"] + report["passes/partial"]
        assert report["passes/done"] + report["passes/init_short"] == passes


def test_the_filling_slot_is_given_up_at_the_end():
    ledger = Ledger()
    ledger.admit(3)
    ledger.abandon_filling()
    ledger.abandon_filling()
    report = check(ledger)
    assert (report["dropped/shutdown"], report["trajectories/in_slots"]) == (3, 0)


def test_a_batch_that_does_not_add_up_is_a_bug():
    ledger = Ledger()
    ledger.admit(8)
    ledger.submit(1, 4)
    with pytest.raises(AssertionError, match="twice"):
        ledger.submit(1, 4)
    with pytest.raises(AssertionError, match="held 4 columns and 3 came out"):
        ledger.settle(Settlement(1, trained=3))
    with pytest.raises(KeyError):
        ledger.settle(Settlement(7, trained=4))


def test_a_saved_ledger_goes_on_with_the_same_numbers():
    ledger = Ledger()
    ledger.admit(10)
    ledger.submit(1, 4)
    ledger.submit(2, 4)
    ledger.settle(
        Settlement(1, trained=3, dropped={"stale": 1}, passes_done=4, passes_partial={"stale": 1})
    )
    ledger.reject(2, "duplicate")
    before = ledger.report()
    resumed = Ledger()
    resumed.restore(ledger.save())
    # Saving changes nothing for whoever goes on; what was in slots is lost to whoever resumes.
    assert ledger.report() == before
    lost = {"dropped/shutdown": 6, "trajectories/dropped": 7, "trajectories/in_slots": 0}
    assert check(resumed) == {**before, **lost}
