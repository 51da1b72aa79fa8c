"""The benchmark of weights follows real versions from the learner thread to real clients."""

import pytest

from bench.weights import figures_of, one_turn, sample_of
from bench.weights_ends import CASES, Publishing, config_of
from impala_async.learner.slots import allocate_slots
from impala_async.training.by_hand import is_plain

OUTCOME = {
    "published_at": {str(update): 10.0 + update for update in range(11)},
    "update_s": [9.0] * 2 + [0.3] * 8,
    "publish_s": [9.0] * 2 + [0.1] * 8,
}


def test_delays_run_from_a_version_s_own_publication():
    # The first versions warm up; between 5 and 9 the client skipped some.
    installed = {"0": 10.1, "1": 99.0, "3": 13.2, "5": 15.4, "9": 19.3}
    sample = sample_of(OUTCOME, [installed])
    assert sample["installed_ms"] == pytest.approx(300)
    assert sample["skipped_share"] == pytest.approx(1 - 3 / 8)
    assert sample["publish_share"] == pytest.approx(0.25)
    assert sample["update_ms"] == pytest.approx(300)
    # Without clients nothing is installed.
    assert "installed_ms" not in sample_of(OUTCOME, [])


def test_every_number_of_clients_has_its_rows():
    turn = {"update_ms": 2.0, "publish_share": 0.1, "installed_ms": 5.0, "skipped_share": 0.5}
    slow = {**turn, "update_ms": 3.0, "installed_ms": 9.0}
    figures = figures_of("x", [[turn], [turn], [slow], [{"first_us": 50.0, "later_us": 1.0}]])
    assert [each.median for each in figures] == [5.0, 9.0, 0.5, 0.1, 0.1, 0.1, 1.0, 1.5, 50.0, 1.0]


@pytest.mark.parametrize("case", CASES)
def test_an_update_between_two_versions_is_one_as_a_learner_makes_it(case):
    schema, _, columns, is_coarse = CASES[case]
    (slot,) = allocate_slots(schema, columns, 1)
    publishing = Publishing(config_of(case, 1), schema, slot, is_coarse)
    assert publishing._step.run(publishing._batch, publishing._alive_B, 0).num_updates == 1
    assert is_plain(publishing._step.policy, publishing._step.section) == (case == "mlp")


@pytest.mark.e2e
def test_versions_reach_two_clients(forks):
    sample = one_turn("mlp", 2, 0.7)
    assert sample["installed_ms"] > 0
    assert 0 < sample["publish_share"] < 1
    assert 0 <= sample["skipped_share"] < 1
