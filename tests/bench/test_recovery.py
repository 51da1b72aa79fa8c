"""The benchmark of recovery, with real processes: a killed actor, and an end."""

import pytest

from bench import recovery


@pytest.mark.e2e
def test_an_actor_comes_back_and_all_end_by_one_signal():
    with recovery.fleet(0) as ours:
        first = ours._actors()
        (back_s,) = ours.turns("an actor is killed", 1, ours.lose_actor)
        assert len(ours._actors() & first) == recovery.NUM_ACTORS - 1
        (end_s,) = ours.turns("SIGTERM to one rank", 1, ours.end_by)
    assert 0 < end_s < 30
    assert 0 < back_s < 60
    assert all(process.poll() is not None for process in ours._running)
