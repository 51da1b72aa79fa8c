"""Settings that must agree over sections, and what is read off a config."""

import json

import pytest
from pydantic import ValidationError

from impala_async.config.load import load_config, validate_config
from impala_async.config.run import SINKS, ActorSettings, LearnerSection
from impala_async.wire.codec import decode_settings, encode_settings
from tests.config.made import LOCKSTEP, complaint, config_of, mistake

PPO = {"algorithm__name": "ppo"}


# -------------------- fields that must agree


@pytest.mark.parametrize(
    ("key", "bound", "settings", "says"),
    [
        (
            "learner__max_lag",
            8,
            {"learner__minibatch_buffer_size": 2, "learner__num_passes": 5},
            "learner.max_lag (7) must be at least minibatch_buffer_size * (num_passes - 1) * "
            "algorithm.num_minibatches = 8",
        ),
        (
            "learner__max_lag",
            20,
            {**PPO, "algorithm__num_minibatches": 4, "learner__num_passes": 6},
            "algorithm.num_minibatches = 20",
        ),
        (
            "learner__batch_columns",
            16,
            {"actor__num_envs": 16},
            "learner.batch_columns (15) must be at least actor.num_envs (16)",
        ),
        (
            "learner__batch_columns",
            6,
            {**PPO, "actor__num_envs": 2, "algorithm__num_minibatches": 6},
            "algorithm.num_minibatches (6) must not exceed learner.batch_columns (5)",
        ),
        (
            "learner__num_passes",
            3,
            {"learner__init_num_passes": 3},
            "learner: init_num_passes (3) must not exceed num_passes (2)",
        ),
        (
            "learner__max_lag",
            9,
            {"learner__publish_every_updates": 9},
            "learner: publish_every_updates (9) must not exceed max_lag (8)",
        ),
    ],
)
def test_a_bound_between_keys(key, bound, settings, says):
    config_of(**settings, **{key: bound})
    assert says in complaint(**settings, **{key: bound - 1})


def test_a_batch_has_the_columns_of_all_agents_once_they_are_known():
    def broken(agents, **settings):
        return list(config_of(**settings).broken_columns(agents))

    (line,) = broken(3)
    assert "learner.batch_columns (16) must be at least actor.num_envs * 3 agents (24)" in line
    (line,) = broken(3, **LOCKSTEP)
    assert "(16) must be train.num_actors * actor.num_envs * 3 agents (48)" in line
    (line,) = broken(1, **LOCKSTEP, learner__batch_columns=32)
    assert "(32) must be train.num_actors * actor.num_envs (16)" in line
    assert broken(1) == broken(2) == broken(1, **LOCKSTEP) == []
    assert broken(3, **LOCKSTEP, learner__batch_columns=48) == []


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("wandb", 'report.sinks: wants a list, for example ["package.module:Name"] or'),
        ('[{name = "wandb", project = "mine"}]', "report.sinks: wants a list"),
        ('["wandbb"]', f"sinks must be one of {', '.join(SINKS)}, or package.module:Name of your"),
        ('["my/sinks:Own"]', "got 'my/sinks:Own'"),
    ],
)
def test_what_names_no_sink_is_refused(typed, says):
    assert says in mistake(f"report.sinks={typed}")


def test_sinks_are_names_and_tables():
    typed = 'report.sinks=["tensorboard", {name = "wandb", kwargs = {project = "mine"}}, "a.b:C"]'
    config = load_config(None, ["env.id=X", typed])
    assert [sink.name for sink in config.report.sinks] == ["tensorboard", "wandb", "a.b:C"]
    assert config.report.sinks[1].kwargs == {"project": "mine"}
    assert validate_config(config.model_dump(mode="json", by_alias=True)) == config


# -------------------- what is read off a config


def test_sections_are_frozen():
    config = config_of()
    with pytest.raises(ValidationError):
        config.learner.num_passes = 2
    with pytest.raises(ValidationError):
        config.learner = LearnerSection()


