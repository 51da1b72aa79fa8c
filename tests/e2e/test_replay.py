"""Recording and replaying with real processes: the same run to the last bit, though nobody waited
for anybody when it was recorded; a benchmark."""

import pytest

from impala_async.replay.index import RecordingIndex
from tests.e2e.harness import CARTPOLE, site

pytestmark = pytest.mark.e2e

# Several passes and batches side by side, and widths that no batch is a multiple of.
HARD = (
    *("algorithm.name=appo", "algorithm.num_minibatches=2", "algorithm.normalize_returns=true"),
    *("learner.num_passes=3", "learner.minibatch_buffer_size=2", "learner.init_num_passes=2"),
    *("learner.publish_every_updates=4", "learner.batch_columns=10", "actor.num_envs=4"),
    *("stop.mean_return=none", "stop.env_steps=20000", "model.precision=bfloat16"),
)
# A torso of 4, 64 and 64 for the policy and one for the value; two actions, a value.
TORSO_NUMBERS = 2 * (4 * 64 + 64 + 64 * 64 + 64)
HEAD_NUMBERS = 64 * 2 + 2 + 64 + 1


@pytest.fixture
def recording(tmp_path):
    return tmp_path / "recording"


@pytest.fixture
def player(tmp_path):
    with site(tmp_path / "played") as opened:
        yield opened


def test_a_run_is_made_again_with_passes_rings_rounded_weights_and_actors_of_any_width(
    site, recording, player
):
    learner = site.learner(*HARD, config=CARTPOLE, record=str(recording))
    for width in (1, 3, 7):
        site.actor("--num-envs", str(width))
    assert learner.wait_exit(60) == 0, learner.log
    index = RecordingIndex(recording)
    widths = {index.message(number).data.columns for number in range(len(index))}
    assert widths == {1, 3, 7}
    last = site.reports()[-1]
    assert last["weights/served"] > 1
    # Torsos round to bfloat16 anyway, so they travel in it.
    whole_bytes = 2 * TORSO_NUMBERS + 4 * HEAD_NUMBERS
    assert last["weights/bytes"] == last["weights/served"] * whole_bytes
    door = player.open("replay", str(recording), "--run-dir", str(player.run_dir), "--exact")
    assert door.wait_exit(90) == 0, door.log
    assert "to the last bit" in door.log
    assert player.outcome() == site.outcome()
    names = ("model", "optimizer", "target")
    assert {f"{name}.safetensors" for name in names} <= site.outcome().keys()
