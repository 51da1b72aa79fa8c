"""A mistake is told with its source, in a user's words, and with the key that was meant."""

import pytest

from impala_async.config.mistakes import SYNONYMS, key_like
from tests.config.made import mistake, mistakes

MEANT = {
    "learner.num_pases": "learner.num_passes",
    "algorithm.lambda_": "algorithm.lambda",
    "learner.num_envs": "actor.num_envs",
    "actor.batch_columns": "learner.batch_columns",
    "num_passes": "learner.num_passes",
    "stop.walls": "stop.wall_s",
    "num_env": "actor.num_envs",
    "learning_rate": "algorithm.lr",
    "total-timesteps": "stop.env_steps",
    "algorithm.rnd": "algorithm.intrinsic_reward",
    "clip_obs": "model.normalize_obs",
    "env.action_repeat": "env.wrappers",
    "env.frame_skip": "env.kwargs",
    "device": "learner.device",
    "env.name": "env.id",
    "algorithm.epochs": "learner.num_passes",
    "algorithm.Lr": "algorithm.lr",
    "SEED": "seed",
    "trajectory.bptt_horizon": "trajectory.rows",
    "lerner": "learner",
    "xyzzy": None,
    "algorithm.foo": None,
    "env.wrappers[0].nome": None,
}


def test_unknown_keys_are_refused_with_a_suggestion():
    for key, meant in MEANT.items():
        assert key_like(key) == meant
    assert mistake("learner.num_pases=1") == (
        "--set: learner.num_pases: unknown key; did you mean learner.num_passes?"
    )
    for override, says in (
        ("lerner.num_passes=2", "lerner: unknown key; did you mean learner?"),
        # Among the keys of sections there is `pace.mode`, which looks more like it.
        ("modle.name=mlp", "modle: unknown key; did you mean model?"),
        # A name in an unknown section is a hint too.
        ("ppo.clip_range=1", "ppo: unknown key; did you mean algorithm.clip?"),
        ("foo.bar=1", "foo: unknown key"),
    ):
        assert mistake(override) == f"--set: {says}"
    # Where others count something else.
    for override, unit in (
        ("algorithm.vf_coef=1", "algorithm.value_cost (the weight of half the squared error)?"),
        ("batch_size=64", "algorithm.num_minibatches (parts of a batch, not their rows)?"),
    ):
        assert mistake(override).endswith(f"unknown key; did you mean {unit}")


def test_each_synonym_is_of_a_key_of_ours_and_none_stands_twice():
    assert all(key_like(key) == key for key in SYNONYMS)
    names = [name for names in SYNONYMS.values() for name in names.split()]
    assert len(names) == len(set(names))


def test_what_is_wanted_is_told_in_a_users_words():
    for override, says in (
        ("model.hidden_sizes=64", "wants a list like [64, 64] that is not empty, or none, got 64"),
        ("model.hidden_sizes=[]", "wants a list like [64, 64] that is not empty, or none, got []"),
        ("policies.names=5", 'wants a list like ["main", "past"], got 5'),
        ("env.wrappers='a:C'", 'wants a list like ["package.module:Name"], got "a:C"'),
        ("learner.threads=1.5", "wants a whole number from 1 to 1024, got 1.5"),
        ("algorithm.lr='3e-4'", 'wants a number over 0, got "3e-4"; a number has no quotes'),
        ("stop.env_steps='9'", 'number over 0, or none, got "9"; a number has no quotes'),
        ("learner.num_passes=x", 'wants a whole number from 1 up, or auto, got "x"'),
        ("seed=0x" + "9" * 5000, "to 2147483647, got one that is too long or too deep to be shown"),
        ("stop.env_steps=x", 'wants a whole number over 0, or none, got "x"'),
        (f"stop.env_steps={2**63}", f"whole number over 0, or none, of 63 bits, got {2**63}"),
        ("algorithm.gamma=2", "wants a number from 0 to 1, got 2"),
        ("algorithm.lr=nan", "wants a number over 0, got NaN"),
        ("model.shared_torso=7", "wants true or false, or none, got 7"),
        ("model.activation=gelu", 'wants tanh or relu, or none, got "gelu"'),
        ("algorithm.optimizer=sgd", 'wants adam, adamw, rmsprop or rmsprop_tf, got "sgd"'),
        ("env.id=''", 'wants text that is not empty, got ""'),
        ("learner.device=5", "wants text, got 5"),
        ("env.kwargs=5", "wants a table like {size = 5}, got 5"),
        ("learner=5", "wants keys of its own, not a value, got 5"),
        ("algorithm=ppo", 'a value, got "ppo"; did you mean algorithm.name="ppo"?'),
        ("bind=5555", "not a value, got 5555; did you mean bind.data=5555?"),
    ):
        line = mistake(override)
        assert line.startswith(f"--set: {override.partition('=')[0]}: ")
        assert line.endswith(says)


