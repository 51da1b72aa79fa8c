"""The benchmark of the learner compares what computes the same, and measures a real learner."""

import json

import pytest
import torch

from bench import learner_ends
from bench.bare_loop import BareLoop
from bench.learner import CARTPOLE, CONFIGS, ENDLESS, cases, figures_of, loop
from bench.learner_ends import rates, record, serve
from impala_async.config.algorithm import AlgorithmSection
from impala_async.config.load import load_config
from impala_async.config.model import ModelSection
from impala_async.policy import Policy
from impala_async.training.step import UpdateStep
from tests import matrix
from tests.training.conftest import PLAIN, flat_schema, random_batch

CPU = torch.device("cpu")
COLUMNS = 6
SCHEMA = flat_schema(4, 3, rows=9)
SECTION = AlgorithmSection(
    **PLAIN | {"reward_scale": 0.1, "reward_clip": "unit", "grad_clip": 0.5, "entropy_cost": 0.02}
)
SERVICE = {"rows_per_s": 96.0, "update_ms": 3.0, "wait_share": 0.0, "load_wait_share": 0.03}
SERVICE |= {"loop_cores": 0.2, "other_cores": 1.0}


def batch():
    """A batch with rewards beyond the clip, whose masked rows nobody may look at."""
    made = random_batch(SCHEMA, COLUMNS)
    for rows_BT in (made.rewards_BT.mul_(3), made.log_probs_BT):
        rows_BT[~made.mask_BT] = torch.nan
    return made


def test_the_bare_loop_makes_the_same_weights_as_the_update_step():
    ours, bare = (Policy(SCHEMA, ModelSection(normalize_obs=False), seed=3) for _ in range(2))
    before = [tensor.clone() for tensor in ours.tensors]
    step, hand_written = UpdateStep(ours, SECTION), BareLoop(bare, SECTION, batch())
    for _ in range(5):
        step.run(batch(), torch.ones(COLUMNS, dtype=torch.bool), 0)
        hand_written.update()
    for old, one, other in zip(before, ours.tensors, bare.tensors, strict=True):
        assert (one - old).abs().max() > 1e-4
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_rates_are_read_off_the_reports():
    names = (learner_ends.UPDATE_MS, *learner_ends.WAITS_MS)
    first, last = (dict(zip(names, ms, strict=True)) for ms in ((4.0, 1.0, None), (3.0, 0.5, 0.25)))
    found = rates([{"updates": 100, "time_s": 3.0, **first}, {"updates": 300, "time_s": 4, **last}])
    assert found["updates_per_s"] == 200
    assert found["update_ms"] == pytest.approx(3.5)
    assert found["wait_share"] == pytest.approx(0.2)
    assert found["load_wait_share"] == pytest.approx(0.125e-3 * 200)


def test_floors_are_of_the_service_over_the_bare_loop():
    def figures(case, has_gpu=False, **service):
        step = {"rows_per_s": 98.0, "update_ms": 2.5}
        samples = {"bare": [{"rows_per_s": 100.0}], "step": [step], "service": [SERVICE | service]}
        return {each.name: each for each in figures_of(case, samples, has_gpu=has_gpu)}

    first, *others = figures(CARTPOLE, rows_per_s=90.0).values()
    assert (first.median, first.at_least, first.is_held) == (0.9, 0.92, False)
    assert all(each.at_least is None for each in others)
    # A GPU has floors of its own, and figures of itself.
    case = cases(torch.device("cuda"))[0]
    found = figures(case, has_gpu=True, sm_share=0.9, pcie_in_gb_s=3.0)
    over = found[f"{case.name}: service over bare loop"]
    assert (over.at_least, over.is_held) == (0.95, True)
    assert not found["the same: waits for copies, share of the time"].is_held
    assert found["the same: over PCIe to it"].median == 3.0
    assert "the same: over PCIe from it" not in found


@pytest.fixture(scope="module")
def recording(tmp_path_factory, fork_children):
    path = tmp_path_factory.mktemp("learner") / "recording"
    with pytest.MonkeyPatch.context() as patch:
        fork_children(patch)
        record(path, CONFIGS / CARTPOLE.config, [*ENDLESS, "stop.env_steps=2000"])
    return path


@pytest.mark.e2e
@pytest.mark.parametrize("kind", matrix.LOOPS)
def test_a_loop_trains_on_what_was_recorded(kind, recording, forks):
    config = load_config(CONFIGS / CARTPOLE.config, ENDLESS)
    assert loop(kind, recording, config, 0.1)["updates_per_s"] > 1


@pytest.mark.e2e
def test_a_service_trains_on_what_was_recorded(recording, forks, monkeypatch, tmp_path):
    monkeypatch.setattr(learner_ends, "WARM_S", 0.1)
    # It does not begin to count before the second one has joined.
    monkeypatch.setattr(learner_ends, "num_players", lambda: 2)
    sample = serve(recording, tmp_path / "run", ENDLESS, 0.5, CPU)
    assert sample["updates_per_s"] > 1
    assert sample["update_ms"] > 0
    assert 0 <= sample["wait_share"] < 1
    assert sample["other_cores"] > 0
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["num_actors"] == 0, "the player has gone before its learner ended"
