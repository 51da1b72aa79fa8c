"""A team over real processes: it plays, learns, is saved and resumed."""

import pytest
from safetensors import safe_open

pytestmark = pytest.mark.e2e

SELF_PLAY = "configs/self_play.toml"


def test_a_team_is_trained_saved_and_evaluated(site):
    site.trained("stop.env_steps=20000", config=SELF_PLAY)
    last = site.reports()[-1]
    # One of two sides learns, and a row in seven or so is a reset: the others are masked.
    assert 0.35 < last["batch/valid_rows_mean"] / (32 * 20) < 0.5
    # Episodes are those of the side that learns. There may be none in the last moment.
    lengths = [each["episodes/length_mean"] for each in site.reports()]
    assert 5 <= [each for each in lengths if each is not None][-1] <= 9
    (checkpoint,) = site.checkpoints()
    with safe_open(checkpoint / "model.safetensors", framework="np") as file:
        owners = {name.partition("/")[0] for name in file.keys()}  # noqa: SIM118
    assert owners == {"main", "past"}
    told = site.open("evaluate", str(site.run_dir), "--episodes", "8")
    assert told.wait_exit(60) == 0, told.log
    assert "main: mean return of 8 greedy episodes" in told.log
    assert "past: mean return of 8 greedy episodes" in told.log