def test_a_place_within_a_value_is_named_and_a_long_value_cut_short():
    for override, says in (
        (
            "model.hidden_sizes=[64, '32']",
            "model.hidden_sizes: wants a list like [64, 64] that is not "
            'empty, or none, got [64, "32"]',
        ),
        ("policies.copies={a=5}", "policies.copies.a: wants a string, got 5"),
        ("env.wrappers=[{name='a:C', kwargs=1}]", "env.wrappers[0].kwargs: wants a dictionary"),
        ("report.sinks=['wandb', {kwargs={}}]", "report.sinks[1].name: required"),
        ("report.sinks=[1]", "report.sinks[0]: wants keys of its own, not a value, got 1"),
    ):
        assert mistake(override).startswith(f"--set: {says}")
    line = mistake(f"env.kwargs='{'x' * 5000}'")
    assert line.endswith("x...")
    assert len(line) < 300


def test_an_environment_is_required_and_the_hint_says_how(toml):
    hint = 'for example --set env.id=CartPole-v1, or id = "CartPole-v1" in section [env]'
    says = f"env.id: required ({hint})"
    assert mistakes(None) == mistakes(None, "env.kwargs={}") == [f"config: {says}"]
    for text in ("[env]\nkwargs = {}\n", "", "seed = 1\n"):
        toml.write_text(text)
        assert mistakes(toml) == [f"{toml}: {says}"]


@pytest.mark.parametrize("override", ["seed", "", "=5", "a..b=1", ".a=1", "a.=1", "--seed 5"])
def test_all_mistakes_are_told_at_once_each_with_its_source(toml, override):
    toml.write_text("sede = 1\n[env]\nid = ''\n[learner]\nmax_lag = 0\n")
    overrides = ("env.id.x=1", "seed=-1", "actor.compress=best", "seed=-2", "algorithm.lr=-1")
    first, second, *others = mistakes(toml, override, *overrides)
    form = "is not of the form section.key=value, for example learner.num_passes=2"
    assert first == f"--set: {override!r} {form}"
    assert second == "--set: env.id.x: id is a value, without keys"
    assert sorted(others) == [
        '--set: actor.compress: wants auto, on or off, got "best"',
        "--set: algorithm.lr: wants a number over 0, got -1",
        "--set: seed: wants a whole number from 0 to 2147483647, got -2",
        f'{toml}: env.id: wants text that is not empty, got ""',
        f"{toml}: learner.max_lag: wants a whole number from 1 to 10000, got 0",
        f"{toml}: sede: unknown key; did you mean seed?",
    ]


def test_a_mistake_between_keys_names_all_its_sources(toml):
    agree = "publish_every_updates (5) must not exceed max_lag (2), or all data is too old before "
    toml.write_text("[env]\nid = 'X'\n[learner]\nmax_lag = 2\n")
    (line,) = mistakes(toml, "learner.publish_every_updates=5")
    assert line.startswith(f"--set and {toml}: learner: {agree}")
    toml.write_text("[env]\nid = 'X'\n[learner]\nmax_lag = 2\npublish_every_updates = 5\n")
    (line,) = mistakes(toml, "seed=1")
    assert line.startswith(f"{toml}: learner: {agree}")
    # A section of the command line takes the place of the file's.
    (line,) = mistakes(toml, "learner={publish_every_updates=2000}")
    assert line.startswith(
        "--set: learner: publish_every_updates (2000) must not exceed max_lag (1000)"
    )
    assert mistake("learner.batch_columns=4").startswith("--set: learner.batch_columns (4) must")
    overrides = ("learner.num_passes=auto", "learner.minibatch_buffer_size=2")
    lines = mistakes(None, "env.id=X", *overrides, "learner.publish_every_updates=2000")
    assert [line.partition(" (")[0] for line in lines] == [
        "--set: learner: num_passes",
        "--set: learner: publish_every_updates",
    ]
