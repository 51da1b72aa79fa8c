"""Settings that must agree over sections, and what is read off a config."""

import json

import msgpack
import pytest

from impala_async.config.load import validate_config
from impala_async.config.run import ONLY_WHERE, ActorSettings
from impala_async.wire.messages import encode_settings
from tests.config.made import complaint, config_of, mistake

PPO = "algorithm.name=ppo"
LOCKSTEP = "pace.mode=lockstep"


# -------------------- keys that must agree

PARTS = "algorithm.num_minibatches"


def test_a_bound_between_keys():
    passes = f"learner.minibatch_buffer_size=2 learner.num_passes=5 {PARTS}=1"
    for key, bound, settings, says in (
        ("learner.max_lag", 8, passes, f"{PARTS} = 8"),
        ("learner.max_lag", 20, f"{PPO} {PARTS}=4 learner.num_passes=6", f"{PARTS} = 20"),
        ("learner.max_lag", 9, "learner.publish_every_updates=9", "(9) must not exceed max_lag"),
        (
            "learner.batch_columns",
            16,
            f"actor.num_envs=16 {PARTS}=1",
            "be at least actor.num_envs (16): an",
        ),
        ("learner.batch_columns", 6, f"{PPO} actor.num_envs=2 {PARTS}=6", f"{PARTS} (6) must not"),
        ("learner.num_passes", 3, "learner.init_num_passes=3", "exceed learner.num_passes (2)"),
        ("learner.num_passes", 9, "learner.init_num_passes=9", "exceed learner.num_passes (8)"),
    ):
        config_of(f"{settings} {key}={bound}")
        text = complaint(f"{settings} {key}={bound - 1}")
        assert says in text
        assert f"{key.partition('.')[2]} ({bound - 1})" in text


# Where another key has these values, keys (behind what they need) may have those; where it has the
# others, they may not.
USES = """
; actor.num_workers=2 | actor.sampler | parallel auto | serial vector
; env.num_spares=1 | actor.sampler | serial parallel auto | vector
; algorithm.rho_bar=2 algorithm.c_bar=none | algorithm.name | impala appo a.b:C | ppo a2c
algorithm.name=ppo ; algorithm.rho_bar=2 algorithm.c_bar=2 | algorithm.returns | vtrace | gae
; algorithm.pg_rho_bar=2 | algorithm.name | impala appo a.b:C | ppo a2c
; algorithm.clip=0.3 learner.stop_kl=0.1 | algorithm.name | appo ppo a.b:C | impala a2c
; algorithm.is_clip=3 algorithm.tau=0.5 algorithm.kl_coeff=1 | algorithm.name | appo a.b:C | ppo
; algorithm.target_update_every_updates=2 | algorithm.name | appo a.b:C | impala ppo
algorithm.name=appo ; algorithm.kl_target=0.02 | algorithm.kl_coeff | 0.1 | 0
; algorithm.optimizer_options.decay=0.9 | algorithm.optimizer | rmsprop rmsprop_tf | adam adamw
; algorithm.optimizer_options.momentum=0.9 | algorithm.optimizer | rmsprop rmsprop_tf | adam
; algorithm.optimizer_options.weight_decay=0.1 | algorithm.optimizer | adamw | adam rmsprop
; learner.minibatch_buffer_size=2 learner.publish_every_updates=2 | pace.mode | async | lockstep
learner.num_passes=3 ; learner.init_num_passes=1 | pace.mode | async | lockstep
; model.width=2 | model.name | impala_resnet | mlp a.b:C
; model.core_size=64 | model.core | lstm gru | none
; pace.lag=1 pace.on_loss=stop pace.cut_share=0.5 | pace.mode | lockstep | async
; policies.mapping=a:b policies.train=['a'] | policies.names | ['a','b'] | []
policies.copy_every_updates=3 ; policies.copies={b='a'} | policies.names | ['a','b'] | []
policies.names=['a','b'] ; policies.copy_every_updates=3 | policies.copies | {b='a'} | {}
; algorithm.grad_clip_by=value | algorithm.grad_clip | 1.0 | none
; evaluate.episodes=3 evaluate.actions=both stop.eval_return=9 | evaluate.every_s | 2.5 | none
"""
ROWS = [[cell.strip() for cell in row.split("|")] for row in USES.strip().splitlines()]


def keys_of(cell):
    return [setting.partition("=")[0] for setting in cell.partition(";")[2].split()]


