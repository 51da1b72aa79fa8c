"""Runs that begin or go on, and what a door may have said of them."""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest

from impala_async import errors
from impala_async.config.load import load_config
from impala_async.config.packaged import packaged_configs
from impala_async.errors import CheckpointError, ConfigError, RunOver
from impala_async.runs.folder import RunFolder
from impala_async.runs.start import RunFlags, check_run, settle

CARTPOLE = packaged_configs()["cartpole"]


@pytest.fixture
def run_dir(tmp_path):
    """The folder of a run with a changed seed."""
    folder = RunFolder(tmp_path / "run")
    folder.begin(load_config(CARTPOLE, ["seed=7"]))
    folder.let_go()
    return folder.path


def resume(run_dir, *settings):
    """The settings of a run that goes on with these."""
    return check_run(RunFlags(overrides=settings, run_dir=run_dir, is_resumed=True))[0]


def test_a_run_is_not_overwritten_and_a_resumed_one_keeps_its_settings_but_for_some(run_dir):
    with pytest.raises(ConfigError, match=r"already holds a run: continue it with --resume"):
        check_run(RunFlags(CARTPOLE, run_dir=run_dir))
    assert resume(run_dir) == load_config(CARTPOLE, ["seed=7"])
    changed = load_config(CARTPOLE, ["seed=7", "stop.env_steps=9"])
    assert resume(run_dir, "stop.env_steps=9") == changed
    (run_dir / "checkpoints").rmdir()
    with pytest.raises(CheckpointError, match="the checkpoints of this run are gone"):
        resume(run_dir)


def test_a_run_is_resumed_whatever_numbers_its_environment_is_made_with(tmp_path):
    settings = ["env.kwargs={range=[nan, inf], floor=-inf}"]
    RunFolder(tmp_path / "run").begin(load_config(CARTPOLE, settings))
    resume(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"env\.kwargs: cannot change in a resumed run"):
        resume(tmp_path / "run", "env.kwargs={floor=0.0}")