def test_what_an_actor_is_told():
    config = config_of(seed=3, actor__num_envs=2, learner__max_lag=7, env__kwargs={"a": 1})
    settings = ActorSettings.of(config)
    shared = config.model_dump(include=ActorSettings.model_fields.keys() - {"max_lag"})
    assert settings.model_dump() == {**shared, "max_lag": 7}
    assert ActorSettings.model_validate(settings.model_dump(mode="json")) == settings


def test_an_argument_of_an_environment_may_be_infinite():
    kwargs = {"healthy_z_range": [0.5, float("inf")], "floor": -float("inf")}
    config = validate_config({"env": {"id": "Hopper-v5", "kwargs": kwargs}})
    dumped = config.model_dump_json(by_alias=True)
    assert type(config).model_validate_json(dumped).env.kwargs == kwargs
    assert validate_config(json.loads(dumped)).env.kwargs == kwargs
    told = encode_settings(ActorSettings.of(config).model_dump(mode="json"))
    assert ActorSettings.model_validate(decode_settings(told)).env.kwargs == kwargs


# -------------------- what is warned of


@pytest.mark.parametrize(
    ("settings", "trained", "says"),
    [
        ({"stop__env_steps": 1000}, 999, None),
        ({"stop__env_steps": 1001}, 0, "goes on to stop.env_steps (1,001) without learning"),
        ({"stop__env_steps": 3000}, 1500, "is over at env step 1,500: algorithm.lr stays 0, so"),
        ({}, 0, "goes on without learning: raise that, or set algorithm.lr_end over 0"),
        ({"stop__wall_s": 5}, 0, "goes on without learning"),
        ({"stop__mean_return": 5}, 999, None),
        ({"stop__mean_return": 5}, 1000, "is over at env step 1,000: algorithm.lr stays 0, so"),
        ({"algorithm__lr_end": 1e-4}, 1000, "lr stays 0.0001; raise it to go on from there"),
        ({"stop__updates": 5}, 0, None),
        ({"stop__mean_return": 5, "stop__env_steps": 2000}, 0, "to stop.env_steps (2,000)"),
        ({"algorithm__lr_end": 1e-4}, 0, None),
        ({"algorithm__lr_end": None, "algorithm__entropy_cost_end": 0}, 0, None),
    ],
)
def test_a_rate_of_0_before_the_end_and_a_schedule_that_is_over_are_told(settings, trained, says):
    rates = {"algorithm__lr_end": 0, "algorithm__schedule_env_steps": 1000}
    warnings = config_of(**{**rates, **settings}).warnings(trained)
    assert len(warnings) == (says is not None)
    assert not warnings or says in warnings[0]


GAE = "returns by GAE take it for new: set pace.mode to lockstep and pace.lag to 0"
LAGGED = {**LOCKSTEP, "pace__lag": 1}
THREE = {"algorithm__num_minibatches": 3}


@pytest.mark.parametrize(
    ("settings", "lag", "says"),
    [
        ({}, 0, None),
        ({"learner__queue_size": 6}, 0, None),
        ({"learner__queue_size": 7}, 9, "learner.minibatch_buffer_size or"),
        ({"learner__num_passes": 2, "learner__minibatch_buffer_size": 2}, 10, "about 8: lower"),
        ({**PPO, "algorithm__returns": "vtrace", **THREE}, 12, "or algorithm.num_minibatches"),
        ({**PPO, "algorithm__returns": "vtrace"}, 0, None),
        # However short the queues are: nothing corrects these for what acted.
        ({**PPO, "learner__queue_size": 1}, 3, f"{GAE}, or algorithm.returns to vtrace"),
        ({"algorithm__name": "a2c", "learner__queue_size": 1}, 3, GAE),
        ({**PPO, **LOCKSTEP, "algorithm__num_minibatches": 8, "learner__num_passes": 50}, 0, None),
        ({**PPO, **LAGGED}, 2, f"{GAE}, or algorithm.returns to vtrace"),
        ({"algorithm__name": "a2c", **LAGGED}, 2, GAE),
        ({**LOCKSTEP, "learner__num_passes": 8}, 0, None),
        ({**LOCKSTEP, "learner__num_passes": 9}, 9, "lower learner.num_passes or pace.lag"),
        ({**LAGGED, "learner__num_passes": 4}, 0, None),
        ({**LAGGED, "learner__num_passes": 5}, 10, "V-trace holds to about 8: lower"),
        # Its clip bounds what passes can do.
        ({**LAGGED, "learner__num_passes": 5, "algorithm__name": "appo"}, 0, None),
    ],
)
def test_a_long_way_from_acting_to_learning_is_warned_of(settings, lag, says):
    warnings = config_of(**settings).warnings()
    assert len(warnings) == (says is not None)
    if says is not None:
        assert warnings[0].startswith(f"a trajectory may be {lag} updates old")
        assert says in warnings[0]
        assert warnings[0].endswith(says) or says != GAE