@pytest.mark.parametrize(("cell", "choice", "fine", "idle"), ROWS)
def test_a_key_that_does_nothing_is_refused_and_its_default_never(cell, choice, fine, idle):
    settings = cell.replace(";", " ")
    for value in fine.split():
        config = config_of(f"{settings} {choice}={value}")
        # A resolved config holds all keys, so the defaults must go with everything.
        assert validate_config(config.model_dump(mode="json", by_alias=True)) == config
    for value in idle.split():
        lines = complaint(f"{settings} {choice}={value}").splitlines()
        for key in keys_of(cell):
            (line,) = [line for line in lines if line.startswith(f"--set: {key} (")]
            assert "does nothing w" in line
            assert ": drop it, or set " in line


def test_each_such_key_is_tried_and_the_fix_is_named():
    tried = {key for cell, *_ in ROWS for key in keys_of(cell)}
    assert tried == {key for keys in ONLY_WHERE.values() for key in keys.split()}
    name, core = "algorithm.name", "model.core"
    for settings, says in (
        (
            "algorithm.name=impala algorithm.clip=0.3",
            f"{name} is impala: drop it, or set {name} = appo or ppo",
        ),
        (
            f"{PPO} algorithm.rho_bar=2",
            "algorithm.returns is gae: drop it, or set algorithm.ret",
        ),
        ("model.core_size=64", f"where {core} is none: drop it, or set {core} = lstm or gru"),
        ("policies.mapping=a:b", "without policies.names: drop it, or set policies.names"),
    ):
        assert says in complaint(settings)


def test_a_batch_has_the_columns_of_all_agents_once_they_are_known():
    def broken(agents, settings=""):
        return list(config_of(settings).broken_columns(agents))

    (line,) = broken(9)
    assert "learner.batch_columns (64) must be at least actor.num_envs * 9 agents (72)" in line
    (line,) = broken(3, LOCKSTEP)
    assert "(16) must be train.num_actors * actor.num_envs * 3 agents (48)" in line
    (line,) = broken(1, f"{LOCKSTEP} learner.batch_columns=32")
    assert "(32) must be train.num_actors * actor.num_envs (16)" in line
    assert broken(1) == broken(8) == broken(1, LOCKSTEP) == []
    assert broken(3, f"{LOCKSTEP} learner.batch_columns=48") == []


def test_a_number_of_environments_is_given_where_it_decides_more():
    auto = "actor.num_envs=auto"
    config = config_of(auto)
    assert not [*config.broken_columns(), *config.broken_columns(1)]
    (line,) = config.broken_columns(3)
    assert line == "actor.num_envs (auto) does not go for 3 agents: wants a whole number"
    assert "actor.num_envs (auto) does not go in lockstep" in complaint(f"{auto} {LOCKSTEP}")


def test_a_sink_is_one_of_ours_or_of_a_module():
    config_of('report.sinks=["tensorboard",{name="wandb",kwargs={project="mine"}},"a.b:C"]')
    says = "sinks must be one of tensorboard, wandb, or package.module:Name of your own, got 'my/s"
    assert says in mistake('report.sinks=["my/sinks:Own"]')


# -------------------- what is read off a config


def test_what_an_actor_is_told():
    config = config_of("seed=3 actor.num_envs=2 learner.max_lag=7 env.kwargs.a=1")
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
    assert ActorSettings.model_validate(msgpack.unpackb(told)).env.kwargs == kwargs


def test_schedules_end_with_the_run_if_nothing_else_says():
    for settings, ends_at in (
        ("stop.env_steps=700", 700),
        ("stop.env_steps=700 algorithm.lr_end=none", None),
        ("stop.env_steps=700 algorithm.lr_end=0", 700),
        ("stop.env_steps=700 algorithm.entropy_cost_end=0", 700),
        ("stop.env_steps=700 algorithm.lr_end=0 algorithm.schedule_env_steps=500", 500),
        ("algorithm.lr_end=0 algorithm.schedule_env_steps=500", 500),
    ):
        assert config_of(settings).schedule_env_steps == ends_at
    assert config_of("stop.env_steps=700 algorithm.lr_end=0").idle_from is None
    says = "want an end: set algorithm.schedule_env_steps, or stop.env_steps"
    assert says in complaint("stop.mean_return=5 algorithm.lr_end=0")
    # The usual one does without.
    assert config_of("stop.mean_return=5").schedule_env_steps is None


# -------------------- what follows from other keys