def test_what_a_run_had_decided_stays_unless_it_goes_not_with_what_is_set_now(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.begin(load_config(None, ["env.id=X", "pace.mode=lockstep", "actor.num_envs=4"]))
    folder.let_go()
    kept = resume(folder.path)
    assert (kept.train.num_actors, kept.learner.batch_columns) == (2, 8)
    more = resume(folder.path, "train.num_actors=3")
    assert more.learner.batch_columns == 12
    with pytest.raises(ConfigError, match=r"batch_columns \(8\) must be train.num_actors"):
        resume(folder.path, "train.num_actors=3", "learner.batch_columns=8")
    # A number that somebody has set is none that was decided, though it is the same.
    parts = more.algorithm.num_minibatches
    with_parts = resume(folder.path, f"algorithm.num_minibatches={parts}")
    assert "algorithm.num_minibatches" not in with_parts.decided
    assert {*more.decided} - {*with_parts.decided} == {"algorithm.num_minibatches"}
    # So is one that somebody has written into the file.
    content = json.loads((folder.path / "config.json").read_text())
    content["config"]["algorithm"]["num_minibatches"] = 3
    (folder.path / "config.json").write_text(json.dumps(content))
    assert "algorithm.num_minibatches" not in resume(folder.path).decided
    assert resume(folder.path).algorithm.num_minibatches == 3
    # It is decided once more where it has to be.
    folder.begin(more)
    folder.confirm(more)
    folder.let_go()
    assert resume(folder.path, "train.num_actors=1").learner.batch_columns == 4


def test_all_that_is_wrong_with_a_resumed_run_is_told(run_dir):
    def told(*settings):
        with pytest.raises(ConfigError) as caught:
            resume(run_dir, *settings)
        return [line.split(" ")[1] for line in str(caught.value).splitlines()]

    both = ["algorithm.name:", "trajectory.rows:"]
    assert told("algorithm.name=appo", "trajectory.rows=3") == both
    assert told("nonsense", "seed=-1", "more") == ["'nonsense'", "'more'", "seed:"]
    with pytest.raises(ConfigError, match="drop --config"):
        check_run(RunFlags(Path("x.toml"), run_dir=run_dir, is_resumed=True))
    with pytest.raises(ConfigError, match=r"did you mean learner\.num_passes"):
        resume(run_dir, "learner.num_pases=2")


DONE = {"env_steps_trained": 512, "updates": 60, "mean_return_100": 475.25}


def test_a_return_of_other_actions_ends_no_run(run_dir):
    goal = ("evaluate.every_s=9", "stop.eval_return=400")
    for summary, actions, is_over in (
        ({"best_eval_return": 500.0, "best_eval_actions": "greedy"}, "greedy", True),
        ({"best_eval_return": 500.0, "best_eval_actions": "greedy"}, "both", True),
        ({"best_eval_return": 500.0, "best_eval_actions": "greedy"}, "sampled", False),
        ({"best_eval_return": 500.0}, "sampled", True),
    ):
        RunFolder(run_dir).write_json("summary.json", summary)
        with pytest.raises(RunOver) if is_over else nullcontext():
            resume(run_dir, *goal, f"evaluate.actions={actions}")


@pytest.mark.parametrize(
    ("reached", "says", "more"),
    [
        ("stop.env_steps=500", "500, and it came to 512", "stop.env_steps=1_024"),
        ("stop.updates=50", "50, and it came to 60", "stop.updates=120"),
        ("stop.mean_return=475", "475, and it came to 475.25", "stop.mean_return=none"),
    ],
)
def test_a_run_that_is_over_is_resumed_only_for_more(run_dir, reached, says, more):
    resume(run_dir, reached)
    RunFolder(run_dir).write_json("summary.json", DONE)
    with pytest.raises(RunOver) as over:
        resume(run_dir, "stop.mean_return=none", reached)
    key = reached.partition("=")[0]
    told = f"the run is over: {key} is {says}; to go on, add --set {key}=none or a larger number, "
    assert str(over.value).startswith(told)
    resume(run_dir, "stop.mean_return=none", more)


def test_a_run_whose_last_checkpoint_or_first_mean_is_missing_is_not_over(run_dir):
    for summary in (DONE | {"exit_reason": "checkpoint_not_written"}, {"mean_return_100": None}):
        RunFolder(run_dir).write_json("summary.json", summary)
        resume(run_dir, "stop.env_steps=500")


# -------------------- one command that is run again and again


MINE = """
seed = 3
env.id = "CartPole-v1"
algorithm.lambda = 0.9
algorithm.optimizer_options.eps = 1e-4
stop.updates = 50
"""


@pytest.fixture
def again(tmp_path):
    """Runs one command once more: is a run to go on, and with which settings and folder."""
    (tmp_path / "mine.toml").write_text(MINE)

    def settled(*settings):
        given = RunFlags(tmp_path / "mine.toml", settings, tmp_path / "run", is_auto=True)
        flags = settle(given)
        return flags.is_resumed, *check_run(flags)

    return settled


def test_a_command_that_is_run_again_begins_a_run_and_goes_on_with_it(again):
    is_resumed, config, folder = again("learner.num_passes=2")
    assert (is_resumed, config.stop.updates, folder.exists()) == (False, 50, False)
    folder.path.mkdir()
    folder.checkpoints.mkdir()  # so it lies there where a learner was killed at its first step
    assert again()[0] is False
    folder.begin(config)
    folder.let_go()
    # One that was killed before its first checkpoint, too.
    assert again("learner.num_passes=2")[:2] == (True, config)
    # A key that the file does not set is the run's own, as in any resume.
    assert again()[1].learner.num_passes == 2
    is_resumed, changed, _ = again("stop.updates=70")
    assert (is_resumed, changed.stop.updates) == (True, 70)
    with pytest.raises(ConfigError, match=r"^--set: env\.id: cannot change in a resumed run"):
        again("env.id=Acrobot-v1")


def test_a_file_that_is_given_again_and_differs_is_told_in_one_line(again, tmp_path):
    folder = again()[2]
    folder.begin(again()[1])
    folder.let_go()
    changed = MINE.replace("seed = 3", "seed = 4").replace("= 50", "= 9").replace("1e-4", "2e-4")
    (tmp_path / "mine.toml").write_text(changed)
    with pytest.raises(ConfigError) as caught:
        again()
    line = str(caught.value)
    assert line.startswith(f"--config: {tmp_path / 'mine.toml'} is not what this run has: seed (4 ")
    for told in ("stop.updates (9 in the file, 50 in the run)", "algorithm.optimizer_options ("):
        assert told in line
    assert "\n" not in line
    assert "lambda" not in line
    # It is the run's where it says so as well.
    sets = ("seed=4", "stop.updates=9", "algorithm.optimizer_options.eps=2e-4")
    assert again(*sets)[1].seed == 4


def test_a_command_that_is_run_again_ends_well_where_the_run_is_over(again):
    _, config, folder = again()
    folder.begin(config)
    folder.write_json("summary.json", DONE)
    folder.let_go()
    with pytest.raises(RunOver, match=r"^the run is over: stop\.updates is 50, and it came to 60"):
        again()
    # A damaged summary is no run that is over.
    for number in (10**400, float("inf"), float("nan")):
        folder.write_json("summary.json", {"updates": number})
        again()


def test_a_run_of_ranks_is_over_for_all_of_them_or_for_none(again, monkeypatch):
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for number, reached in ((0, 470.0), (1, 480.0)):
        for name, value in {**shared, "RANK": str(number), "LOCAL_RANK": "0"}.items():
            monkeypatch.setenv(name, value)
        _, config, folder = again()
        folder.begin(config)
        folder.write_json("summary.json", {"mean_return_100": reached})
        folder.let_go()
    # This is rank 1, which has come further, and then no further than the other.
    again("stop.mean_return=475")
    RunFolder(folder.path.parent.parent).write_json("summary.json", DONE)
    with pytest.raises(RunOver):
        again()


def test_a_command_that_is_run_again_too_early_is_to_be_run_once_more(again):
    """A resume by hand is refused as a mistake: somebody is there to see it."""
    _, config, folder = again()
    folder.begin(config)
    with pytest.raises(errors.InUseError, match="in use by a run of another learner"):
        again()
    folder.let_go()
    assert again()[0] is True


def test_of_commands_that_begin_a_run_at_one_moment_all_but_one_are_to_be_run_again(again):
    _, config, folder = again()
    _, _, other = again()
    folder.begin(config)
    with pytest.raises(errors.InUseError, match="in use by a run of another learner"):
        other.begin(config)
    folder.let_go()
    # So it is of those that go on with one.
    _, config, other = again()
    folder.hold()
    with pytest.raises(errors.InUseError, match="in use by a run of another learner"):
        other.begin(config)
    folder.let_go()


def test_a_command_that_is_run_again_names_its_folder_and_no_recording(tmp_path):
    auto = RunFlags(is_auto=True)
    with pytest.raises(ConfigError, match="--resume auto needs --run-dir, the folder of the run"):
        settle(auto)
    with pytest.raises(ConfigError, match="--record: wants a new file at each start"):
        settle(auto._replace(run_dir=tmp_path, record=Path("x")))
    # Without auto all is as it was.
    for flags in (RunFlags(), RunFlags(is_resumed=True)):
        assert settle(flags) is flags
