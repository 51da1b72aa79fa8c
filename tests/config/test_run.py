"""Every knob: its name, its default, what must agree, and what is read off. Their ranges are in
test_config_ranges.py."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from impala_async.config.load import load_config, validate_config
from impala_async.config.run import (
    ActorSettings,
    LearnerSection,
    RunConfig,
)
from impala_async.errors import ConfigError
from impala_async.wire.codec import decode_settings, encode_settings

# Used from outside: a key may be added, but none may vanish or change its default unnoticed.
DEFAULTS = {
    "seed": 0,
    "env.id": ...,
    "env.kwargs": {},
    "env.wrappers": (),
    "env.preprocess": "auto",
    "env.frame_stack": "auto",
    "env.action_mask_key": "auto",
    "env.squash_actions": False,
    "env.last_action": False,
    "env.last_reward": False,
    "env.step_timeout_s": 600.0,
    "env.probe": "learner",
    "algorithm.name": "impala",
    "algorithm.gamma": 0.99,
    "algorithm.lr": 5e-4,
    "algorithm.lr_end": None,
    "algorithm.entropy_cost": 0.01,
    "algorithm.entropy_cost_end": None,
    "algorithm.schedule_env_steps": None,
    "algorithm.value_cost": 0.5,
    "algorithm.grad_clip": 40.0,
    "algorithm.returns": None,
    "algorithm.rho_bar": 1.0,
    "algorithm.c_bar": 1.0,
    "algorithm.pg_rho_bar": 1.0,
    "algorithm.lambda": None,
    "algorithm.normalize_advantages": None,
    "algorithm.clip": 0.2,
    "algorithm.num_minibatches": 1,
    "algorithm.is_clip": 2.0,
    "algorithm.tau": 1.0,
    "algorithm.target_update_every_updates": 4,
    "algorithm.kl_coeff": 0.0,
    "algorithm.kl_target": 0.01,
    "algorithm.reward_clip": None,
    "algorithm.reward_scale": 1.0,
    "algorithm.normalize_returns": False,
    "algorithm.reduction": "mean",
    "algorithm.optimizer": "adam",
    "algorithm.optimizer_options.eps": None,
    "algorithm.optimizer_options.decay": 0.99,
    "algorithm.optimizer_options.momentum": 0.0,
    "algorithm.optimizer_options.weight_decay": 0.01,
    "model.name": "mlp",
    "model.hidden_sizes": None,
    "model.activation": None,
    "model.width": 1,
    "model.precision": "auto",
    "model.shared_torso": None,
    "model.core": None,
    "model.core_size": 256,
    "model.normalize_obs": False,
    "model.initial_std": 1.0,
    "model.state_dependent_std": False,
    "policies.names": (),
    "policies.mapping": "shuffled",
    "policies.train": None,
    "policies.copies": {},
    "policies.copy_every_updates": None,
    "trajectory.rows": 50,
    "actor.num_envs": 8,
    "actor.sampler": "auto",
    "actor.num_workers": None,
    "actor.device": "auto",
    "actor.threads": 1,
    "actor.compress": "auto",
    "actor.reconnect_s": 60.0,
    "learner.device": "auto",
    "learner.threads": 1,
    "learner.batch_columns": 16,
    "learner.num_passes": 1,
    "learner.minibatch_buffer_size": 1,
    "learner.init_num_passes": None,
    "learner.queue_size": 2,
    "learner.max_lag": 100,
    "learner.publish_every_updates": 1,
    "learner.report_every_s": 2.0,
    "learner.max_skipped_in_a_row": 50,
    "learner.stuck_dump_s": 30.0,
    "learner.stuck_end_s": 60.0,
    "learner.lease_s": 10.0,
    "bind.data": "tcp://127.0.0.1:5555",
    "bind.weights": "tcp://127.0.0.1:5556",
    "pace.mode": "async",
    "pace.lag": 0,
    "pace.on_loss": "go_on",
    "train.num_actors": 2,
    "stop.env_steps": None,
    "stop.updates": None,
    "stop.mean_return": None,
    "stop.wall_s": None,
    "checkpoint.every_s": 60.0,
    "checkpoint.keep": 3,
    "report.sinks": (),
}


def nested(settings):
    tree = {}
    for key, value in settings.items():
        *sections, leaf = key.split(".")
        inner = tree
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[leaf] = value
    return tree


def config_of(**settings):
    """Dotted keys, with two underscores for the dot."""
    dotted = {key.replace("__", "."): value for key, value in settings.items()}
    return validate_config(nested({"env.id": "X", **dotted}))


def keys_of(section, prefix=""):
    found = {}
    for name, field in section.model_fields.items():
        key = prefix + (field.alias or name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found |= keys_of(field.annotation, f"{key}.")
        else:
            required = field.is_required()
            found[key] = ... if required else field.get_default(call_default_factory=True)
    return found


def test_no_key_vanishes_or_changes_its_default():
    assert keys_of(RunConfig) == DEFAULTS


# -------------------- fields that must agree


def complaint(**settings):
    with pytest.raises(ConfigError) as caught:
        config_of(**settings)
    return str(caught.value)


def test_schedules_need_a_horizon():
    text = complaint(algorithm__entropy_cost_end=0.001)
    assert "algorithm: entropy_cost_end (0.001) needs schedule_env_steps" in text


def test_a_horizon_needs_a_schedule():
    text = complaint(algorithm__schedule_env_steps=7)
    assert "algorithm: schedule_env_steps (7) does nothing without lr_end or" in text


def test_the_ring_cannot_begin_with_more_passes_than_it_makes():
    text = complaint(learner__num_passes=2, learner__init_num_passes=3)
    assert "learner: init_num_passes (3) must not exceed num_passes (2)" in text


@pytest.mark.parametrize(("size", "passes"), [(1, 5), (2, 3), (4, 2)])
def test_max_lag_leaves_room_for_all_passes(size, passes):
    needed = size * (passes - 1)
    settings = {"learner__minibatch_buffer_size": size, "learner__num_passes": passes}
    config_of(**settings, learner__max_lag=needed)
    text = complaint(**settings, learner__max_lag=needed - 1)
    assert f"learner.max_lag ({needed - 1}) must be at least" in text
    assert f"(num_passes - 1) * algorithm.num_minibatches = {needed}" in text


def test_a_minibatch_has_a_column():
    ppo = {"algorithm__name": "ppo", "actor__num_envs": 4, "learner__batch_columns": 6}
    config_of(**ppo, algorithm__num_minibatches=6)
    text = complaint(**ppo, algorithm__num_minibatches=7)
    assert "algorithm.num_minibatches (7) must not exceed learner.batch_columns (6)" in text


def test_max_lag_leaves_room_for_all_passes_of_all_minibatches():
    ppo = {"algorithm__name": "ppo", "algorithm__num_minibatches": 4, "learner__num_passes": 6}
    config_of(**ppo, learner__max_lag=20)
    text = complaint(**ppo, learner__max_lag=19)
    assert (
        "learner.max_lag (19) must be at least minibatch_buffer_size * (num_passes - 1) *" in text
    )
    assert "algorithm.num_minibatches = 20" in text


@pytest.mark.parametrize("device", ["gpu", "meta", "cuda:", "cuda:x", "mps", ""])
def test_a_device_is_one_of_those_that_can_be(device):
    text = complaint(learner__device=device)
    assert text == f"config: learner.device: wants auto, cpu, cuda or cuda:N, got {device!r}"


@pytest.mark.parametrize(
    ("lease_s", "heartbeat_s", "starved_after_s"), [(1, 0.2, 0.5), (10, 2, 5), (1e9, 2, 5)]
)
def test_what_follows_a_lease(lease_s, heartbeat_s, starved_after_s):
    learner = LearnerSection(lease_s=lease_s)
    assert (learner.heartbeat_s, learner.starved_after_s) == (heartbeat_s, starved_after_s)


def test_a_message_fits_into_a_batch():
    config_of(actor__num_envs=16, learner__batch_columns=16)
    text = complaint(actor__num_envs=17, learner__batch_columns=16)
    assert "learner.batch_columns (16) must be at least actor.num_envs (17)" in text


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
    assert settings.model_dump() == {
        "seed": 3,
        "env": config.env.model_dump(),
        "model": config.model.model_dump(),
        "policies": config.policies.model_dump(),
        "trajectory": {"rows": 50},
        "actor": config.actor.model_dump(),
        "pace": {"mode": "async", "lag": 0, "on_loss": "go_on"},
        "max_lag": 7,
    }
    assert ActorSettings.model_validate(settings.model_dump(mode="json")) == settings


@pytest.mark.parametrize(
    ("passes", "queue", "ring", "lag"), [(1, 2, 1, 4), (1, 1, 1, 3), (2, 2, 2, 10)]
)
def test_expected_lag(passes, queue, ring, lag):
    section = LearnerSection(num_passes=passes, queue_size=queue, minibatch_buffer_size=ring)
    assert section.expected_lag_updates == lag


def test_defaults_warn_of_nothing():
    assert config_of().warnings() == []


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"stop__env_steps": 1000}, None),
        ({"stop__env_steps": 1001}, "goes on to stop.env_steps (1,001) without learning: set"),
        ({}, "goes on until it is stopped without learning: set"),
        ({"stop__wall_s": 5}, "goes on until it is stopped without learning: set"),
        ({"stop__mean_return": 5}, None),
        ({"stop__mean_return": 5, "stop__env_steps": 2000}, "schedule_env_steps to 2_000, or"),
        ({"algorithm__lr_end": 1e-4}, None),
        ({"algorithm__lr_end": None, "algorithm__entropy_cost_end": 0}, None),
    ],
)
def test_a_rate_of_0_before_the_end_is_warned_of(settings, says):
    rates = {"algorithm__lr_end": 0, "algorithm__schedule_env_steps": 1000}
    warnings = config_of(**{**rates, **settings}).warnings(999)
    assert len(warnings) == (says is not None)
    assert not warnings or says in warnings[0]


@pytest.mark.parametrize(
    ("ends", "says"),
    [
        ({"lr_end": 0}, "algorithm.lr stays 0, so nothing is learned; set"),
        ({"lr_end": 1e-4}, "algorithm.lr stays 0.0001; set"),
        (
            {"lr_end": 1e-4, "entropy_cost_end": 0},
            "algorithm.lr stays 0.0001 and algorithm.entropy_cost stays 0; set",
        ),
    ],
)
def test_a_resumed_run_whose_schedule_is_over_says_what_it_does(ends, says):
    rates = {f"algorithm__{key}": value for key, value in ends.items()}
    config = config_of(**rates, algorithm__schedule_env_steps=1000, stop__env_steps=3000)
    (warning,) = config.warnings(1500)
    assert warning.startswith("algorithm.schedule_env_steps (1,000) is over at env step 1,500: ")
    assert f"{says} algorithm.schedule_env_steps to 3_000 to go on from there" in warning


def test_a_long_way_from_acting_to_learning_is_warned_of():
    assert config_of(learner__queue_size=6).warnings() == []
    (warning,) = config_of(learner__queue_size=7).warnings()
    assert "9 updates old" in warning
    assert "about 8" in warning
    assert "learner.queue_size" in warning


def test_minibatches_are_updates_too():
    vtrace = {"algorithm__returns": "vtrace", "algorithm__num_minibatches": 3}
    (warning,) = config_of(algorithm__name="ppo", **vtrace).warnings()
    assert "12 updates old" in warning
    assert "algorithm.num_minibatches" in warning
    assert "GAE" not in warning


@pytest.mark.parametrize(
    ("name", "fix"),
    [("ppo", "lockstep, or algorithm.returns to vtrace"), ("a2c", "lockstep")],
)
def test_returns_that_take_old_data_for_new_are_warned_of(name, fix):
    """However short the queues are: nothing corrects these for what acted."""
    (warning,) = config_of(algorithm__name=name, learner__queue_size=1).warnings()
    assert "3 updates old" in warning
    assert warning.endswith(f"returns by GAE take it for new: set pace.mode to {fix}")
    assert config_of(algorithm__name=name, pace__mode="lockstep").warnings() == []
    assert config_of(algorithm__name="ppo", algorithm__returns="vtrace").warnings() == []


@pytest.mark.parametrize(
    ("name", "fix"), [("ppo", "to 0, or algorithm.returns to vtrace"), ("a2c", "to 0")]
)
def test_in_lockstep_a_lag_is_old_data_too(name, fix):
    settings = {**LOCKSTEP, "pace__lag": 1, "algorithm__name": name}
    (warning,) = config_of(**settings).warnings()
    assert warning.startswith("pace.lag (1) makes all data a version old, and returns by GAE")
    assert warning.endswith(f": set pace.lag {fix}")


@pytest.mark.parametrize(
    ("passes", "lag", "is_warned"), [(8, 0, False), (9, 0, True), (4, 1, False), (5, 1, True)]
)
def test_in_lockstep_vtrace_holds_as_far_as_elsewhere(passes, lag, is_warned):
    settings = {**LOCKSTEP, "learner__num_passes": passes, "pace__lag": lag}
    warnings = config_of(**settings).warnings()
    assert len(warnings) == is_warned
    for warning in warnings:
        assert f"{passes * (lag + 1)} updates are made" in warning
        assert "V-trace holds to about 8" in warning
    # What its clip bounds is its own affair.
    assert config_of(**settings, algorithm__name="appo").warnings() == []


@pytest.mark.parametrize("mode", ["lockstep", "async"])
def test_passes_that_a2c_cannot_correct_are_warned_of(mode):
    def warnings(**settings):
        found = config_of(pace__mode=mode, **settings).warnings()
        return [warning for warning in found if warning.startswith("learner.num_passes")]

    (warning,) = warnings(algorithm__name="a2c", learner__num_passes=8)
    assert warning.startswith("learner.num_passes (8): a2c has no ratio")
    assert warning.endswith("set learner.num_passes to 1, or algorithm.name to ppo")
    assert warnings(algorithm__name="a2c") == []
    assert warnings(algorithm__name="ppo", learner__num_passes=8) == []


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9))
def test_a_config_there_and_back(passes, queue, ring):
    config = config_of(
        learner__num_passes=passes,
        learner__queue_size=queue,
        learner__minibatch_buffer_size=ring,
        algorithm__lambda=0.9,
        model__hidden_sizes=[3, 4],
    )
    assert validate_config(config.model_dump(mode="json", by_alias=True)) == config


def test_an_argument_of_an_environment_may_be_infinite():
    kwargs = {"healthy_z_range": [0.5, float("inf")], "floor": -float("inf")}
    config = validate_config({"env": {"id": "Hopper-v5", "kwargs": kwargs}})
    dumped = config.model_dump_json(by_alias=True)
    assert type(config).model_validate_json(dumped).env.kwargs == kwargs
    assert validate_config(json.loads(dumped)).env.kwargs == kwargs
    told = encode_settings(ActorSettings.of(config).model_dump(mode="json"))
    assert ActorSettings.model_validate(decode_settings(told)).env.kwargs == kwargs


def test_weights_come_out_before_all_data_is_too_old():
    with pytest.raises(ConfigError, match=r"publish_every_updates \(10\) .* max_lag \(3\)"):
        load_config(
            None,
            ["env.id=X", "learner.max_lag=3", "learner.publish_every_updates=10"],
        )


# -------------------- faster updates


# -------------------- lockstep

LOCKSTEP = {"pace__mode": "lockstep"}


def test_what_only_lockstep_knows_is_refused_without_it():
    for key, value in (("lag", 1), ("on_loss", "stop")):
        text = complaint(**{f"pace__{key}": value})
        assert f"pace: {key} does nothing in mode async" in text
        config_of(**LOCKSTEP, **{f"pace__{key}": value})


@pytest.mark.parametrize(("actors", "envs"), [(2, 8), (3, 5), (1, 1), (4, 1024)])
def test_a_batch_of_lockstep_holds_every_actor_once(actors, envs):
    settings = {**LOCKSTEP, "train__num_actors": actors, "actor__num_envs": envs}
    config = config_of(**settings)
    assert config.learner.batch_columns == actors * envs
    assert config_of(**settings, learner__batch_columns=actors * envs) == config
    # As it is written into the run folder, and read again.
    assert validate_config(config.model_dump(mode="json", by_alias=True)) == config


def test_a_batch_of_lockstep_cannot_be_of_another_size():
    text = complaint(**LOCKSTEP, learner__batch_columns=24)
    assert "learner.batch_columns (24) must be train.num_actors * actor.num_envs (16)" in text
    # Of environments with two agents.
    assert config_of(**LOCKSTEP, learner__batch_columns=32).learner.batch_columns == 32
    text = complaint(**LOCKSTEP, train__num_actors=1024)
    assert "train.num_actors * actor.num_envs (8192) is a batch" in text
    assert "at most 4096 columns" in text


@pytest.mark.parametrize("key", ["minibatch_buffer_size", "publish_every_updates"])
def test_lockstep_has_one_batch_and_one_version_at_a_time(key):
    text = complaint(**LOCKSTEP, **{f"learner__{key}": 2})
    assert f"pace.mode lockstep: learner.{key} (2) must be 1" in text


def test_in_lockstep_every_batch_has_all_its_passes():
    settings = {**LOCKSTEP, "learner__num_passes": 3}
    config_of(**settings, learner__init_num_passes=3)
    text = complaint(**settings, learner__init_num_passes=1)
    assert "learner.init_num_passes (1) does nothing" in text


def test_in_lockstep_passes_and_minibatches_make_nothing_older_for_ppo():
    ppo = {"algorithm__name": "ppo", "algorithm__num_minibatches": 8, "learner__num_passes": 200}
    assert config_of(**LOCKSTEP, **ppo).warnings() == []


def test_in_lockstep_one_batch_waits_at_most():
    """So no memory is kept for more, whatever a preset says."""
    assert config_of(**LOCKSTEP, learner__queue_size=9).learner.queue_size == 1


def test_minibatches_are_of_the_columns_that_lockstep_has():
    ppo = {"algorithm__name": "ppo", "actor__num_envs": 2, "train__num_actors": 2}
    config_of(**LOCKSTEP, **ppo, algorithm__num_minibatches=4)
    text = complaint(**LOCKSTEP, **ppo, algorithm__num_minibatches=5)
    assert "algorithm.num_minibatches (5) must not exceed learner.batch_columns (4)" in text
