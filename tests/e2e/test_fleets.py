"""Commands as an engine runs them, again and again: a run that is begun and goes on."""

import pytest

from tests.e2e.harness import given, wait_until

pytestmark = pytest.mark.e2e

ANY_PORTS = ("bind.data=tcp://127.0.0.1:*", "bind.weights=tcp://127.0.0.1:*")
QUICK = ("env.id=CartPole-v1", "actor.sampler=serial", "train.num_actors=1")


def test_one_command_begins_a_run_goes_on_with_it_and_ends_where_it_is_over(site):
    config = site.folder / "run.toml"
    config.write_text("stop.updates = 30\nseed = 1\n")

    def start(door):
        flags = ["--run-dir", str(site.run_dir), "--config", str(config)]
        return site.open(door, "--resume", "auto", *flags, *given((*QUICK, *ANY_PORTS)))

    # It is killed as soon as there is a run, and when it has come far enough to save nothing yet.
    for name in ("config.json", "service.json"):
        door = start("learner")
        wait_until(f"there is a {name}", (site.run_dir / name).exists)
        door.kill()
    assert site.checkpoints() == []
    epochs = []
    for _ in range(2):
        door = start("train")
        assert door.wait_exit(60) == 0, door.log
        epochs.append((site.run_dir / "epoch").read_text())
    assert site.summary["exit_reason"] == "updates"
    assert epochs[0] == epochs[1]
    assert len(door.log.splitlines()) == 1
    assert door.log.startswith("the run is over: stop.updates is 30, and it came to ")
    config.write_text("stop.updates = 31\nseed = 1\n")
    door = start("learner")
    assert door.wait_exit(30) == 2
    assert "stop.updates (31 in the file, 30 in the run)" in door.log