def test_passes_and_parts_follow_from_others_unless_they_are_given():
    for settings, passes, parts in (
        ("", 8, 16),
        ("algorithm.name=impala", 1, 16),
        ("algorithm.name=appo", 8, 16),
        ("algorithm.name=a2c", 1, 4),
        ("algorithm.name=a.b:C", 1, 16),
        # A part has about 64 rows, in whole columns; or in rows alone.
        ("trajectory.rows=100 learner.batch_columns=8", 8, 8),
        ("trajectory.rows=100 learner.batch_columns=8 algorithm.shuffle_rows=true", 8, 12),
        ("trajectory.rows=20 learner.batch_columns=8", 8, 2),
        ("trajectory.rows=50 learner.batch_columns=16", 8, 12),
        ("trajectory.rows=1000 learner.batch_columns=16", 8, 16),
        ("learner.batch_columns=256 actor.num_envs=128", 8, 20),
        ("learner.batch_columns=4096 learner.queue_size=9", 8, 9),
        (f"{LOCKSTEP} train.num_actors=1 actor.num_envs=6", 8, 1),
        # Within what a small max_lag allows.
        ("learner.max_lag=144", 8, 3),
        ("learner.max_lag=35", 5, 1),
        ("learner.max_lag=5", 1, 1),
        ("learner.max_lag=120 learner.num_passes=5", 5, 4),
        ("learner.max_lag=119 learner.num_passes=5", 5, 3),
        ("learner.num_passes=64 learner.batch_columns=64", 64, 2),
        (f"learner.num_passes=3 {PARTS}=2 learner.max_lag=5", 3, 2),
    ):
        config = config_of(settings)
        found = config.learner.num_passes, config.algorithm.num_minibatches
        assert found == (passes, parts), settings
        assert validate_config(config.model_dump(mode="json", by_alias=True)) == config


def test_rows_are_shuffled_where_nothing_wants_whole_columns():
    shuffled = "algorithm.shuffle_rows=true"
    config_of(
        f"{shuffled} learner.batch_columns=8 trajectory.rows=4 {PARTS}=16 learner.max_lag=999"
    )
    for settings, says in (
        ("model.core=lstm", "algorithm.shuffle_rows does not go with model.core (lstm)"),
        ("algorithm.name=a.b:C", "algorithm: shuffle_rows does not go with a.b:C, which wants"),
        ("algorithm.intrinsic_reward=a.b:C", "algorithm: shuffle_rows does not go with a.b:C"),
        (
            f"learner.batch_columns=8 trajectory.rows=4 {PARTS}=33 learner.max_lag=999",
            "learner.batch_columns (8) * trajectory.rows (4): a minibatch has at least one row",
        ),
    ):
        assert says in complaint(f"{shuffled} {settings}")


def test_an_advantage_is_normalised_over_more_than_one_row():
    by_row = "algorithm.name=ppo learner.max_lag=999 learner.batch_columns=8"
    for settings in (
        f"{by_row} trajectory.rows=4 algorithm.shuffle_rows=true {PARTS}=32",
        # Some parts have a second one.
        f"{by_row} trajectory.rows=4 algorithm.shuffle_rows=true {PARTS}=17",
        f"{by_row} trajectory.rows=1 {PARTS}=8",
        f"{by_row} trajectory.rows=1 {PARTS}=1 learner.batch_columns=1 actor.num_envs=1",
    ):
        told = complaint(settings)
        assert " has one row, over which an advantage is normalised to 0" in told
        assert ("lower algorithm.num_minibatches" in told) == (f"{PARTS}=1 " not in settings)
        config_of(f"{settings} algorithm.normalize_advantages=false")
    config_of(f"{by_row} trajectory.rows=4 algorithm.shuffle_rows=true {PARTS}=16")
    config_of(f"{by_row} trajectory.rows=2 {PARTS}=8")


# -------------------- lockstep


def test_a_batch_of_lockstep_holds_every_actor_once():
    for actors, envs in ((3, 5), (4, 1024)):
        settings = f"{LOCKSTEP} train.num_actors={actors} actor.num_envs={envs}"
        config = config_of(settings)
        assert config.learner.batch_columns == actors * envs
        assert config_of(f"{settings} learner.batch_columns={actors * envs}") == config
        # The environments may have two agents.
        if actors * envs < 4096:
            config_of(f"{settings} learner.batch_columns={2 * actors * envs}")
        # As it is written into the run folder, and read again.
        assert validate_config(config.model_dump(mode="json", by_alias=True)) == config


def test_in_lockstep_one_batch_waits_and_no_other_size_goes():
    # So no memory is kept for more, whatever a preset says.
    preset = {"pace": {"mode": "lockstep"}, "learner": {"queue_size": 9}}
    assert config_of(**preset).learner.queue_size == 1
    for settings, says in (
        ("learner.batch_columns=24", "must be train.num_actors * actor.num_envs (16), and at m"),
        ("train.num_actors=1024", "(8192), and at most 4096, as it is when it is not set, or that"),
        (f"{PPO} {PARTS}=17", f"{PARTS} (17) must not exceed learner.batch_columns (16)"),
    ):
        assert says in complaint(f"{LOCKSTEP} {settings}")