@pytest.mark.parametrize("mode", ["lockstep", "async"])
def test_passes_that_a2c_cannot_correct_are_warned_of(mode):
    def warnings(**settings):
        found = config_of(pace__mode=mode, **settings).warnings()
        return [warning for warning in found if warning.startswith("learner.num_passes")]

    (warning,) = warnings(algorithm__name="a2c", learner__num_passes=8)
    assert warning.startswith("learner.num_passes (8): a2c has no ratio")
    assert warning.endswith("set learner.num_passes to 1, or algorithm.name to ppo")
    assert warnings(algorithm__name="a2c") == []
    assert warnings(**PPO, learner__num_passes=8) == []


# -------------------- lockstep


@pytest.mark.parametrize(("actors", "envs"), [(2, 8), (3, 5), (1, 1), (4, 1024)])
def test_a_batch_of_lockstep_holds_every_actor_once(actors, envs):
    settings = {**LOCKSTEP, "train__num_actors": actors, "actor__num_envs": envs}
    config = config_of(**settings)
    assert config.learner.batch_columns == actors * envs
    assert config_of(**settings, learner__batch_columns=actors * envs) == config
    # Of environments with two agents, perhaps.
    if actors * envs < 4096:
        config_of(**settings, learner__batch_columns=2 * actors * envs)
    # As it is written into the run folder, and read again.
    assert validate_config(config.model_dump(mode="json", by_alias=True)) == config


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"learner__batch_columns": 24},
            "must be train.num_actors * actor.num_envs (16), as it is",
        ),
        (
            {"train__num_actors": 1024},
            "actor.num_envs (8192) is a batch, and that has at most 4096",
        ),
        ({"learner__minibatch_buffer_size": 2}, "learner.minibatch_buffer_size (2) must be 1"),
        ({"learner__publish_every_updates": 2}, "learner.publish_every_updates (2) must be 1"),
        (
            {"learner__num_passes": 3, "learner__init_num_passes": 1},
            "learner.init_num_passes (1) does nothing",
        ),
        (
            {**PPO, "algorithm__num_minibatches": 17},
            "algorithm.num_minibatches (17) must not exceed learner.batch_columns (16)",
        ),
    ],
)
def test_what_lockstep_cannot_have_is_refused(settings, says):
    assert says in complaint(**LOCKSTEP, **settings)


def test_what_only_lockstep_knows_is_refused_without_it():
    for key, value in (("lag", 1), ("on_loss", "stop")):
        text = complaint(**{f"pace__{key}": value})
        assert f"pace: {key} ({value}) does nothing where mode is async: drop it, or set" in text
        config_of(**LOCKSTEP, **{f"pace__{key}": value})


def test_in_lockstep_one_batch_waits_at_most():
    """So no memory is kept for more, whatever a preset says."""
    assert config_of(**LOCKSTEP, learner__queue_size=9).learner.queue_size == 1
    config_of(**LOCKSTEP, learner__num_passes=3, learner__init_num_passes=3)
